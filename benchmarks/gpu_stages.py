"""What gpu.py measures, in the order of importance: stages, and the processes that take part in them."""

from __future__ import annotations

import importlib.util
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compare_contestants import Contestant, Launch, Worker
from compare_limits import WeightBytes
from compare_roster import Entry, Roster
from compare_run import Plan, Workload
from compare_workload import Lengths, Request
from gpu_model import BASE, DTYPE_BYTES, GEOMETRIES, shapes, weight_bytes

HERE = Path(__file__).parent
BLOCK = 32  # slots
OURS, FUSED, PLAIN, PEER = "hamburger", "hamburger fused", "base", "transformers"
OURS_FP8, PLAIN_FP8, OURS_INT8, PLAIN_INT8 = "hamburger fp8", "base fp8", "hamburger int8", "base int8"
OURS_COMPILED, PLAIN_COMPILED = "hamburger compiled", "base compiled"
FUSED_SINGLE = "hamburger fused, one kernel"
SINGLE_STAGE = "one kernel a micro-step"
FLASHINFER = "hamburger FlashInfer"
FOLDERS = {
    OURS: "published", FUSED: "fused", PLAIN: BASE,
    OURS_FP8: "published", PLAIN_FP8: BASE, OURS_INT8: "published", PLAIN_INT8: BASE,
    OURS_COMPILED: "published", PLAIN_COMPILED: BASE, FLASHINFER: "published",
    FUSED_SINGLE: "fused",
}  # fmt: skip
QUANTIZATION = {OURS_FP8: "fp8", PLAIN_FP8: "fp8", OURS_INT8: "int8", PLAIN_INT8: "int8"}  # "none" for all others
COMPILED = (OURS_COMPILED, PLAIN_COMPILED)
COMPILED_STAGE = "torch.compile"
LEAST_OUTPUT = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of prompts and answers, numbers of streams and contexts, each in the order in which they are measured."""

    prompt: int
    output: int
    streams: tuple[int, ...]
    contexts: tuple[int, ...]
    batched_slots: int


LARGE = Sizes(1024, 512, (256, 16, 64, 4), (32768, 8192, 16384, 4096, 2048), 4096)
SMALL = Sizes(24, 16, (4,), (96,), 64)


def sizes_of(geometry: str, minutes: float) -> Sizes:
    """Answers are as long as a run of eight minutes allows, and shorter in a shorter one."""
    sizes = SMALL if geometry == "tiny" else LARGE
    return replace(sizes, output=max(LEAST_OUTPUT, round(sizes.output * min(1.0, minutes / 8))))


@dataclass(frozen=True, slots=True)
class Stage:
    """Contestants that are measured alternately, `rounds` times: `streams` answers at once, all of the same lengths."""

    name: str
    streams: int
    prompt: int
    output: int
    contestants: tuple[str, ...]
    rounds: int = 1


def stages(sizes: Sizes, device: str) -> list[Stage]:
    """The most important first; stages with the same contestants follow each other, so that few processes start."""

    def stage(name: str, streams: int, prompt: int, *contestants: str, rounds: int = 1) -> Stage:
        return Stage(name, streams, prompt, sizes.output, contestants, rounds)

    many = [stage(f"{n} streams", n, sizes.prompt, OURS, PLAIN) for n in sizes.streams]
    # A context's answer counts towards it.
    far = [stage(f"context {n}", 1, n - sizes.output, OURS, PLAIN) for n in sizes.contexts]
    found = [
        stage("1 stream", 1, sizes.prompt, OURS, PLAIN, rounds=2),
        many[0],
        far[0],
        *many[1:],
        *far[1:],
        stage("beside transformers", 1, sizes.prompt, OURS, PLAIN, PEER),
        stage("a cheaper graft", 1, sizes.prompt, FUSED, PLAIN),
    ]
    if device != "cpu":  # which captures no steps, and has neither fp8, nor this int8, nor FlashInfer
        found.append(stage(COMPILED_STAGE, 1, sizes.prompt, OURS, OURS_COMPILED, PLAIN, PLAIN_COMPILED, rounds=2))
        found.append(stage(SINGLE_STAGE, 1, sizes.prompt, FUSED, FUSED_SINGLE, PLAIN, rounds=2))
        # One after the other: more processes at once would not fit into the GPU's memory.
        found.append(stage("8-bit weights", 1, sizes.prompt, OURS, OURS_FP8, PLAIN, PLAIN_FP8))
        found.append(stage("int8 weights", 1, sizes.prompt, OURS, OURS_INT8, PLAIN, PLAIN_INT8))
        long = statistics.median_low(sizes.contexts) - LEAST_OUTPUT  # its TTFT is what the stage is for
        found.append(Stage("prompts by FlashInfer", 4, long, LEAST_OUTPUT, (OURS, FLASHINFER), rounds=2))
    return found


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


@dataclass(frozen=True, slots=True)
class Setup:
    """What all contestants are started with. models: the folder that gpu_model.py wrote."""

    models: Path
    logs: Path
    geometry: str
    group: int
    device: str
    dtype: str
    threads: int
    sizes: Sizes
    start_seconds: float


def contestants(setup: Setup) -> tuple[dict[str, Contestant], dict[str, str]]:
    """Everybody who can take part, and who cannot, with the reason."""
    found: dict[str, Contestant] = {name: _ours(setup, name) for name in FOLDERS}
    absent: dict[str, str] = {}
    if not _has("flashinfer"):
        del found[FLASHINFER]
        absent[FLASHINFER] = "flashinfer is not installed"
    if not _has("transformers"):
        return found, absent | {PEER: "transformers is not installed"}
    options = {
        "folder": str(setup.models / BASE),
        "device": setup.device,
        "dtype": setup.dtype,
        "compiled": setup.device != "cpu",
        "context": setup.sizes.prompt + setup.sizes.output,
    }
    return found | {PEER: _worker(setup, PEER, "peer_static.py", options)}, absent


def roster_of(stage: Stage, setup: Setup, processes: dict[str, Contestant]) -> Roster:
    """The stage's contestants that there are, with the bytes that a macro-step of theirs reads in it."""
    configs = shapes(setup.geometry, setup.group)
    size = DTYPE_BYTES[setup.dtype]
    roster = Roster()
    for name in stage.contestants:
        if name in processes:
            config = configs[FOLDERS.get(name, BASE)]
            weights = weight_bytes(config, size, eight_bits=name in QUANTIZATION)
            slots = stage.prompt + stage.output // (2 * config.max_group)  # in the middle of an answer
            cache = stage.streams * slots * config.trunk.slot_bytes(size)
            all_bytes = WeightBytes(weights.step + cache, weights.merge, weights.micro_step)
            roster.add(name, processes[name], Entry(name, name, None, all_bytes))
    return roster


def workload_of(stage: Stage, setup: Setup, timeout: float) -> Workload:
    """One answer a stream, all at once."""
    plan = Plan([stage.streams], stage.rounds, 1, 1, 0, timeout)
    lengths = [Lengths(stage.name, stage.prompt, stage.output)]
    return Workload(lengths, RandomPrompts(GEOMETRIES[setup.geometry].vocab_size), plan)


def _ours(setup: Setup, name: str) -> Worker:
    sizes = setup.sizes
    longest = max(*sizes.contexts, sizes.prompt + sizes.output)
    slots = max(max(sizes.streams) * (sizes.prompt + sizes.output + BLOCK), longest + BLOCK)
    engine = {
        "device": setup.device,
        "dtype": setup.dtype,
        "max_num_seqs": max(sizes.streams),
        "max_num_batched_slots": sizes.batched_slots,
        "block_size": BLOCK,
        "quantization": QUANTIZATION.get(name, "none"),
        "compile_num_seqs": int(name in COMPILED),
        "micro_step_kernel": name == FUSED_SINGLE,
    }
    if setup.device != "cpu" and _has("flashinfer"):  # `auto` would try it in every process, which may compile it
        engine["attention_backend"] = "flashinfer" if name == FLASHINFER else "triton"
    options = {
        "model": str(setup.models / FOLDERS[name]),
        "context": longest,
        "kv_cache_memory": slots * GEOMETRIES[setup.geometry].slot_bytes(DTYPE_BYTES[setup.dtype]),
        "engine": engine,
    }
    return _worker(setup, name, "peer_engine.py", options)


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _worker(setup: Setup, name: str, script: str, options: dict[str, Any]) -> Worker:
    command = [sys.executable, str(HERE / script), json.dumps(options)]
    log = setup.logs / f"{name.replace(' ', '-')}.log"
    return Worker(Launch(command, {"OMP_NUM_THREADS": str(setup.threads)}, log, setup.start_seconds))
