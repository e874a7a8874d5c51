"""Measures the real model: how long steps of known work take, and what groups it emits. Needs torch and the weights."""

from __future__ import annotations

import gc
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from hamburger.clients.prompts import built_in_prompts
from hamburger.engine import LLM, SamplingParams
from hamburger.engine.build import build_core
from hamburger.engine.core.batch import ScheduledBatch, ScheduledSequence, SettlingChunk
from hamburger.engine.core.sequence import Sequence
from hamburger.engine.device.runner import Runner
from hamburger.engine.text.tokenizer import Tokenizer
from hamburger.engine.types.config import EngineArgs
from hamburger.engine.types.messages import EngineInfo, SubmitRequest
from hamburger.model.checkpoints.sources import resolve_source
from host.machine import processor
from simulation.costs import CostModel, StepWork, fit, work_of

PROMPT_WORDS = 60
MOST_CONTEXT_SLOTS = 16_384  # of all streams of a step; beyond, one step would take seconds
CHUNKS_TIMED = 200
SLOT_BUDGET_MIB = 1024  # of KV that is read while measuring: far more than any processor's cache


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of step. streams sequences decode at `context` slots, of which each `nth_grows` emits `group` tokens;
    chunk: slots of a prompt chunk beside them that ends at chunk_end slots (0: none), and emits or not."""

    streams: int = 0
    context: int = 0
    group: int = 1
    nth_grows: int = 1
    chunk: int = 0
    chunk_end: int = 0
    chunk_emits: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """works, seconds: one entry a measured step. shares: confidence -> how often groups of 1, 2, ... tokens came."""

    info: EngineInfo
    costs: CostModel
    works: list[StepWork]
    seconds: list[float]
    shares: dict[float, tuple[float, ...]]


def measure(
    args: EngineArgs, confidences: list[float], seconds: float, num_answers: int, say: Callable[[str], None]
) -> Measured:
    """Build the model as a server would, and time all cases in random order, round after round, until this many seconds
    are over, but twice at least. Each one's median counts: a moment in which the machine did other work does not.

    confidences: at which groups are counted, over `num_answers` greedy answers to the load generator's own prompts.
    """
    core, info = build_core(args, say)
    tokenizer = Tokenizer.load(resolve_source(args.model, args.base).tokenizer_path)
    shares = {}
    for confidence in [] if info.is_plain_base else confidences:
        say(f"groups of {info.model} at confidence {confidence:g}")
        shares[confidence] = _group_shares(LLM.from_core(core, info, tokenizer), confidence, num_answers)
    runner = core._runner
    if not isinstance(runner, Runner):
        raise RuntimeError("the core was built without the real runner.")
    bench = _Bench(runner, info.total_slots // info.block_size, info.block_size, info.max_model_len)
    cases = [*_cases(info)]
    say(f"timing {len(cases)} kinds of steps of {info.model}")
    for case in cases:  # the first of its kind compiles kernels
        bench.run(case)
    found: dict[Case, list[tuple[StepWork, float]]] = {case: [] for case in cases}
    draw, deadline, num_rounds = random.Random(0), time.monotonic() + seconds, 0
    while num_rounds < 2 or time.monotonic() < deadline:
        for case in draw.sample(cases, len(cases)):
            found[case].append(bench.run(case))
        num_rounds += 1
    works = [results[0][0] for results in found.values()]
    medians = [statistics.median(time for _, time in results) for results in found.values()]
    del core, runner, bench
    gc.collect()
    return Measured(info, fit(works, medians), works, medians, shares)


def settling_seconds(args: EngineArgs, say: Callable[[str], None]) -> float:
    """Median time in which one chunk of old tokens settles, whose slots are all over the pool."""
    core, info = build_core(replace(args, groups="verified", settle=True), say)
    runner, settling = core._runner, core.config.settling
    if not isinstance(runner, Runner) or settling is None:
        raise RuntimeError("the core was built without the real runner, or settles nothing.")
    draw, times = random.Random(0), []
    for layer in runner._cache.data:  # keys that are all zeros say nothing of who stays
        layer.normal_()
    for _ in range(CHUNKS_TIMED):
        slots = draw.sample(range(info.total_slots), settling.chunk)
        chunk = SettlingChunk(slots, [*range(settling.chunk)], slots[: settling.kept], [])
        start = time.perf_counter()
        runner.settle(chunk)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def machine() -> dict[str, Any]:
    """Where it was measured, and how busy that was with other things."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "timed": "processor time of the one thread" if torch.get_num_threads() == 1 else "wall time",
        "load_average": os.getloadavg()[0],
        "torch": torch.__version__,
    }


def _group_shares(llm: LLM, confidence: float, num_answers: int) -> tuple[float, ...]:
    """Shares of group sizes; each answer's last group, which its end may have cut, is left out."""
    params = SamplingParams(temperature=0, max_tokens=96, confidence=confidence)
    chats = [[{"role": "user", "content": prompt}] for prompt in built_in_prompts(num_answers, PROMPT_WORDS, seed=0)]
    results = llm.chat(chats, params, progress=False)
    counts = Counter(len(group) for result in results for group in result.groups[:-1])
    return tuple(counts[n] / counts.total() for n in range(1, llm.info.max_group + 1))


def _cases(info: EngineInfo) -> Iterator[Case]:
    groups = [(1, 1)] if info.is_plain_base else [(1, 1), (2, 1), (2, 4), (info.max_group, 1), (info.max_group, 4)]
    longest = info.max_model_len - 8
    for streams in [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= info.max_num_seqs]:
        for context in sorted({min(n, longest) for n in (32, 512, 2048)}):
            if streams * context <= MOST_CONTEXT_SLOTS:
                for group, nth in groups if context < 512 else groups[:1]:
                    yield Case(streams, context, group, nth)
    for chunk in [n for n in (16, 64, 128, 256, 512, 1024) if n <= info.max_num_batched_slots]:
        for before in (0, 2048):
            if chunk + before <= longest:
                yield Case(chunk=chunk, chunk_end=chunk + before, chunk_emits=before == 0)
        if 8 < chunk <= longest and info.max_num_seqs >= 8:
            yield Case(8, min(256, longest), chunk=chunk - 8, chunk_end=chunk - 8)


class _Bench:
    """Times runner.run on batches that are made by hand, over a KV pool full of numbers."""

    def __init__(self, runner: Runner, num_blocks: int, block_size: int, max_model_len: int) -> None:
        self._runner = runner
        self._block_size, self._max_model_len = block_size, max_model_len
        data = runner._cache.data
        per_block = sum(layer[0].numel() * layer.element_size() for layer in data)
        self._num_blocks = min(num_blocks, max(1, (SLOT_BUDGET_MIB << 20) // per_block))
        for layer in data:  # pages that were never written would all be one page of zeros
            layer[: self._num_blocks].normal_()
        self._next_block = 0
        # One thread alone computes: its own time says what a step costs, whatever else the machine does meanwhile.
        self._clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def run(self, case: Case) -> tuple[StepWork, float]:
        items = []
        for index in range(case.streams):
            grows = case.group > 1 and index % case.nth_grows == 0
            sequence = self._sequence(f"s{index}", case.context, case.group if grows else 1, decodes=True)
            items.append(ScheduledSequence(sequence, 1, True))
        if case.chunk:
            sequence = self._sequence("chunk", case.chunk_end, 1, decodes=False)
            sequence.num_computed_slots = case.chunk_end - case.chunk
            items.append(ScheduledSequence(sequence, case.chunk, case.chunk_emits))
        batch = ScheduledBatch(items)
        start = self._clock()
        result = self._runner.run(batch)
        seconds = self._clock() - start
        return work_of(batch, [len(group.token_ids) for group in result.groups]), seconds

    def _sequence(self, request_id: str, slots: int, group: int, *, decodes: bool) -> Sequence:
        """A sequence of this many slots; one that decodes has emitted a group of `group` tokens, and emits one more:
        at confidence 0 nothing but its limit ends it."""
        limit = 2 * group if decodes else 1
        params = SamplingParams(
            temperature=0, max_tokens=limit, ignore_eos=True, seed=0, confidence=0.0 if group > 1 else 1.0
        )
        prompt = random.Random(f"{request_id} {slots}").choices(range(100, 40_000), k=slots - decodes)
        sequence = Sequence(SubmitRequest(request_id, prompt, params, 0.0), (), self._max_model_len)
        if decodes:
            sequence.scheduled_time = 0.0
            sequence.accept(prompt[:1] * group, [0.0] * group, None)
            sequence.num_computed_slots = slots - 1
        sequence.block_ids = [self._block() for _ in range(-(-slots // self._block_size))]
        return sequence

    def _block(self) -> int:
        self._next_block = (self._next_block + 1) % self._num_blocks
        return self._next_block
