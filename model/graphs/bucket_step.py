"""BucketStep: the macro-step of one number of rows as replayable pieces, in the order that a batch needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hamburger.model.batch import ForwardBatch, SamplingBatch, StepOutput
from hamburger.model.early_exit import Costs
from hamburger.model.emission.masked import MaskedStep
from hamburger.model.graphs.capture import Capture, Work
from hamburger.model.graphs.pieces import GREEDY, KINDS, Kind, Pieces
from hamburger.model.graphs.static_batch import with_extras

_TIMED_ROUNDS = 8  # of a bucket's micro-steps


class BucketStep:
    """The macro-step of one number of rows: its pieces, captured, in the order that a batch needs."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = pieces
        self._compute: list[Work] = []
        self._choose: dict[Kind, list[Work]] = {kind: [] for kind in KINDS}
        self._whole: dict[Kind, Work] = {}
        # What one piece leaves for the next, for as long as there are graphs: it must not become others' memory.
        self._kept: list[object] = []

    def warm(self, capture: Capture) -> None:
        """All pieces once."""

        def all_pieces() -> None:
            for index in range(self.pieces.width):
                self.pieces.compute(index)
                for kind in KINDS:
                    self.pieces.choose(kind, index)

        capture.warm(all_pieces)

    def capture(self, capture: Capture, *, whole: bool) -> None:
        """All pieces in the order of a step. whole: also all of them at once."""
        pieces = self.pieces
        for index in range(pieces.width):
            self._compute.append(capture(partial(pieces.compute, index)))
            for kind in KINDS:
                self._choose[kind].append(capture(partial(pieces.choose, kind, index)))
        self._kept += pieces.left()
        if whole and pieces.width > 1:
            for kind in KINDS:
                self._whole[kind] = capture(partial(_all_in_turn, pieces, kind))
                self._kept += pieces.left()

    def costs(self, clock: Callable[[], float]) -> Costs:
        """Of micro-steps of greedy rows: several rounds of all of them, with one check at the end, and with one after
        each."""
        number = _TIMED_ROUNDS * (self.pieces.width - 1)

        def seconds(*, checks: bool) -> float:
            self._any_goes_on()  # nothing else runs then
            started = clock()
            for _ in range(_TIMED_ROUNDS):
                for index in range(1, self.pieces.width):
                    self._compute[index]()
                    self._choose[GREEDY][index]()
                    if checks:
                        self._any_goes_on()
            if not checks:
                self._any_goes_on()
            return clock() - started

        seconds(checks=True)  # what is done for the first time takes longer
        once, each = seconds(checks=False), seconds(checks=True)
        check = max(0.0, (each - once) / (number - 1))
        return Costs(max(0.0, (once - check) / number), check)

    def trunk(self) -> None:
        self._compute[0]()

    def groups(self, batch: ForwardBatch, *, exits: bool) -> StepOutput:
        """Choices and micro-steps of a batch whose choices were loaded into the static rows, and whose trunk has run.

        exits: ask after each choice whether any group goes on.
        """
        rows, sampling, pieces = len(batch.emit), batch.sampling, self.pieces
        special = sampling.adjustments is not None or sampling.max_logprobs >= 0
        kind = _kind(sampling)
        choice = pieces.choices[kind]
        if special:
            extended = with_extras(choice.sampling, sampling)
            choice = MaskedStep(pieces.groups, extended, pieces.batch.confidence, pieces.batch.group_limits)
        for index in range(min(batch.max_group_limit, pieces.width)):
            if index:
                if exits and not self._any_goes_on():
                    break
                self._compute[index]()
            if special:
                if index == 0:
                    pieces.groups.begin()
                choice.take(index, pieces.handover.logits, pieces.handover.stop)
            else:
                self._choose[kind][index]()
        return _first(choice.output(), rows)

    def whole(self, batch: ForwardBatch) -> StepOutput | None:
        """The step in one graph, trunk included; None where none was captured that does it."""
        sampling, kind = batch.sampling, _kind(batch.sampling)
        special = sampling.adjustments is not None or sampling.max_logprobs >= 0 or sampling.constraint is not None
        if special or batch.max_group_limit == 1 or kind not in self._whole:
            return None
        self._whole[kind]()
        return _first(self.pieces.choices[kind].output(), len(batch.emit))

    def _any_goes_on(self) -> bool:
        """Waits for the device."""
        return bool(self.pieces.groups.going.any())


def _kind(sampling: SamplingBatch) -> Kind:
    return sampling.any_sampled, sampling.any_sampled and sampling.any_filtered


def _all_in_turn(pieces: Pieces, kind: Kind) -> None:
    for index in range(pieces.width):
        pieces.compute(index)
        pieces.choose(kind, index)


def _first(output: StepOutput, rows: int) -> StepOutput:
    """Copies of the first rows: the next step overwrites what they were made of."""
    return StepOutput(
        output.token_ids[:rows].clone(), output.group_sizes[:rows].clone(), output.stop_probs[:rows].clone(),
        None if output.logprobs is None else output.logprobs.first(rows),
    )  # fmt: skip
