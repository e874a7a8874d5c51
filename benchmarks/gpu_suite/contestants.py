"""The processes that gpu.py measures: their models, settings, KV pools, and the memory that they will want."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from comparison.contestants import Contestant, Launch, Worker
from comparison.limits import WeightBytes
from comparison.processes import START
from comparison.roster import Entry, Roster
from comparison.runner import Plan, Workload
from comparison.workload import Lengths, Request
from gpu_suite.models import BASE, DTYPE_BYTES, GEOMETRIES, WIDE_GRAFT, shapes, weight_bytes
from gpu_suite.stages import (
    FUSED,
    OURS,
    OURS_INT8,
    PEER,
    PLAIN,
    PLAIN_INT8,
    UNDRAFTED,
    VERIFIED,
    WIDE,
    WIDE_GROUPS,
    Sizes,
    Stage,
    stages,
)
from hamburger.model.config import ModelConfig
from hamburger.model.tensor_shapes import tensor_shapes

BLOCK = 32  # slots
PROCESS_BYTES = {"cpu": 1 << 28, "cuda": 3 << 29}  # of CUDA's context, libraries and graphs: an estimate


@dataclass(frozen=True, slots=True)
class Kind:
    """A process of ours: its model's folder, and the engine's settings that others do not have."""

    folder: str
    engine: Mapping[str, Any] = field(default_factory=dict)


OVERLAPS = {"overlap_steps": "on"}  # what a plain base can do without drafts

KINDS = {
    OURS: Kind("published"),
    FUSED: Kind("fused"),
    PLAIN: Kind(BASE, OVERLAPS),
    WIDE: Kind(WIDE_GRAFT),
    OURS_INT8: Kind("published", {"quantization": "int8"}),
    PLAIN_INT8: Kind(BASE, {"quantization": "int8", **OVERLAPS}),
    VERIFIED: Kind("published", {"groups": "verified", "confidence": 0.0}),
    UNDRAFTED: Kind("published", {"groups": "verified", "confidence": 1.0}),
}


@dataclass(frozen=True, slots=True)
class Setup:
    """What all contestants are started with. models: the folder that models.py wrote. scripts: where start.py is,
    which starts the workers. engine: further settings of every engine of ours. left: seconds that a contestant has now
    for what it does."""

    models: Path
    logs: Path
    scripts: Path
    geometry: str
    group: int
    device: str
    dtype: str
    threads: int
    sizes: Sizes
    engine: Mapping[str, Any]
    start_seconds: float
    left: Callable[[], float]


@dataclass(frozen=True, slots=True)
class RandomPrompts:
    """Prompts of random tokens: no two begin alike."""

    vocab_size: int

    def requests(self, lengths: Sequence[Lengths], seed: int) -> list[Request]:
        rng = random.Random(seed)
        return [
            Request([rng.randrange(self.vocab_size) for _ in range(row.prompt_tokens)], row.output_tokens)
            for row in lengths
        ]


def contestants(setup: Setup) -> tuple[dict[str, Contestant], dict[str, str]]:
    """Every process that can take part, and who cannot, with the reason."""
    found: dict[str, Contestant] = {name: _ours(setup, name) for name in KINDS}
    if not _has("transformers"):
        return found, {PEER: "transformers is not installed"}
    options = {
        "folder": str(setup.models / BASE),
        "device": setup.device,
        "dtype": setup.dtype,
        "compiled": setup.device != "cpu",
        "context": setup.sizes.prompt + setup.sizes.output,
    }
    return found | {PEER: _worker(setup, PEER, "peers.hf_static_cache", options)}, {}


def roster_of(stage: Stage, setup: Setup, processes: Mapping[str, Contestant], absent: Mapping[str, str]) -> Roster:
    """The stage's contestants that are not absent, with the bytes that a macro-step of theirs reads in it."""
    size = DTYPE_BYTES[setup.dtype]
    roster = Roster()
    for name in stage.contestants:
        process, group = process_of(name)
        if name in absent or process not in processes:
            continue
        config = _config(setup, process)
        eight_bits = {**setup.engine, **_engine(process)}.get("quantization", "none") != "none" and process != PEER
        weights = weight_bytes(config, size, eight_bits=eight_bits)
        composed = 1 if process in (VERIFIED, UNDRAFTED) else group or config.max_group  # tokens of a slot
        slots = stage.prompt + stage.output // (2 * composed)  # in the middle of an answer
        cache = stage.streams * slots * config.trunk.slot_bytes(size)
        all_bytes = WeightBytes(weights.step + cache)
        if composed > 1:  # how many micro-steps drafted, cannot be told from groups that were verified
            all_bytes = replace(all_bytes, composed=weights.composed, micro_step=weights.micro_step)
        roster.add(process, processes[process], Entry(name, process, None, all_bytes, group))
    return roster


def process_of(name: str) -> tuple[str, int | None]:
    """Who answers for a contestant, and how long it has to make its groups."""
    return (WIDE, WIDE_GROUPS[name]) if name in WIDE_GROUPS else (name, None)


def workload_of(stage: Stage, setup: Setup, timeout: float) -> Workload:
    """One answer a stream, all at once."""
    plan = Plan([stage.streams], stage.rounds, 1, 1, 0, timeout)
    lengths = [Lengths(stage.name, stage.prompt, stage.output)]
    return Workload(lengths, RandomPrompts(GEOMETRIES[setup.geometry].vocab_size), plan)


def needed_bytes(setup: Setup) -> dict[str, int]:
    """Device memory of every process with the KV pool that it asks for: estimates."""
    size = DTYPE_BYTES[setup.dtype]
    ours = {name: pool_bytes(setup, name) + beside_pool(setup, name) for name in KINDS}
    cache = (setup.sizes.prompt + setup.sizes.output) * GEOMETRIES[setup.geometry].slot_bytes(size)
    return ours | {PEER: cache + beside_pool(setup, PLAIN)}


def pool_bytes(setup: Setup, name: str) -> int:
    """Of the KV pool in which a process could have all streams of its largest stage at once, each token in a slot of
    its own; and one answer of the longest context."""
    size = DTYPE_BYTES[setup.dtype]
    streams = [stage.streams * (stage.prompt + stage.output + BLOCK) for stage in _stages_of(setup, name)]
    slots = max([_longest(setup.sizes) + BLOCK, *streams])
    return slots * GEOMETRIES[setup.geometry].slot_bytes(size)


def beside_pool(setup: Setup, name: str) -> int:
    """Weights, some of them twice while they are loaded; the largest step's activations and logits; the process."""
    config, sizes, size = _config(setup, name), setup.sizes, DTYPE_BYTES[setup.dtype]
    trunk = config.trunk
    weights = sum(prod(shape) for shape in tensor_shapes(config).values()) * size
    logits = 8 * 4 * _most_streams(setup, name) * trunk.vocab_size
    activations = 8 * size * sizes.batched_slots * (trunk.hidden_size + trunk.intermediate_size)
    return weights * 3 // 2 + logits + activations + PROCESS_BYTES[setup.device.partition(":")[0]]


def _stages_of(setup: Setup, process: str) -> list[Stage]:
    return [
        stage
        for stage in stages(setup.sizes, setup.device)
        if isinstance(stage, Stage) and any(process_of(name)[0] == process for name in stage.contestants)
    ]


def _most_streams(setup: Setup, process: str) -> int:
    return max((stage.streams for stage in _stages_of(setup, process)), default=1)


def _longest(sizes: Sizes) -> int:
    return max(*sizes.contexts, sizes.prompt + sizes.output)


def _config(setup: Setup, process: str) -> ModelConfig:
    return shapes(setup.geometry, setup.group)[KINDS[process].folder if process in KINDS else BASE]


def _engine(process: str) -> Mapping[str, Any]:
    return KINDS[process].engine if process in KINDS else {}


def _ours(setup: Setup, name: str) -> Worker:
    engine = {
        "device": setup.device,
        "dtype": setup.dtype,
        "max_num_seqs": _most_streams(setup, name),
        "max_num_batched_slots": setup.sizes.batched_slots,
        "block_size": BLOCK,
        "quantization": "none",
    }
    options = {
        "model": str(setup.models / KINDS[name].folder),
        "context": _longest(setup.sizes),  # of all: it decides how attention is cut
        "kv_cache_memory": pool_bytes(setup, name),
        "beside_pool": beside_pool(setup, name),
        "engine": {**engine, **setup.engine, **_engine(name)},
    }
    return _worker(setup, name, "peers.our_engine", options)


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _worker(setup: Setup, name: str, module: str, options: dict[str, Any]) -> Worker:
    command = [sys.executable, str(setup.scripts / START.name), module, json.dumps(options)]
    log = setup.logs / f"{name.replace(' ', '-')}.log"
    env = {"OMP_NUM_THREADS": str(setup.threads)}
    return Worker(Launch(command, env, log, setup.start_seconds), setup.left)
