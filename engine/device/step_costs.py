"""Measures what steps take by their rows, when an engine with verified groups starts: a second or so on a CPU."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from hamburger.engine.device.cpu_threads import StepThreads
from hamburger.engine.drafting.costs import MeasuredCosts
from hamburger.model.batch import ForwardBatch, StepOutput, empty_sampling
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.steps import Steps

# Kernels take 8 rows at once, and one more costs at once. Beyond the last, as from the one before to it.
_ROWS = (1, 2, 3, 4, 6, 8, 9, 12, 16, 17, 24, 32)
_FEW_ROWS = (1, 2, 4, 8, 16, 32)  # without kernels, where steps are slow: else the start would be
_SLOW = 0.012  # seconds of a step of one row
_TURNS_MILLISECONDS, _MOST_TURNS, _LEAST_TURNS = 40.0, 7, 2  # of each batch
_TEXT = 40  # tokens that the model writes
_CONTEXT = 256  # tokens, the text over and over: what attention adds for a row grows with it
_TOGETHER = 4  # rows that follow each other in one sequence
_MOST_TRIES = 4  # steps of two threads beside steps of one say nothing of what a row costs
_MOST_SECONDS = 5.0  # beyond which there is no further try: serving corrects what was measured


def measure_costs(
    steps: Steps, cache: PagedKVCache, most_rows: int, max_model_len: int, threads: StepThreads | None
) -> MeasuredCosts:
    """On a cache that holds nothing yet: what it holds afterwards is of no use. most_rows: of a step."""
    return _Meter(steps, cache, most_rows, max_model_len, threads).measure(most_rows)


class _Meter:
    """Times steps over a text that the model has written: what a head has to compute depends on how sure it is."""

    def __init__(
        self, steps: Steps, cache: PagedKVCache, most_rows: int, max_model_len: int, threads: StepThreads | None
    ) -> None:
        self._steps, self._cache, self._threads = steps, cache, threads
        self._threads_taken: set[int] = set()
        text = self._text = [1]
        taken = []
        while len(text) < min(_TEXT, max_model_len):
            start_time = time.perf_counter()
            text.append(int(self._step(self._batch([len(text) - 1], 0)).token_ids[-1, 0]))
            taken.append(time.perf_counter() - start_time)
        self._rows = _FEW_ROWS if min(taken, default=0.0) > _SLOW else _ROWS
        longest, at_once = min(_CONTEXT, max_model_len, cache.scratch_block * cache.block_size), min(most_rows, _TEXT)
        while len(text) + _TEXT <= longest:
            place = len(text)
            text += text[:_TEXT]
            for start in range(place, len(text), at_once):
                self._step(self._batch(list(range(start, min(start + at_once, len(text)))), 0))

    def measure(self, most_rows: int) -> MeasuredCosts:
        """most_rows: of a step. Anew where the number of threads has changed meanwhile: a neighbour is busy then."""
        start_time = time.perf_counter()
        for _ in range(_MOST_TRIES):
            self._let_threads_decide(start_time + _MOST_SECONDS)
            self._threads_taken.clear()
            found = self._measured(most_rows)
            if len(self._threads_taken) <= 1 or time.perf_counter() - start_time > _MOST_SECONDS:
                break
        return found

    def _let_threads_decide(self, until: float) -> None:
        """By steps of one row, which are the shortest: a trial in what is measured would have it measured again."""
        while self._threads is not None and self._threads.is_undecided and time.perf_counter() < until:
            self._step(self._batch([len(self._text) - 1], 0))

    def _measured(self, most_rows: int) -> MeasuredCosts:
        depth = self._steps.config.max_group - 1
        rows = [number for number in self._rows if number <= most_rows]
        if len(rows) == 1:
            rows.append(2)
        if self._steps.device.type != "cpu" and most_rows > rows[-1]:
            rows.append(most_rows)  # a GPU's steps are short
        # A micro-step's time follows a line between these.
        drafting = [number for number in rows if number in _FEW_ROWS or number == rows[-1]] if depth else []
        batches: list[ForwardBatch] = []
        for number in rows:
            # Runs of tokens, so that most rows have drafts behind them.
            span = (number - 1) // _TOGETHER * 7 + _TOGETHER
            # At its beginning a text is less sure of itself.
            start = max(min(len(self._text) * 3 // 4, len(self._text) - span), 0)
            places = [(start + i // _TOGETHER * 7 + i % _TOGETHER) % len(self._text) for i in range(number)]
            batches.append(self._batch(places, 0, are_joined=True))
            if number in drafting:
                batches += [self._batch(places, 0), self._batch(places, depth)]
        taken = iter(self._milliseconds(batches))
        steps, further = [], []
        for number in rows:
            steps.append(next(taken))
            if number in drafting:
                apart = next(taken)
                further.append(max(next(taken) - apart, 0.0) / depth)
        micro_steps = np.interp(rows, drafting, further).tolist() if depth else [0.0] * len(rows)
        return MeasuredCosts(tuple(rows), tuple(steps), tuple(micro_steps))

    def _milliseconds(self, batches: list[ForwardBatch]) -> list[float]:
        """Of each, in turns of all: the least, as whatever is in the way only adds, and is in the way of some turns."""
        left: list[int] = []
        for batch in batches:
            first = self._seconds(batch)  # it warms up: a GPU may compile kernels
            if self._steps.device.type != "cpu":
                first = self._seconds(batch)
            left.append(min(max(int(_TURNS_MILLISECONDS / 1000 / first), _LEAST_TURNS), _MOST_TURNS))
        taken: list[list[float]] = [[] for _ in batches]
        order = list(zip(batches, left, taken, strict=True))
        for turn in range(max(left)):
            order.reverse()  # there and back, so that of a step's neighbours one is of its own size
            for batch, turns, seconds in order:
                if turn < turns:
                    seconds.append(self._seconds(batch))
        return [1000 * min(seconds) for seconds in taken]

    def _seconds(self, batch: ForwardBatch) -> float:
        start = time.perf_counter()
        self._step(batch)
        return time.perf_counter() - start

    def _step(self, batch: ForwardBatch) -> StepOutput:
        with nullcontext() if self._threads is None else self._threads.step(decodes=True):
            output = self._steps.step(batch, self._cache)
        if self._threads is not None:
            self._threads_taken.add(self._threads.taken)
        return replace(output, token_ids=output.token_ids.cpu())  # waits for the device

    def _batch(self, places: list[int], drafts: int, *, are_joined: bool = False) -> ForwardBatch:
        """The tokens at these places of the text, each as a row; what follows each is to be drafted.

        are_joined: rows of places that follow each other are drafts of one sequence.
        """
        device = self._steps.device

        def ints(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        rows, size = len(places), self._cache.block_size
        checks = [-1] * rows
        if are_joined:
            follow = [b == a + 1 and (i + 1) % _TOGETHER > 0 for i, (a, b) in enumerate(pairwise(places))]
            checks = [self._text[place + 1] if on else -1 for place, on in zip(places, [*follow, False], strict=True)]
        one = torch.ones(rows, dtype=torch.int64, device=device)
        columns = list(range(-(-(max(places) + 1) // size)))
        return ForwardBatch(
            token_ids=ints([self._text[place] for place in places])[:, None],
            group_sizes=one,
            max_group_size=1,
            positions=ints(places),
            write_slots=ints(places),
            block_tables=ints(columns).repeat(rows, 1),
            context_slots=ints(places) + 1,
            query_slots=[1] * rows,
            context_slots_host=[place + 1 for place in places],
            num_single=rows,
            emit=ints(list(range(rows))),
            confidence=torch.zeros(rows, device=device),
            group_limits=one * (1 + drafts),
            max_group_limit=1 + drafts,
            sampling=empty_sampling(rows, device),
            text_lengths=ints(places) + 1,
            checks=ints(checks),
        )
