"""Calibrates the dial: per token of a group, a scale and a bias that make 1 - P(stop) a probability that is true.

What it should be after a token is the base model's probability of the token that the next micro-step would emit. Only
the places where the model's own likeliest tokens are the data's up to there count: there the dial decides in serving.
Where groups are verified every slot holds one token, and the first of a group is the trunk's choice whatever it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hamburger.model.modules.hamburger import HamburgerModel
from hamburger.training.batches.batches import NO_TARGET, Example, TrainBatch, collate, passes
from hamburger.training.errors import TrainingError
from hamburger.training.loss.objective import Objective, Outcome, TrainingNetwork

FEWEST_DECISIONS = 50  # a place with fewer keeps the stop head's own value
_SMALLEST_SCALE = 0.05


@dataclass(frozen=True, slots=True, eq=False)
class Decisions:
    """M groups of held-out answers, teacher forced, and what the dial had before it after each token but the last.

    logits: float64 [M, W - 1], the raw stop logit after token j. base_probs: float64 [M, W - 1], the base's probability
    of the next micro-step's likeliest token. is_base_choice: bool [M, W - 1], that token is the base's likeliest too.
    is_known: bool [M, W - 1], the data's tokens 0..j are the model's own likeliest. goes_on: bool [M, W - 1], the data
    have a token after token j.
    """

    logits: Tensor
    base_probs: Tensor
    is_base_choice: Tensor
    is_known: Tensor
    goes_on: Tensor

    @property
    def decided(self) -> Tensor:
        """bool [M, W - 1]: the places that the dial is fitted and judged at."""
        return self.is_known & self.goes_on


@dataclass(frozen=True, slots=True)
class Calibration:
    """stop_scale and stop_bias of GraftConfig: max_group entries each; nothing is decided after the last token."""

    stop_scale: tuple[float, ...]
    stop_bias: tuple[float, ...]

    def dial(self, logits: Tensor) -> Tensor:
        """Raw stop logits [M, W - 1] -> logits of going on, calibrated."""
        width = logits.shape[1]
        return -(logits * logits.new_tensor(self.stop_scale[:width]) + logits.new_tensor(self.stop_bias[:width]))


@dataclass(frozen=True, slots=True)
class Bin:
    """Decisions whose dial lies in one tenth of [0, 1]."""

    number: int
    dial: float
    base_prob: float


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """What a confidence gives on the data, teacher forced.

    tokens_per_kv: 1 + the product of the shares that go on, each among the groups that came so far as the data did.
    base_probs: mean base probability of the accepted tokens by micro-step; agreement: the share of all accepted ones
    that are the base's likeliest. Not a number where nothing was accepted.
    """

    confidence: float
    tokens_per_kv: float
    base_probs: tuple[float, ...]
    agreement: float


def identity(max_group: int) -> Calibration:
    return Calibration((1.0,) * max_group, (0.0,) * max_group)


@torch.inference_mode()
def collect(
    model: HamburgerModel, examples: Iterable[Example], max_tokens: int | None = None, *, verified: bool = False
) -> Decisions:
    """Run a model over held-out examples until they have `max_tokens` trained tokens.

    verified: as the model is served with verified groups, else in the data's groups.
    Raises TrainingError when the examples lack the base's likeliest ids, or there are none.
    """
    network = TrainingNetwork(model, Objective(cross_entropy=0.0, lookahead="dense", stop_target="agreement")).eval()
    device = model.head_weight.device
    parts = []
    for pack in passes(examples, math.inf if max_tokens is None else max_tokens):
        groups = [torch.ones_like(example.group_sizes) for example in pack] if verified else None
        batch = collate(pack, model.config.max_group, groups)
        if len(batch.emit):
            batch = batch.to(device)
            parts.append(_decisions(network(batch), batch, verified))
    if not parts:
        raise TrainingError("the data set to calibrate on has no answer tokens.")
    return Decisions(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def fit(decisions: Decisions) -> Calibration:
    """Scale and bias of each place by maximum likelihood (Platt scaling with the base's probability as target)."""
    scales, biases = [], []
    for j in range(decisions.logits.shape[1]):
        on = decisions.decided[:, j]
        scale, bias = fit_logits(decisions.logits[on, j], decisions.base_probs[on, j])
        scales.append(scale)
        biases.append(bias)
    return Calibration((*scales, 1.0), (*biases, 0.0))


def fit_logits(logits: Tensor, base_probs: Tensor) -> tuple[float, float]:
    """The (scale, bias) that minimise the cross-entropy of sigmoid(scale * logit + bias) with 1 - base_probs.

    Both float64 [n]. A prior worth one decision holds it at (1, 0) where the data say nothing, so that equal logits or
    certain targets do no harm; a dial that points the wrong way is made flat, and few decisions leave it as it is.
    """
    if not (bool(logits.isfinite().all()) and bool(((base_probs >= 0) & (base_probs <= 1.001)).all())):
        raise TrainingError("a stop logit or a base probability is not a number: the model is broken.")
    if len(logits) < FEWEST_DECISIONS:
        return 1.0, 0.0
    stop = 1 - base_probs.clamp(max=1)
    x = torch.stack((logits, torch.ones_like(logits)), dim=1)
    prior = logits.new_tensor([1.0, 0.0])
    w = _newton(x, stop, prior)
    if w[0] < _SMALLEST_SCALE:
        flat = _newton(x[:, 1:], stop, prior[1:], offset=_SMALLEST_SCALE * logits)
        return _SMALLEST_SCALE, flat.item()
    return w[0].item(), w[1].item()


def _newton(x: Tensor, y: Tensor, prior: Tensor, offset: Tensor | float = 0.0) -> Tensor:
    """Minimise the cross-entropy of sigmoid(x w + offset) with y, plus half the squared distance from the prior.

    It is strictly convex, so damped Newton steps always arrive.
    """

    def loss(w: Tensor) -> Tensor:
        away = (w - prior).square().sum() / 2
        return F.binary_cross_entropy_with_logits(x @ w + offset, y, reduction="sum") + away

    w = prior.clone()
    for _ in range(100):
        p = (x @ w + offset).sigmoid()
        gradient = x.T @ (p - y) + w - prior
        curvature = (x.T * (p * (1 - p))) @ x + torch.eye(len(w), dtype=x.dtype, device=x.device)
        step = torch.linalg.solve(curvature, gradient)
        now, size = loss(w), 1.0
        while size > 1e-6 and loss(w - size * step) > now:
            size /= 2
        w = w - size * step
        if step.abs().max() < 1e-9:
            break
    return w


def reliability(decisions: Decisions, calibration: Calibration, place: int, num_bins: int = 10) -> list[Bin]:
    """The decisions after token `place`, binned by the dial; bins without any are left out."""
    on = decisions.decided[:, place]
    dial = calibration.dial(decisions.logits)[on, place].sigmoid()
    base_probs = decisions.base_probs[on, place]
    which = (dial * num_bins).long().clamp(max=num_bins - 1)
    found = []
    for i in which.unique().tolist():
        mine = which == i
        found.append(Bin(int(mine.sum()), dial[mine].mean().item(), base_probs[mine].mean().item()))
    return found


def calibration_error(bins: Sequence[Bin]) -> float:
    """The expected calibration error: the mean distance of dial and base probability over all decisions."""
    total = sum(b.number for b in bins)
    return sum(b.number * abs(b.dial - b.base_prob) for b in bins) / total if total else math.nan


def operating_point(decisions: Decisions, calibration: Calibration, confidence: float) -> OperatingPoint:
    """What the dial does at a confidence. The groups' inputs stay those of the data."""
    dial = calibration.dial(decisions.logits)
    # As in serving: at 1 nothing goes on, whatever rounding says.
    accepts = (dial >= torch.logit(dial.new_tensor(confidence))) & decisions.goes_on & (confidence < 1)
    reached = torch.ones(len(dial), dtype=torch.bool, device=dial.device)
    tokens_per_kv, share = 1.0, 1.0
    probs, choices = [], []
    for j in range(dial.shape[1]):
        reached = reached & decisions.is_known[:, j]
        accepted = reached & accepts[:, j]
        share *= accepted.sum().item() / max(int(reached.sum()), 1)
        tokens_per_kv += share
        probs.append(decisions.base_probs[accepted, j].mean().item())
        choices.append(decisions.is_base_choice[accepted, j].double())
        reached = accepted
    return OperatingPoint(confidence, tokens_per_kv, tuple(probs), torch.cat(choices).mean().item())


def report(decisions: Decisions, calibration: Calibration, confidences: Sequence[float]) -> str:
    """The dial before and after, as Markdown tables."""
    width = decisions.logits.shape[1]
    lines = _table("after token", "decisions", "scale", "bias", "calibration error before", "after")
    tenths = _table("after token", "dial", "decisions", "mean dial", "mean base probability")
    for j in range(width):
        raw, fitted = (reliability(decisions, c, j) for c in (identity(width + 1), calibration))
        errors = (_shown(calibration_error(bins)) for bins in (raw, fitted))
        number, scale, bias = sum(b.number for b in raw), calibration.stop_scale[j], calibration.stop_bias[j]
        lines.append(_row(str(j + 1), str(number), _shown(scale), _shown(bias), *errors))
        for when, bins in (("before", raw), ("after", fitted)):
            tenths += [_row(str(j + 1), when, str(b.number), _shown(b.dial), _shown(b.base_prob)) for b in bins]
    steps = [f"base probability at micro-step {j + 1}" for j in range(width)]
    points = _table("confidence", "tokens per KV", "base's own choice", *steps)
    for point in (operating_point(decisions, calibration, c) for c in confidences):
        cells = map(_shown, (point.tokens_per_kv, point.agreement, *point.base_probs))
        points.append(_row(f"{point.confidence:g}", *cells))
    return "\n".join([*lines, "", *tenths, "", *points])


def _table(*head: str) -> list[str]:
    return [_row(*head), _row(*["---"] * len(head))]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _shown(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def _decisions(outcome: Outcome, batch: TrainBatch, verified: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of Decisions, on the host."""
    if batch.teacher_ids is None or batch.teacher_logprobs is None:
        raise TrainingError(
            "the data set to calibrate on lacks the base model's likeliest tokens: make it with `segment --top-k 16`."
        )
    valid = batch.targets != NO_TARGET
    likeliest = batch.teacher_ids.gather(-1, batch.teacher_logprobs.argmax(-1, keepdim=True))[..., 0]
    agrees = (outcome.predicted == batch.targets) & valid
    if verified:
        agrees[:, 0] = valid[:, 0]
    columns = (
        outcome.stop_logits[:, :-1].double(),
        outcome.base_probs[:, 1:].double(),
        (outcome.predicted == likeliest)[:, 1:],
        torch.cummin(agrees.int(), dim=1).values.bool()[:, :-1],
        valid[:, 1:],
    )
    return tuple(column.cpu() for column in columns)  # type: ignore[return-value]
