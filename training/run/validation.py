"""How well a network foresees answers that it was not trained on, teacher forced: losses, accuracies and the dial.

The dial is read as the engine reads it, but along the given answer and with one token a slot before it: a group goes on
after a token while its continue probability is at least the confidence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from torch import Tensor, nn

from hamburger.training.batches.batches import NO_TARGET, TrainBatch
from hamburger.training.batches.packs import Pack
from hamburger.training.loss.objective import Objective, Outcome, TrainingNetwork

CONFIDENCES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


class Validator:
    """Held-out packs, in the groups that are trained (`grouped`) and with one token a group (`single`)."""

    def __init__(self, grouped: Sequence[Pack], single: Sequence[Pack], accelerator: Accelerator) -> None:
        self._grouped, self._single, self._accelerator = grouped, single, accelerator
        self._taught = single[0].examples[0].top_ids is not None

    @torch.no_grad()
    def __call__(self, network: nn.Module, core: TrainingNetwork, amp: torch.autocast) -> dict[str, Any]:
        """network: `core` as it is wrapped for several processes. Every process gets the whole report."""
        was_training = network.training
        network.eval()
        try:
            report = self._losses(network, core, amp)
            # Every token of every answer starts a group here, and every micro-step is run.
            seen = core.objective.model_copy(
                update={
                    "cross_entropy": 0.0,
                    "distillation": 0.0,
                    "lookahead": "dense",
                    "first_token": True,
                    "micro_weight": 1.0,
                }
            )
            with _swapped(core, seen):
                return report | self._dial(network, core, amp)
        finally:
            network.train(was_training)

    def _losses(self, network: nn.Module, core: TrainingNetwork, amp: torch.autocast) -> dict[str, Any]:
        sums = torch.zeros(10, dtype=torch.float64, device=self._accelerator.device)
        for batch, counted in self._batches(self._grouped, core.graft.max_group):
            with amp:
                outcome: Outcome = network(batch)
            mask, wanted = core.objective.stop_mask(batch), outcome.stop_targets
            right = (((outcome.stop_logits > 0) == (wanted > 0.5)) & mask).sum()
            losses = torch.stack((outcome.token_loss, outcome.stop_loss)).double()
            others = torch.cat((torch.stack((right, mask.sum())), trunk_counts(batch, outcome))).double()
            sums += torch.cat((losses, core.objective.counts(batch)[:2].double(), others)) * counted
        token, stop, tokens, stops, right_stops, seen, *read = self._total(sums).tolist()
        token, stop = token / max(tokens, 1), stop / max(stops, 1)
        report: dict[str, Any] = {}
        if core.objective.first_token and self._taught:
            report["agreement_after"] = {"composed": read[0] / max(read[1], 1), "single": read[2] / max(read[3], 1)}
        return report | {
            "loss": token + core.objective.stop * stop,
            "token_loss": token,
            "stop_loss": stop,
            "stop_accuracy": right_stops / max(seen, 1),
        }

    def _dial(self, network: nn.Module, core: TrainingNetwork, amp: torch.autocast) -> dict[str, Any]:
        width = core.graft.max_group
        places = torch.zeros(3, width, dtype=torch.float64, device=self._accelerator.device)
        walks = torch.zeros(len(CONFIDENCES), 5, dtype=torch.float64, device=self._accelerator.device)
        for batch, counted in self._batches(self._single, width):
            with amp:
                outcome: Outcome = network(batch)
            places += counted * place_counts(batch, outcome)
            for i, confidence in enumerate(CONFIDENCES):
                walks[i] += counted * dial_counts(batch, outcome, confidence)
        (valid, right, agreeing), totals = self._total(places).tolist(), self._total(walks).tolist()
        dial = []
        for confidence, (tokens, groups, extra, agreed, base_prob) in zip(CONFIDENCES, totals, strict=True):
            point = {"confidence": confidence, "tokens_per_kv": tokens / max(groups, 1)}
            if self._taught:
                point |= {"extra_agreement": agreed / max(extra, 1), "extra_base_prob": base_prob / max(extra, 1)}
            dial.append(point)
        report: dict[str, Any] = {"token_accuracy": _shares(right, valid)}
        if self._taught:
            report["base_agreement"] = _shares(agreeing, valid)
        return report | {"dial": dial}

    def _batches(self, packs: Sequence[Pack], max_group: int) -> Iterator[tuple[TrainBatch, float]]:
        """This process's share. All processes run equally many; those at the end may run one that does not count."""
        rank, world = self._accelerator.process_index, self._accelerator.num_processes
        for first in range(0, len(packs), world):
            at = first + rank
            pack = packs[min(at, len(packs) - 1)]
            yield pack.collate(max_group).to(self._accelerator.device), float(at < len(packs))

    def _total(self, sums: Tensor) -> Tensor:
        total: Tensor = self._accelerator.reduce(sums, "sum")
        return total


def place_counts(batch: TrainBatch, outcome: Outcome) -> Tensor:
    """float64 [3, W]: tokens at each place of a group, how many are foreseen, and how many as the base's likeliest."""
    valid = batch.targets != NO_TARGET
    right = valid & (outcome.predicted == batch.targets)
    return torch.stack((valid.sum(0), right.sum(0), _base_agrees(batch, outcome).sum(0))).double()


def trunk_counts(batch: TrainBatch, outcome: Outcome) -> Tensor:
    """int64 [4]: of the trunk's own tokens after composed slots, how many are the base's likeliest, and of how many;
    then the same after slots of one token. They say whether the trunk can read composed slots.
    """
    composed = batch.slots.group_sizes[batch.emit] > 1
    agrees = _base_agrees(batch, outcome)[:, 0]
    return torch.stack(((agrees & composed).sum(), composed.sum(), (agrees & ~composed).sum(), (~composed).sum()))


def dial_counts(batch: TrainBatch, outcome: Outcome, confidence: float) -> Tensor:
    """float64 [5] of a batch in which every token of an answer has a row: tokens, groups that the dial makes of them,
    tokens beyond a group's first, how many of these are the base's likeliest, and the base's probability of them.
    """
    valid = batch.targets != NO_TARGET
    goes_on = (outcome.stop_logits[:, :-1].neg().sigmoid() >= confidence) & valid[:, 1:]
    extra = goes_on.long().cumprod(1).bool()  # [M, W - 1]: whether the group holds its token 1, 2, ...
    lengths = (1 + extra.sum(1)).tolist()
    starts, at = [], 0
    while at < len(lengths):
        starts.append(at)
        at += lengths[at]
    accepted = extra[starts]
    agrees = accepted & _base_agrees(batch, outcome)[starts, 1:]
    probability = (outcome.base_probs[starts, 1:] * accepted).sum()
    rest = torch.stack((accepted.sum(), agrees.sum(), probability)).double()
    return torch.cat((rest.new_tensor((len(lengths), len(starts))), rest))


def _base_agrees(batch: TrainBatch, outcome: Outcome) -> Tensor:
    """bool [M, W]; False everywhere without a teacher."""
    valid = batch.targets != NO_TARGET
    if batch.teacher_ids is None:
        return torch.zeros_like(valid)
    return valid & (outcome.predicted == batch.teacher_ids[..., 0])


def _shares(part: Sequence[float], whole: Sequence[float]) -> list[float]:
    return [a / max(b, 1) for a, b in zip(part, whole, strict=True)]


@contextmanager
def _swapped(core: TrainingNetwork, objective: Objective) -> Iterator[None]:
    own, core.objective = core.objective, objective
    try:
        yield
    finally:
        core.objective = own
