"""RunningStep: a batch that was handed to the device, and how its numbers become groups."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from torch import Tensor

from hamburger.engine.core.batch import BatchResult, GroupResult, ScheduledBatch, ScheduledSequence
from hamburger.engine.core.sequence import Sequence
from hamburger.engine.drafting.proposal import Proposal
from hamburger.engine.types.messages import TokenLogprobs
from hamburger.model.batch import Logprobs, StepOutput
from hamburger.model.device.overlapped import StepTail
from hamburger.model.device.transfer import Download


class EmittingRow(NamedTuple):
    """A row of the batch that emits: a sequence's last slot, or, with verified groups, one of its drafts.

    drafts: what the sequence is fed between its newest token and this row's choice. check: the draft behind them, which
    this row must choose for the next one to count; -1 where there is none.
    """

    item: ScheduledSequence
    sequence: Sequence
    drafts: list[int]
    check: int


def rows_of(item: ScheduledSequence) -> list[EmittingRow]:
    """The rows of a sequence that emits, in order."""
    drafts = [] if item.drafts is None else item.drafts.token_ids
    return [EmittingRow(item, item.sequence, drafts[:i], check) for i, check in enumerate([*drafts, -1])]


class RunningStep:
    """A LaunchedStep (batch.py). What it needs of its sequences it has read: they may go on, or end, before it does.

    emitting: the sequences of its emitting rows. tail: where these rows stand, on the device.
    """

    def __init__(
        self,
        launch_behind: Callable[[RunningStep, ScheduledBatch], RunningStep],
        batch: ScheduledBatch,
        tail: StepTail,
    ) -> None:
        self._launch_behind = launch_behind
        self._items = [item for item in batch.sequences if item.emits]
        self.emitting = [item.sequence for item in self._items]
        self.tail = tail
        self._scored = [
            (
                item.sequence.request_id,
                item.sequence.params.prompt_logprobs,
                len(item.sequence.unscored(item.num_slots)),
            )
            for item in (batch.sequences if tail.batch.scored is not None else ())
        ]
        output = tail.output
        self._has_logprobs, self._has_scores = output.logprobs is not None, output.prompt_logprobs is not None
        tensors = [output.group_sizes, output.token_ids, output.stop_probs]
        for logprobs in (output.logprobs, output.prompt_logprobs):
            if logprobs is not None:
                tensors += [logprobs.chosen, logprobs.top_ids, logprobs.top]
                tensors += [] if logprobs.ranks is None else [logprobs.ranks]
        self._download = Download(tensors)

    def then(self, batch: ScheduledBatch) -> RunningStep:
        return self._launch_behind(self, batch)

    def result(self) -> BatchResult:
        sizes, tokens, stop_probs, *rest = self._download.wait()
        logprobs = Logprobs(*rest[:3]) if self._has_logprobs else None
        output = StepOutput(tokens, sizes, stop_probs, logprobs)
        if self.tail.batch.checks is None:
            groups = _group_results(output, self.emitting)
        else:
            groups = _verified_results(output, self._items)
        return BatchResult(groups, self._prompt_results(rest[-4:]) if self._has_scores else {})

    def _prompt_results(self, scored: list[Tensor]) -> dict[str, list[TokenLogprobs]]:
        """The scored tokens, in the batch's order, as entries of their requests."""
        tokens = zip(*(tensor.tolist() for tensor in scored), strict=True)
        return {
            request_id: [
                _entry(chosen, ids, top, k or 0, rank) for chosen, ids, top, rank in islice(tokens, num_tokens)
            ]
            for request_id, k, num_tokens in self._scored
        }


def _group_results(output: StepOutput, emitting: list[Sequence]) -> list[GroupResult]:
    """Cut the padding and turn tensors into plain values."""
    if not emitting:
        return []
    sizes, tokens, stop_probs = output.group_sizes.tolist(), output.token_ids.tolist(), output.stop_probs.tolist()
    results = [GroupResult(t[:n], p[:n]) for n, t, p in zip(sizes, tokens, stop_probs, strict=True)]
    lp = output.logprobs
    if lp is None:
        return results
    chosen, top_ids, top = lp.chosen.tolist(), lp.top_ids.tolist(), lp.top.tolist()
    for row, sequence in enumerate(emitting):
        k = sequence.params.logprobs
        if k is None:
            continue
        entries = [_entry(chosen[row][i], top_ids[row][i], top[row][i], k) for i in range(sizes[row])]
        results[row] = GroupResult(results[row].token_ids, results[row].stop_probs, entries)
    return results


def _verified_results(output: StepOutput, items: list[ScheduledSequence]) -> list[GroupResult]:
    """Of each sequence the longest prefix of its drafts that the trunk chose too, and the trunk's next token."""
    drafts = [[] if item.drafts is None else item.drafts.token_ids for item in items]
    emitting = [item.sequence for item, own in zip(items, drafts, strict=True) for _ in (0, *own)]
    of_rows = _group_results(output, emitting)
    results, start = [], 0
    for own in drafts:
        num_right = 0
        while num_right < len(own) and of_rows[start + num_right].token_ids[0] == own[num_right]:
            num_right += 1
        group = of_rows[start : start + num_right + 1]
        start += len(own) + 1
        entries = [entry for row in group for entry in (row.logprobs or [])[:1]]
        results.append(
            GroupResult(
                [row.token_ids[0] for row in group],
                [row.stop_probs[0] for row in group],
                entries if group[0].logprobs is not None else None,
                _proposal(group[-1]),
            )
        )
    return results


def _proposal(row: GroupResult) -> Proposal | None:
    """What a row emits behind its own token."""
    drafts = row.token_ids[1:]
    return Proposal("micro", drafts, [1 - p for p in row.stop_probs[1:]]) if drafts else None


def _entry(logprob: float, top_ids: list[int], top: list[float], k: int, rank: int | None = None) -> TokenLogprobs:
    return TokenLogprobs(logprob, list(zip(top_ids[:k], top[:k], strict=True)), rank)
