"""The training objective (docs/training.md): token losses, distillation and the stop head's targets.

Sums come back with their counts, so that gradient accumulation and several processes divide by what they saw together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hamburger.model.modules.hamburger import HamburgerModel
from hamburger.training.batches.batches import NO_TARGET, TrainBatch
from hamburger.training.forward.composed_states import composed_states, from_first_composed
from hamburger.training.forward.network import is_for_composed, micro_head, micro_states, trunk_states
from hamburger.training.loss.token_loss import token_losses, token_targets
from hamburger.training.recipe import ObjectiveWeights

# Of composed slots that a text could have had and has not: the mean over the embedded default's (docs/training.md).
UNSEEN_FIDELITY = 0.6
_FIDELITY_ROWS = 128  # of the head's logits at once


class Objective(ObjectiveWeights):
    """The loss that the weights and targets of a recipe describe."""

    def token_mask(self, batch: TrainBatch) -> Tensor:
        """bool [M, W]: the targets that are trained."""
        valid = batch.targets != NO_TARGET
        place = torch.arange(valid.shape[1], device=valid.device)
        if self.lookahead == "group":
            valid = valid & (place < batch.next_sizes[:, None])
        if not self.micro_weight:
            valid = valid & (place == 0)
        return valid if self.first_token else valid & (place > 0)

    def stop_mask(self, batch: TrainBatch) -> Tensor:
        """bool [M, W]: the stop values that are trained; the agreement target looks one token further."""
        if self.stop_target == "boundary":
            inside = torch.arange(batch.targets.shape[1], device=batch.targets.device) < batch.next_sizes[:, None]
            return inside & (batch.targets != NO_TARGET)
        return F.pad(self.token_mask(batch)[:, 1:], (0, 1), value=False)

    def stop_targets(self, batch: TrainBatch, base_probs: Tensor, fidelity: Tensor | None = None) -> Tensor:
        """float32 [M, W]: what the stop values should be, given Outcome.base_probs; they count where stop_mask says.

        fidelity: float32 [M] of group_fidelity, for that target.
        """
        place = torch.arange(batch.targets.shape[1], device=batch.targets.device)
        if self.stop_target == "boundary":
            return (place == batch.next_sizes[:, None] - 1).float()
        right = base_probs[:, 1:]
        if fidelity is not None:
            went_on = place[:-1] < batch.next_sizes[:, None] - 1
            right = right * torch.where(went_on & fidelity.isfinite()[:, None], fidelity[:, None], UNSEEN_FIDELITY)
        return F.pad(1 - right, (0, 1))

    def counts(self, batch: TrainBatch) -> Tensor:
        """float32 [3]: how many token losses, stop losses and slots to match a batch has."""
        matched = from_first_composed(batch.slots) if batch.uncomposed is not None else batch.emit.new_zeros(1)
        return torch.stack((self.token_mask(batch).sum(), self.stop_mask(batch).sum(), matched.sum())).float()


@torch.no_grad()
def group_fidelity(hidden: Tensor, head: Tensor, batch: TrainBatch) -> Tensor:
    """float32 [M]: exp(-KL) of the base's likeliest ids from the model's, for the token after each row's next group.

    NaN where that group has one token, or nothing comes after it. hidden: [M, D], the trunk's normed states of the
    batch's rows; head: [V, D]. The batch needs the base's likeliest ids.
    """
    found = torch.full(batch.emit.shape, torch.nan, device=hidden.device)
    if batch.teacher_ids is None or batch.teacher_logprobs is None:
        return found
    followed = (batch.next_sizes[:-1] > 1) & (batch.emit[1:] == batch.emit[:-1] + 1)
    for rows in followed.nonzero().squeeze(-1).split(_FIDELITY_ROWS):
        after = rows + 1
        own = F.linear(hidden[after].to(head.dtype), head).float().log_softmax(-1)
        base = batch.teacher_logprobs[after, 0]
        apart = base - own.gather(-1, batch.teacher_ids[after, 0])
        divergence = (base.exp() * apart).masked_fill(base == -torch.inf, 0).sum(-1)
        found[rows] = (-divergence.clamp(min=0)).exp()
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """Loss sums of one batch, and what validation reads (detached).

    token_loss, stop_loss, matching_loss: float32 [] sums over `Objective.counts` entries, weights included but that of
        the stop head.
    predicted: int64 [M, W], the likeliest id at each position; -1 where nothing was computed.
    stop_logits, stop_targets: float32 [M, W], what the stop head said and should have said. base_probs: float32 [M, W],
        the base's probability of `predicted` (0 without teacher).
    """

    token_loss: Tensor
    stop_loss: Tensor
    predicted: Tensor
    stop_logits: Tensor
    stop_targets: Tensor
    base_probs: Tensor
    matching_loss: Tensor

    def loss(self, counts: Tensor, stop_weight: float) -> Tensor:
        """The objective's value given the counts (float32 [3]) of everything that is averaged together."""
        token, stop, matching = (self.losses() / counts.clamp(min=1)).unbind()
        return token + stop_weight * stop + matching

    def losses(self) -> Tensor:
        """float32 [3]: the sums."""
        return torch.stack((self.token_loss, self.stop_loss, self.matching_loss))


class TrainingNetwork(nn.Module):
    """A model and its objective: the one module that is trained, so that wrappers see every parameter's use."""

    def __init__(self, model: HamburgerModel, objective: Objective, *, checkpointing: bool = False) -> None:
        """checkpointing: keep less of the trunk's forward pass, and compute it twice (network.trunk_states)."""
        super().__init__()
        self.model = model
        self.objective = objective
        self.checkpointing = checkpointing
        graft = model.config.graft
        if graft is None:
            raise ValueError("a plain base model has no graft to train.")
        self.graft = graft
        places = None
        if model.has_short_list:  # vocabulary id -> place in the short list, or -1
            places = torch.full((model.config.trunk.vocab_size,), -1, device=model.short_list.device)
            places[model.short_list] = torch.arange(len(model.short_list), device=places.device)
        self.register_buffer("places", places, persistent=False)
        self.places: Tensor | None
        self._short_head: Tensor | None = None  # of a head that is not trained

    def forward(self, batch: TrainBatch) -> Outcome:
        """Run a batch; the sums cover its own rows only."""
        if batch.states is not None:  # the last feature is the final normed state
            features = batch.states.to(self.model.head_weight.dtype)
            return self._outcome(features[:, -1], features, batch)
        if batch.uncomposed is not None:
            states = composed_states(self.model, batch.slots, batch.uncomposed, self.graft.feature_layers)
            matching = self.objective.matching * states.distance
            return self._outcome(states.hidden[batch.emit], states.features[batch.emit], batch, matching)
        hidden, features = trunk_states(
            self.model, batch.slots, self.graft.feature_layers, checkpointing=self.checkpointing
        )
        return self._outcome(hidden[batch.emit], features[batch.emit], batch)

    def _outcome(self, hidden: Tensor, features: Tensor, batch: TrainBatch, matching: Tensor | None = None) -> Outcome:
        """From the trunk's states of the emitting rows: hidden [M, D], features [M, F, D]."""
        m, width = batch.targets.shape
        mask = self.objective.token_mask(batch)
        teacher = _Teacher(batch.teacher_ids, batch.teacher_logprobs)
        token_loss = hidden.new_zeros((), dtype=torch.float32)
        predicted = torch.full((m, width), -1, device=hidden.device)
        base_probs = torch.zeros(m, width, device=hidden.device)
        stop_logits = torch.zeros(m, width, device=hidden.device)
        if self.objective.first_token:
            at = mask[:, 0].nonzero().squeeze(-1)
            head = _Head(_cast_once(self.model.head_weight), None, None)
            first = self._tokens(hidden[at], batch.targets[at, 0], teacher.at(at, 0), head)
            token_loss, predicted[at, 0], base_probs[at, 0] = first.loss, first.predicted, first.base_probs
        stop_logits[:, 0] = self.model.stop_head(hidden).squeeze(-1).float()
        rows = mask[:, 1].nonzero().squeeze(-1)
        if not len(rows):  # one row that counts for nothing, so that every parameter has a gradient on every process
            rows = rows.new_zeros(1)
        states = micro_states(self.model, features[rows], batch.targets[rows, :-1].clamp(min=0))
        stop_logits[rows, 1:] = self.model.stop_head(states).squeeze(-1).float()
        row, step = mask[rows, 1:].nonzero(as_tuple=True)
        at, place = rows[row], step + 1
        short_list = self.model.short_list if self.places is not None else None
        head = _Head(self._micro_head(), short_list, self.places)
        token = self._tokens(states[row, step], batch.targets[at, place], teacher.at(at, place), head)
        token_loss = token_loss + self.objective.micro_weight * token.loss
        predicted[at, place], base_probs[at, place] = token.predicted, token.base_probs
        # The same for what runs only where there are composed slots.
        for_composed = [p for name, p in self.model.named_parameters() if is_for_composed(name) and p.requires_grad]
        token_loss = token_loss + 0 * sum(p.sum() for p in for_composed)
        measured = self.objective.stop_target == "fidelity"
        fidelity = group_fidelity(hidden, self.model.head_weight, batch) if measured else None
        stops, stop_mask = self.objective.stop_targets(batch, base_probs, fidelity), self.objective.stop_mask(batch)
        stop_loss = F.binary_cross_entropy_with_logits(stop_logits[stop_mask], stops[stop_mask], reduction="sum")
        matching = torch.zeros_like(stop_loss) if matching is None else matching
        return Outcome(token_loss, stop_loss, predicted, stop_logits.detach(), stops, base_probs, matching)

    def _micro_head(self) -> Tensor:
        if self._short_head is not None:
            return self._short_head
        head = _cast_once(micro_head(self.model))
        if self.places is not None and not self.model.head_weight.requires_grad:
            self._short_head = head
        return head

    def _tokens(self, states: Tensor, targets: Tensor, teacher: tuple[Tensor, Tensor] | None, head: _Head) -> _Tokens:
        """Token losses of states [R, D] with targets [R]."""
        rivals = None if teacher is None else (head.place(teacher[0]), teacher[1])
        objective = self.objective
        aims = token_targets(
            head.place(targets), rivals, cross_entropy=objective.cross_entropy, distillation=objective.distillation
        )
        loss, likeliest = token_losses(states, head.weight, aims)
        predicted = likeliest if head.ids is None else head.ids[likeliest]
        base_probs = torch.zeros(len(states), device=states.device)
        if teacher is not None:
            ids, base = teacher
            base_probs = (base.exp() * (ids == predicted[:, None])).sum(-1)
        return _Tokens(loss, predicted, base_probs)


@dataclass(frozen=True, slots=True, eq=False)
class _Head:
    """weight [L, D]: logits over L ids; ids int64 [L] and places int64 [V] (-1: not there) where L is a short list."""

    weight: Tensor
    ids: Tensor | None
    places: Tensor | None

    def place(self, ids: Tensor) -> Tensor:
        """Vocabulary ids -> rows of the weight, -1 where it has none."""
        return ids if self.places is None else self.places[ids]


def _cast_once(weight: Tensor) -> Tensor:
    """As autocast would cast it, which otherwise does so for every chunk."""
    kind = weight.device.type
    return weight.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else weight


@dataclass(frozen=True, slots=True, eq=False)
class _Tokens:
    loss: Tensor
    predicted: Tensor
    base_probs: Tensor


class _Teacher:
    def __init__(self, ids: Tensor | None, logprobs: Tensor | None) -> None:
        self.ids, self.logprobs = ids, logprobs

    def at(self, rows: Tensor, position: Tensor | int) -> tuple[Tensor, Tensor] | None:
        if self.ids is None or self.logprobs is None:
            return None
        return self.ids[rows, position], self.logprobs[rows, position]
