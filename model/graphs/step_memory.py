"""What a step takes beside weights and KV pool: the largest steps are run on a small pool, and their memory is read."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from hamburger.model.batch import Adjustments, ForwardBatch, ScoredSlots, empty_sampling
from hamburger.model.graphs.decode_graphs import DecodeGraphs, buckets
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.settled_places import SettledPlaces
from hamburger.model.steps import Steps


class Meter(Protocol):
    """Reads a device's memory, in bytes."""

    def begin(self) -> None:
        """Let go of what nobody needs, and forget the peak."""

    def peak(self) -> int:
        """Most that tensors took at once since `begin`, beyond what they took then."""

    def used(self) -> int:
        """All that is taken, by whatever."""


class CudaMeter:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def begin(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._before

    def used(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest that steps can be: slots of one step, decoding rows, tokens of a sequence, and rivals' logprobs.

    max_rows: drafts of verified groups among them. context_slots: that each of so many decoding rows can have at once.
    kv_dtype, settled: of the KV cache. is_verified: their groups are.
    """

    max_slots: int
    max_rows: int
    max_model_len: int
    context_slots: int
    max_logprobs: int
    block_size: int
    kv_dtype: torch.dtype
    is_verified: bool = False
    settled: SettledPlaces | None = None


NUM_LARGEST = 2  # steps that peak_bytes runs


def small_cache(
    steps: Steps, max_slots: int, block_size: int, dtype: torch.dtype, settled: SettledPlaces | None = None
) -> PagedKVCache:
    """Just large enough for what one step of max_slots writes."""
    blocks = -(-max_slots // block_size)
    return PagedKVCache(steps.trunk_config, blocks, block_size, dtype, steps.device, settled)


def peak_bytes(steps: Steps, largest: Largest, meter: Meter) -> int:
    """Of the largest prefill step and of the largest decoding step, whichever takes more."""
    cache = small_cache(steps, largest.max_slots, largest.block_size, largest.kv_dtype, largest.settled)
    batches = iter((largest_prefill(steps, largest), largest_decode(steps, largest)))
    return most_bytes(NUM_LARGEST, lambda: steps.step(next(batches), cache), meter)


def most_bytes(number: int, step: Callable[[], object], meter: Meter) -> int:
    """That one of so many calls of `step` takes."""
    peaks = []
    for _ in range(number):
        meter.begin()
        step()
        peaks.append(meter.peak())
    return max(peaks)


def graph_bytes(make: Callable[[], DecodeGraphs], max_rows: int, meter: Meter) -> int:
    """What the graphs that `make` makes take once they are all prepared.

    Of the two largest buckets, what they take is measured. The largest brings the memory that all share; each other
    one is taken for what the second adds to it.
    """
    meter.begin()
    before = meter.used()
    graphs = make()
    graphs.prepare(only=max_rows)
    largest = meter.used() - before
    sizes = buckets(max_rows)
    second = 0
    if len(sizes) > 1:
        graphs.prepare(only=sizes[-2])
        second = meter.used() - before - largest
    return largest + second * (len(sizes) - 1)


def largest_prefill(steps: Steps, largest: Largest) -> ForwardBatch:
    """Chunks at the end of the longest sequences, every slot scored, as many groups among them as may be."""
    length = largest.max_model_len
    queries = [min(length, largest.max_slots - start) for start in range(0, largest.max_slots, length)]
    return _batch(steps, largest, queries, [length] * len(queries), scored=True)


def largest_decode(steps: Steps, largest: Largest) -> ForwardBatch:
    """Full groups of as many rows as may decode, each sampled, filtered, penalised, and with log-probabilities."""
    context = max(1, min(largest.context_slots, largest.max_model_len))
    rows = largest.max_rows
    batch = _batch(steps, largest, [1] * rows, [context] * rows, scored=False)
    device = batch.positions.device
    history = batch.positions.new_full((rows, largest.max_model_len), 1)
    numbers, ids = torch.ones(rows, device=device), torch.arange(rows, device=device)
    none = ids[:0]
    adjustments = Adjustments(
        ids, history, history, numbers, numbers, numbers, none, none, numbers[:0], ids, any_penalties=True
    )
    sampling = replace(
        batch.sampling,
        temperature=numbers,
        top_p=numbers * 0.9,
        logprobs=ids * 0 + largest.max_logprobs,
        max_logprobs=largest.max_logprobs,
        any_sampled=True,
        any_filtered=True,
        adjustments=adjustments,
    )
    max_group = steps.config.max_group
    return replace(
        batch,
        confidence=numbers * 0,
        group_limits=torch.full_like(ids, max_group),
        max_group_limit=max_group,
        sampling=sampling,
    )


def _batch(
    steps: Steps, largest: Largest, queries: Sequence[int], contexts: Sequence[int], *, scored: bool
) -> ForwardBatch:
    """Sequences with so many new slots and so much context, the same of all; what they had before has settled."""
    device, width = steps.device, 1 if largest.is_verified else steps.config.max_group
    queries = sorted(queries, key=lambda n: n > 1)
    num_slots, size = sum(queries), largest.block_size

    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    slots = torch.arange(num_slots, device=device)
    columns = torch.arange(-(-max(contexts) // size), device=device)
    settled_slots: Tensor | None = None
    if (places := largest.settled) is not None and places.lent:
        before = [context - new for context, new in zip(contexts, queries, strict=True)]
        settled_slots = ints([number // places.kept * places.kept for number in before])
    return ForwardBatch(
        token_ids=torch.ones(num_slots, width, dtype=torch.int64, device=device),
        group_sizes=torch.full_like(slots, width),
        max_group_size=width,
        positions=slots % largest.max_model_len,
        write_slots=slots,
        # The same blocks again and again: so much is read, but so much there need not be.
        block_tables=(columns % -(-largest.max_slots // size)).repeat(len(queries), 1),
        context_slots=ints(contexts),
        query_slots=queries,
        context_slots_host=list(contexts),
        num_single=sum(n == 1 for n in queries),
        emit=ints(queries).cumsum(0) - 1,
        confidence=torch.ones(len(queries), device=device),
        group_limits=torch.ones(len(queries), dtype=torch.int64, device=device),
        max_group_limit=1,
        sampling=empty_sampling(len(queries), device),
        scored=ScoredSlots(slots, torch.zeros_like(slots), largest.max_logprobs) if scored else None,
        text_lengths=torch.full_like(slots, largest.max_model_len),
        # None is followed by a draft, so the micro-steps of all of them count.
        checks=torch.full((len(queries),), -1, device=device) if largest.is_verified else None,
        settled_from=None if settled_slots is None else torch.zeros_like(settled_slots),
        settled_slots=settled_slots,
    )
