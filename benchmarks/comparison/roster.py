"""Who takes part in compare.py, under which names, and what keeps someone out."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from comparison.contestants import Contestant, Launch, Server, Worker
from comparison.limits import GgufSizes, WeightBytes, gguf_sizes, hamburger_bytes
from comparison.processes import START
from hamburger.model.checkpoints.sources import ModelSource, resolve_source

BATCHED = 512  # most prompt and decode tokens of one step: our default, given to all
SERVE = "import sys; from hamburger.server.cli import main; sys.exit(main())"
NOT_GGUF = "the base model is no GGUF file"
TWO_BYTES = 2  # of a bfloat16
WAYS = ("generate", "lookup", "batching")  # of transformers


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the tables: a contestant's process, asked in one way. weights: None where they cannot be told.
    group: most tokens of its groups, of a worker of ours. most_streams: beyond which it cannot do it."""

    name: str
    process: str
    confidence: float | None = None
    weights: WeightBytes | None = None
    group: int | None = None
    most_streams: float = math.inf


@dataclass(frozen=True, slots=True)
class Setup:
    """What all contestants are started with. model None: the embedded default; base: a plain base model."""

    model: str | None
    base: str
    context: int
    threads: int
    kv_cache_memory: int
    confidences: Sequence[float]
    most_streams: int
    logs: Path
    end_tokens: Sequence[int] = ()
    llama_server: Path | None = None


@dataclass(slots=True)
class Roster:
    """processes: by name; entries: in the order of the tables; left_out: name -> why."""

    processes: dict[str, Contestant] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def add(self, process: str, contestant: Contestant, *entries: Entry) -> None:
        self.processes[process] = contestant
        self.entries += entries

    def keep(self, names: Sequence[str]) -> None:
        """Only the entries of these names, and their processes. Raises ValueError for a name that is not here."""
        known = [entry.name for entry in self.entries] + list(self.left_out)
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"only names {', '.join(unknown)}: choose from {', '.join(known)}.")
        self.entries = [entry for entry in self.entries if entry.name in names]
        self.left_out = {name: why for name, why in self.left_out.items() if name in names}
        needed = {entry.process for entry in self.entries}
        self.processes = {name: process for name, process in self.processes.items() if name in needed}


GROUPS = {"hamburger": "verified", "composed": "composed", "base": "composed"}  # a plain base's: of one token each
OURS = (*GROUPS, "engine")  # the processes that are ours


def build_roster(setup: Setup) -> Roster:
    """Everybody who can take part. Raises CheckpointError for a model that is not there."""
    base, model = resolve_source(setup.base), resolve_source(setup.model)
    gguf = base.path if base.kind == "gguf" else None
    sizes = gguf_sizes(gguf) if gguf else None
    plain = WeightBytes(sizes.bytes) if sizes else None
    ours = _ours(model, sizes)
    # Verified groups compose no slot; composed ones are another mode of the same checkpoint.
    verified = None if ours is None else replace(ours, composed=0)
    composed = [Entry(f"composed c={c:g}", "composed", c, ours) for c in setup.confidences]
    roster = Roster()
    roster.add("hamburger", _our_server(setup, "hamburger"), Entry("hamburger", "hamburger", None, verified))
    roster.add("composed", _our_server(setup, "composed"), Entry("composed", "composed", None, ours), *composed)
    limits = {"context": setup.context, "kv_cache_memory": setup.kv_cache_memory}
    options = {"model": setup.model, **limits, "engine": {"groups": GROUPS["hamburger"]}}
    worker = _worker(setup, "engine", "peers.our_engine", options)
    roster.add("engine", worker, Entry("engine", "engine", None, verified))
    roster.add("base", _our_server(setup, "base"), Entry("base", "base", None, plain))
    _add_llama(roster, setup, gguf, plain)
    _add_transformers(roster, setup, sizes)
    return roster


def _ours(model: ModelSource, base: GgufSizes | None) -> WeightBytes | None:
    """Only for a graft over the base that is compared with: other trunks are not counted."""
    return hamburger_bytes(model, base) if model.kind == "hamburger" and base and model.base_path else None


def _add_llama(roster: Roster, setup: Setup, gguf: Path | None, plain: WeightBytes | None) -> None:
    names = ("llama.cpp", "llama.cpp server", "llama.cpp server lookup")
    if why := (None if gguf else NOT_GGUF) or _missing("llama_cpp"):
        roster.left_out |= dict.fromkeys(names, why)
        return
    options = {"gguf": str(gguf), "context": setup.context}
    roster.add(names[0], _worker(setup, names[0], "peers.llama", options), Entry(names[0], names[0], None, plain))
    if setup.llama_server is None:
        why = "name examples/server/server.py of llama-cpp-python's source distribution with --llama-server"
        roster.left_out |= dict.fromkeys(names[1:], why)
        return
    for name, drafts in (names[1], {}), (names[2], {"draft_model": "prompt-lookup-decoding"}):
        server = _llama_server(setup, name, setup.llama_server, _llama_server_config(setup, str(gguf)) | drafts)
        roster.add(name, server, Entry(name, name, None, plain))


def _llama_server(setup: Setup, name: str, script: Path, model: dict[str, Any]) -> Server:
    config = setup.logs / f"{name.replace(' ', '-')}.json"
    config.write_text(json.dumps({"server": {"host": "127.0.0.1"}, "model": model}), encoding="utf-8")
    # Its configuration names the port, so it is written when the port is known.
    code = (
        "import json, pathlib, runpy, sys; script, config, port = sys.argv[1:4]; path = pathlib.Path(config);"
        "value = json.loads(path.read_text()); value['server']['port'] = int(port); path.write_text(json.dumps(value));"
        "sys.argv = [script, '-C', config]; runpy.run_path(script, run_name='__main__')"
    )
    command = [sys.executable, "-c", code, str(script), str(config), "{port}"]
    return Server(_launch(setup, name, command), ours=False, end_tokens=setup.end_tokens, health="/healthz")


def _llama_server_config(setup: Setup, gguf: str) -> dict[str, Any]:
    return {
        "path": gguf,
        "alias": "peer",
        "n_ctx": setup.context * setup.most_streams,
        "n_seq_max": setup.most_streams,
        "n_batch": BATCHED,
        "n_ubatch": BATCHED,
        "threads": setup.threads,
        "threads_batch": setup.threads,
        "kv_unified": True,
        "store_logits": False,
        "use_mmap": True,
        "max_output_tokens": setup.context,
    }


def _add_transformers(roster: Roster, setup: Setup, sizes: GgufSizes | None) -> None:
    ways = {f"transformers {way}": way for way in WAYS}
    if why := _missing("transformers"):
        roster.left_out |= dict.fromkeys(ways, why)
        return
    weights = WeightBytes(TWO_BYTES * sizes.parameters) if sizes else None
    for name, way in ways.items():
        options = {"base": setup.base, "dtype": "bfloat16", "way": way, "context": setup.context}
        worker = _worker(setup, name, "peers.hf_generate", options)
        most = 1 if way == "lookup" else math.inf  # its assisted decoding takes one answer at a time
        roster.add(name, worker, Entry(name, name, None, weights, most_streams=most))


def _missing(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed: pip install -e '.[bench]'"
    return None


def _our_server(setup: Setup, name: str) -> Server:
    model = setup.base if name == "base" else setup.model
    options = {
        "--port": "{port}",
        "--max-model-len": str(setup.context),
        "--max-num-seqs": str(setup.most_streams),
        "--max-num-batched-slots": str(BATCHED),
        "--kv-cache-memory": str(setup.kv_cache_memory),
        "--prefix-cache": "false",
        "--groups": GROUPS[name],
    }
    command = [sys.executable, "-c", SERVE, "serve", *([model] if model else [])]
    command += [part for option in options.items() for part in option]
    return Server(_launch(setup, name, command), ours=True)


def _worker(setup: Setup, name: str, module: str, options: dict[str, Any]) -> Worker:
    options = {"threads": setup.threads, "batched": BATCHED, **options}
    return Worker(_launch(setup, name, [sys.executable, str(START), module, json.dumps(options)]))


def _launch(setup: Setup, name: str, command: list[str]) -> Launch:
    env = {"OMP_NUM_THREADS": str(setup.threads)}
    return Launch(command, env, setup.logs / f"{name.replace(' ', '-')}.log")
