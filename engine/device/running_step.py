"""RunningStep: a batch that was handed to the device, and how its numbers become groups."""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress, islice

from torch import Tensor

from hamburger.engine.core.batch import BatchResult, GroupResult, ScheduledBatch
from hamburger.engine.core.sequence import Sequence
from hamburger.engine.types.messages import TokenLogprobs
from hamburger.model.batch import Logprobs, StepOutput
from hamburger.model.device.overlapped import Tail
from hamburger.model.device.transfer import Download


class RunningStep:
    """A LaunchedStep (batch.py). What it needs of its sequences it has read: they may go on, or end, before it does.

    emitting: the sequences of its emitting rows. tail: where these rows stand, on the device.
    """

    def __init__(
        self,
        launch_behind: Callable[[RunningStep, ScheduledBatch], RunningStep],
        batch: ScheduledBatch,
        tail: Tail,
        on_longest_group: Callable[[int], None] | None = None,
    ) -> None:
        """on_longest_group: called once the step is done, with the size of the longest group of the rows without a
        grammar, if there are any."""
        self._launch_behind = launch_behind
        self.emitting = [item.sequence for item in batch.sequences if item.emits]
        self.tail = tail
        self._scored = [
            (
                item.sequence.request_id,
                item.sequence.params.prompt_logprobs,
                len(item.sequence.unscored(item.num_slots)),
            )
            for item in batch.sequences
        ]
        output = tail.output
        self._on_longest_group = on_longest_group
        self._is_free = [sequence.matcher is None for sequence in self.emitting]
        self._has_logprobs, self._has_scores = output.logprobs is not None, output.prompt_logprobs is not None
        tensors = [output.group_sizes, output.token_ids, output.stop_probs]
        for logprobs in (output.logprobs, output.prompt_logprobs):
            if logprobs is not None:
                tensors += [logprobs.chosen, logprobs.top_ids, logprobs.top]
        self._download = Download(tensors)

    def then(self, batch: ScheduledBatch) -> RunningStep:
        return self._launch_behind(self, batch)

    def result(self) -> BatchResult:
        sizes, tokens, stop_probs, *rest = self._download.wait()
        if self._on_longest_group is not None and any(self._is_free):
            self._on_longest_group(max(compress(sizes.tolist(), self._is_free)))
        logprobs = Logprobs(*rest[:3]) if self._has_logprobs else None
        groups = _group_results(StepOutput(tokens, sizes, stop_probs, logprobs), self.emitting)
        return BatchResult(groups, self._prompt_results(rest[-3:]) if self._has_scores else {})

    def _prompt_results(self, scored: list[Tensor]) -> dict[str, list[TokenLogprobs]]:
        """The scored tokens, in the batch's order, as entries of their requests."""
        tokens = zip(*(tensor.tolist() for tensor in scored), strict=True)
        return {
            request_id: [_entry(chosen, ids, top, k or 0) for chosen, ids, top in islice(tokens, num_tokens)]
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


def _entry(logprob: float, top_ids: list[int], top: list[float], k: int) -> TokenLogprobs:
    return TokenLogprobs(logprob, list(zip(top_ids[:k], top[:k], strict=True)))
