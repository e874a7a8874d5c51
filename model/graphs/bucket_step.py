"""BucketStep: the macro-step of one number of rows as replayable pieces, in the order that a batch needs."""

from __future__ import annotations

from functools import partial

from hamburger.model.batch import ForwardBatch, SamplingBatch, StepOutput
from hamburger.model.emission.static import StaticChoices
from hamburger.model.graphs.capture import Capture, Work
from hamburger.model.graphs.pieces import KINDS, Kind, Pieces
from hamburger.model.graphs.static_batch import with_extras


class BucketStep:
    """The macro-step of one number of rows: its pieces, captured, in the order that a batch needs."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = pieces
        self._compute: list[Work] = []
        self._choose: dict[Kind, list[Work]] = {kind: [] for kind in KINDS}

    def warm(self, capture: Capture) -> None:
        """All pieces once."""

        def all_pieces() -> None:
            for index in range(self.pieces.width):
                self.pieces.compute(index)
                for kind in KINDS:
                    self.pieces.choose(kind, index)

        capture.warm(all_pieces)

    def capture(self, capture: Capture) -> None:
        """All pieces in the order of a step."""
        pieces = self.pieces
        for index in range(pieces.width):
            self._compute.append(capture(partial(pieces.compute, index)))
            for kind in KINDS:
                self._choose[kind].append(capture(partial(pieces.choose, kind, index)))

    def trunk(self) -> None:
        self._compute[0]()

    def groups(self, batch: ForwardBatch) -> StepOutput:
        """Choices and micro-steps of a batch whose choices are loaded into the static rows, and whose trunk has run."""
        rows, sampling, pieces = len(batch.emit), batch.sampling, self.pieces
        special = sampling.adjustments is not None or sampling.max_logprobs >= 0
        kind = _kind(sampling)
        choice = pieces.choices[kind]
        if special:
            extended = with_extras(choice.sampling, sampling)
            choice = StaticChoices(pieces.groups, extended, pieces.batch.confidence, pieces.batch.group_limits)
        for index in range(min(batch.max_group_limit, pieces.width)):
            if index:
                self._compute[index]()
            if special:
                if index == 0:
                    pieces.groups.begin()
                choice.take(index, pieces.tensors.logits, pieces.tensors.stop)
            else:
                self._choose[kind][index]()
        return _first(choice.output(), rows)


def _kind(sampling: SamplingBatch) -> Kind:
    return sampling.any_sampled, sampling.any_sampled and sampling.any_filtered


def _first(output: StepOutput, rows: int) -> StepOutput:
    """Copies of the first rows: the next step overwrites what they were made of."""
    return StepOutput(
        output.token_ids[:rows].clone(), output.group_sizes[:rows].clone(), output.stop_probs[:rows].clone(),
        None if output.logprobs is None else output.logprobs.first(rows),
    )  # fmt: skip
