"""Measures what steps take by their rows, when an engine with verified groups starts: a second at most on a CPU."""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext

import torch

from hamburger.engine.device.cpu_threads import StepThreads
from hamburger.engine.drafting.costs import MeasuredCosts
from hamburger.model.batch import ForwardBatch, empty_sampling
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.steps import Steps

_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_TURNS = 5
_LONGEST_SECONDS = 0.1  # a step that takes longer is measured once
_CONTEXT = 96  # slots


def measure_costs(
    steps: Steps, cache: PagedKVCache, most_rows: int, max_model_len: int, threads: StepThreads | None
) -> MeasuredCosts:
    """On a cache that holds nothing yet: what it holds afterwards is of no use. most_rows: of a step."""
    context = min(_CONTEXT, max_model_len)
    depth, rows = steps.config.max_group - 1, [n for n in _ROWS if n <= most_rows] or [1]
    if len(rows) == 1:
        rows.append(2)
    if steps.device.type != "cpu" and most_rows > rows[-1]:
        rows.append(most_rows)  # a GPU's steps are short
    plain, further = [], []
    for number in rows:
        plain.append(_milliseconds(steps, cache, _batch(steps, cache, number, 0, context), threads))
        drafting = (
            _milliseconds(steps, cache, _batch(steps, cache, number, depth, context), threads) if depth else plain[-1]
        )
        further.append(max(drafting - plain[-1], 0.0) / max(depth, 1))
    return MeasuredCosts(tuple(rows), tuple(plain), tuple(further))


def _milliseconds(steps: Steps, cache: PagedKVCache, batch: ForwardBatch, threads: StepThreads | None) -> float:
    """The median of some turns."""
    taken: list[float] = []
    for turn in range(1 + _TURNS):
        start = time.perf_counter()
        with nullcontext() if threads is None else threads.step(decodes=True):
            output = steps.step(batch, cache)
        output.group_sizes.tolist()  # waits for the device
        seconds = time.perf_counter() - start
        # The first warms up: on a GPU it may compile kernels.
        if turn or (steps.device.type == "cpu" and seconds > _LONGEST_SECONDS):
            taken.append(seconds)
            if taken[-1] > _LONGEST_SECONDS:
                break
    return 1000 * statistics.median(taken)


def _batch(steps: Steps, cache: PagedKVCache, rows: int, drafts: int, context: int) -> ForwardBatch:
    """Rows of one slot, each of a sequence of its own, which share what they read."""
    device = steps.device

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    num_slots = (len(cache.data[0]) - 1) * cache.block_size
    columns = list(range(-(-context // cache.block_size)))
    one = torch.ones(rows, dtype=torch.int64, device=device)
    return ForwardBatch(
        token_ids=one[:, None],
        group_sizes=one,
        max_group_size=1,
        positions=one * (context - 1),
        write_slots=ints([slot % num_slots for slot in range(rows)]),
        block_tables=ints(columns).repeat(rows, 1),
        context_slots=one * context,
        query_slots=[1] * rows,
        context_slots_host=[context] * rows,
        num_single=rows,
        emit=ints(list(range(rows))),
        confidence=torch.zeros(rows, device=device),
        group_limits=one * (1 + drafts),
        max_group_limit=1 + drafts,
        sampling=empty_sampling(rows, device),
        text_lengths=one * context,
        checks=one * -1,
    )
