"""The pieces that a decoding macro-step of static rows is cut into: the trunk, each micro-step, each choice of a token.

Each leaves what the next reads in tensors that stay where they are; BucketStep captures and replays them. What
the trunk leaves may also come from elsewhere (`take_over`): from a step with prompts, which no graph holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hamburger.model.backend import Backend
from hamburger.model.batch import ForwardBatch, SamplingBatch, StepOutput
from hamburger.model.emission.scoring import reads_of
from hamburger.model.emission.static import Groups, StaticChoices
from hamburger.model.graphs.capture import Capture, Work
from hamburger.model.graphs.static_batch import with_extras
from hamburger.model.group_cache import GroupCache
from hamburger.model.kv_cache import PagedKVCache

# (any_sampled, any_filtered): what a choice has to compute.
Kind = tuple[bool, bool]
GREEDY: Kind = (False, False)
KINDS: tuple[Kind, ...] = (GREEDY, (True, False), (True, True))


@dataclass(frozen=True, slots=True, eq=False)
class StepTensors:
    """What pieces leave for each other, of M rows; G is the widest group.

    hidden [M, D] and features [M, F, D] are the trunk's, of the model's state dtype. logits [M, V], of the same, and
    stop, float32 [M] (None of verified groups), are of the newest state. groups: what was chosen.
    """

    groups: Groups
    hidden: Tensor
    features: Tensor
    logits: Tensor
    stop: Tensor | None

    @classmethod
    def empty(cls, backend: Backend, rows: int, *, is_verified: bool) -> StepTensors:
        trunk, graft, device = backend.config.trunk, backend.config.graft, backend.device
        num_features = len(graft.feature_layers) if graft else 0

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(rows, *shape, dtype=backend.state_dtype, device=device)

        return cls(
            Groups.empty(rows, backend.config.max_group, device),
            zeros(trunk.hidden_size),
            zeros(num_features, trunk.hidden_size),
            zeros(trunk.vocab_size),
            None if is_verified else torch.zeros(rows, device=device),
        )

    def first(self, rows: int) -> StepTensors:
        """That of the first rows: views."""
        stop = None if self.stop is None else self.stop[:rows]
        return StepTensors(self.groups.first(rows), self.hidden[:rows], self.features[:rows], self.logits[:rows], stop)


class Pieces:
    """Those of one number of rows, on a backend.

    batches: the static rows, the same for each kind of choice. is_verified: of verified groups, whose tokens after the
    first are drafts.
    """

    def __init__(
        self,
        backend: Backend,
        cache: PagedKVCache,
        batches: dict[Kind, ForwardBatch],
        tensors: StepTensors,
        *,
        is_verified: bool,
    ) -> None:
        self._backend, self._cache, self._is_verified = backend, cache, is_verified
        self.batch, self.tensors, self.groups = batches[GREEDY], tensors, tensors.groups
        self.width = self.batch.max_group_limit
        self.choices = {kind: self.choices_of(batch.sampling) for kind, batch in batches.items()}
        # What captured micro-steps leave for each other: it must live as long as their graphs.
        self._group: GroupCache | None = None

    def choices_of(self, sampling: SamplingBatch) -> StaticChoices:
        """What chooses the static rows' tokens by this sampling, of theirs."""
        batch = self.batch
        return StaticChoices(self.groups, sampling, batch.confidence, batch.group_limits, is_verified=self._is_verified)

    def compute(self, index: int) -> None:
        """The state that token `index` of the groups is chosen from, its logits and its stop value."""
        if index == 0:
            self._trunk()
        else:
            self._micro_step(index)

    def take_over(self, hidden: Tensor, features: list[Tensor]) -> None:
        """In place of compute(0): the states [R, D] and features [R, D] each of the first rows, computed elsewhere."""
        rows, to = len(hidden), self.tensors
        to.hidden[:rows] = hidden
        to.logits[:rows] = self._backend.head(hidden)
        if to.stop is not None:
            to.stop[:rows] = self._backend.stop_logits(hidden, 0)
        if features:
            torch.stack(features, dim=1, out=to.features[:rows])

    def choose(self, kind: Kind, index: int) -> None:
        """Token `index` of the groups."""
        if index == 0:
            self.groups.begin()
        self.choices[kind].take(index, self.tensors.logits, self.tensors.stop)

    def _trunk(self) -> None:
        self.take_over(*self._backend.trunk(self.batch, self._cache, reads_of(self.batch)))

    def _micro_step(self, index: int) -> None:
        if index == 1:
            self._group = self._backend.begin_group(self.tensors.features)
        if self._group is None:
            raise RuntimeError("a group goes on that never began.")
        state, logits = self._backend.micro_step(self.groups.newest, self._group)
        self.tensors.logits.copy_(logits)
        if self.tensors.stop is not None:
            self.tensors.stop.copy_(self._backend.stop_logits(state, index))


class BucketStep:
    """The macro-step of one number of rows: its pieces, captured, in the order that a batch needs."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = pieces
        self._compute: list[Work] = []
        self._choose: list[dict[Kind, Work]] = []

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
            self._choose.append({kind: capture(partial(pieces.choose, kind, index)) for kind in KINDS})

    def trunk(self) -> None:
        """Of a batch that is loaded into the static rows."""
        self._compute[0]()

    def groups(self, batch: ForwardBatch) -> StepOutput:
        """Choices and micro-steps of a batch whose choices are loaded into the static rows, and whose trunk has run."""
        rows, sampling, pieces = len(batch.emit), batch.sampling, self.pieces
        special = sampling.adjustments is not None or sampling.max_logprobs >= 0
        kind = _kind(sampling)
        choice = pieces.choices[kind]
        if special:
            choice = pieces.choices_of(with_extras(choice.sampling, sampling))
        for index in range(min(batch.max_group_limit, pieces.width)):
            if index:
                self._compute[index]()
            if special:
                if index == 0:
                    pieces.groups.begin()
                choice.take(index, pieces.tensors.logits, pieces.tensors.stop)
            else:
                self._choose[index][kind]()
        return _first(choice.output(), rows)


def _kind(sampling: SamplingBatch) -> Kind:
    return sampling.any_sampled, sampling.any_sampled and sampling.any_filtered


def _first(output: StepOutput, rows: int) -> StepOutput:
    """Copies of the first rows: the next step overwrites what they were made of."""
    return StepOutput(
        output.token_ids[:rows].clone(), output.group_sizes[:rows].clone(), output.stop_probs[:rows].clone(),
        None if output.logprobs is None else output.logprobs.first(rows),
    )  # fmt: skip
