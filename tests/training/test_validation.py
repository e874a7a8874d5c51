"""Validation's numbers, against counts by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator  # type: ignore[import-untyped]

from examples import example, random_example
from hamburger.model.config import ModelConfig
from hamburger.training.batches.batches import NO_TARGET, TrainBatch, collate
from hamburger.training.batches.packs import Examples, Packer
from hamburger.training.loss.objective import Objective, Outcome, TrainingNetwork
from hamburger.training.recipe import Grouping
from hamburger.training.run.validation import CONFIDENCES, Validator, dial_counts, place_counts, trunk_counts
from small_models import graft_config, plain_model, trunk_config
from training_runs import random_source

OFF = torch.autocast("cpu", enabled=False)


def outcome_of(batch: TrainBatch, goes_on: list[list[float]], predicted: torch.Tensor) -> Outcome:
    """With given continue probabilities for each row and place."""
    stop = -torch.tensor(goes_on).logit()
    assert batch.teacher_ids is not None
    assert batch.teacher_logprobs is not None
    base = (batch.teacher_logprobs.exp() * (batch.teacher_ids == predicted[..., None])).sum(-1)
    zero = torch.zeros(())
    return Outcome(zero, zero, predicted, stop, zero, base, zero)


def test_a_walk_along_two_answers() -> None:
    one = example([([5, 6], [[7], [8], [9], [10]]), ([11], [[12], [13], [14]])], teacher_k=3)
    batch = collate([one], 4)
    assert len(batch.targets) == 7
    on = [
        [0.9, 0.9, 0.1, 0.9],  # token 7 and two more: rows 1 and 2 are not looked at
        [0.9, 0.9, 0.9, 0.9],
        [0.9, 0.9, 0.9, 0.9],
        [0.9, 0.9, 0.9, 0.9],  # the answer's last token: nothing is left to go on to
        [0.6, 0.9, 0.9, 0.9],  # below 0.7
        [0.8, 0.9, 0.9, 0.9],
        [0.9, 0.9, 0.9, 0.9],
    ]
    assert batch.teacher_ids is not None
    likeliest = batch.teacher_ids[..., 0].clone()
    likeliest[0, 2] = batch.teacher_ids[0, 2, 1]  # one token of the first group is the base's second choice
    outcome = outcome_of(batch, on, likeliest)
    tokens, groups, extra, agreed, base_prob = dial_counts(batch, outcome, 0.7).tolist()
    assert (tokens, groups, extra, agreed) == (7, 4, 3, 2)
    held = [outcome.base_probs[0, 1], outcome.base_probs[0, 2], outcome.base_probs[5, 1]]
    assert base_prob == pytest.approx(float(sum(held)))
    assert dial_counts(batch, outcome, 0.95).tolist()[:3] == [7, 7, 0]
    assert dial_counts(batch, outcome, 0.05).tolist()[:2] == [7, 2]


def test_accuracies_count_each_place_of_a_group() -> None:
    batch = collate([random_example(1, teacher_k=3), random_example(2, teacher_k=3)], 4, None)
    predicted = batch.targets.clone()
    predicted[0] = 95
    rows = torch.full(batch.targets.shape, 0.5).tolist()
    valid, right, agreeing = place_counts(batch, outcome_of(batch, rows, predicted))
    expected = (batch.targets != NO_TARGET).sum(0)
    assert valid.tolist() == expected.tolist()
    assert right.tolist() == (expected - (batch.targets[0] != NO_TARGET).long()).tolist()
    assert batch.teacher_ids is not None
    agreed = (predicted == batch.teacher_ids[..., 0]) & (batch.targets != NO_TARGET)
    assert agreeing.tolist() == agreed.sum(0).tolist()


def test_readings_part_the_trunks_tokens_by_the_group_before_them() -> None:
    batch = collate([example([([5], [[6, 7], [8], [9, 10, 11], [12]])], teacher_k=3)], 4)
    assert batch.teacher_ids is not None
    predicted = batch.teacher_ids[..., 0].clone()
    predicted[3, 0] = batch.teacher_ids[3, 0, 1]  # 12, after a group of three
    outcome = outcome_of(batch, torch.full(predicted.shape, 0.5).tolist(), predicted)
    assert trunk_counts(batch, outcome).tolist() == [1, 2, 2, 2]


@pytest.mark.parametrize(
    "objective",
    [
        Objective(),
        Objective(distillation=1.0, stop_target="agreement"),
        Objective(distillation=1.0, stop_target="fidelity"),
    ],
)
def test_a_report(objective: Objective, tmp_path: Path) -> None:
    model = plain_model(ModelConfig(trunk=trunk_config(), graft=graft_config()))
    core = TrainingNetwork(model, objective)
    examples = Examples([random_source(8)])
    packer = Packer(examples, 4, 30, 0)
    grouped, single = packer.in_order(Grouping()), packer.in_order(Grouping(kind="single"))
    core.train()
    report = Validator(grouped, single, Accelerator(cpu=True))(core, core, OFF)
    assert core.training
    assert core.objective is objective
    batch = collate(list(examples), 4)
    with torch.no_grad():
        whole = core(batch)
    assert report["loss"] == pytest.approx(float(whole.loss(objective.counts(batch), 0.5)), rel=1e-5)
    mask = objective.stop_mask(batch)
    right = ((whole.stop_logits > 0) == (whole.stop_targets > 0.5))[mask]
    assert report["stop_accuracy"] == pytest.approx(float(right.float().mean()))
    assert [point["confidence"] for point in report["dial"]] == list(CONFIDENCES)
    sizes = [point["tokens_per_kv"] for point in report["dial"]]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 1
    assert len(report["token_accuracy"]) == len(report["base_agreement"]) == 4
    right_after, composed, right, single = trunk_counts(batch, whole).tolist()
    assert 0 < composed < len(batch.emit)
    assert report["agreement_after"] == pytest.approx({"composed": right_after / composed, "single": right / single})


def test_without_a_teacher_nothing_is_said_about_the_base() -> None:
    model = plain_model(ModelConfig(trunk=trunk_config(), graft=graft_config()))
    core = TrainingNetwork(model, Objective())
    packs = Packer(Examples([random_source(2, teacher_k=0)]), 4, 30, 0).in_order(Grouping(kind="single"))
    report = Validator(packs, packs, Accelerator(cpu=True))(core, core, OFF)
    assert not {"base_agreement", "agreement_after"} & set(report)
    assert all(point.keys() == {"confidence", "tokens_per_kv"} for point in report["dial"])
