"""The dial's calibration: what it is fitted to, the fit itself, and the figures that are reported."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hamburger.model.config import ModelConfig
from hamburger.model.modules.hamburger import HamburgerModel
from hamburger.training.corpus.dataset import Example
from hamburger.training.errors import TrainingError
from hamburger.training.export.calibrate import (
    FEWEST_DECISIONS,
    Calibration,
    Decisions,
    calibration_error,
    collect,
    fit,
    fit_logits,
    identity,
    operating_point,
    reliability,
    report,
)
from small_models import core_of, graft_config, params, plain_model, run_core, steps_of, trunk_config


def own_answers(model: HamburgerModel, number: int, confidence: float = 0.0) -> tuple[list[Example], list[float]]:
    """Greedy answers in the model's own groups, and the stop probability that serving saw after each token."""
    examples, stops = [], []
    for i in range(number):
        prompt_ids = [2 + i, 3 + 2 * i, 5]
        sampling = params(confidence=confidence, ignore_eos=True, max_tokens=24)
        outputs = run_core(core_of(steps_of(model)), {"r": (prompt_ids, sampling)})["r"]
        answer = [token_id for output in outputs for token_id in output.token_ids]
        sizes = [s for output in outputs for s in (len(output.token_ids), *[0] * (len(output.token_ids) - 1))]
        examples.append(example(prompt_ids, answer, sizes))
        stops += [p for output in outputs for p in output.stop_probs]
    return examples, stops


def example(prompt_ids: list[int], answer: list[int], sizes: list[int], **changes: Any) -> Example:
    """The base gives each token 0.7, and another one 0.2."""
    n, r = len(prompt_ids) + len(answer), len(answer)
    fields: dict[str, Any] = {
        "token_ids": torch.tensor(prompt_ids + answer, dtype=torch.int32),
        "response": torch.arange(n) >= len(prompt_ids),
        "entropy": torch.zeros(n),
        "group_sizes": torch.tensor([1] * len(prompt_ids) + sizes, dtype=torch.uint8),
        "top_ids": torch.tensor([[token_id, (token_id + 1) % 96] for token_id in answer], dtype=torch.int32),
        "top_logprobs": torch.tensor([[0.7, 0.2]] * r).log().half(),
    }
    return Example(id="a", key="a", **fields | changes)


def grafted(**changes: Any) -> HamburgerModel:
    return plain_model(ModelConfig(trunk=trunk_config(), graft=graft_config(**changes)), seed=7)


@pytest.mark.parametrize("shape", [{}, {"features": "fused", "micro_norm": True, "short_list_size": 40}])
def test_the_dial_is_read_where_serving_reads_it(shape: dict[str, Any]) -> None:
    model = grafted(**shape)
    examples, stops = own_answers(model, 5)
    decisions = collect(model, examples)
    assert decisions.logits.shape == (5 * 6, 3)
    served = torch.tensor(stops, dtype=torch.float64).view(-1, 4)[:, :-1]
    torch.testing.assert_close(decisions.logits.sigmoid(), served, atol=1e-4, rtol=0)
    assert decisions.decided.all()
    assert decisions.is_base_choice.all()
    torch.testing.assert_close(decisions.base_probs, torch.full((30, 3), 0.7, dtype=torch.float64), atol=1e-3, rtol=0)


def test_nothing_counts_after_a_token_that_the_model_would_not_have_emitted() -> None:
    model = grafted()
    [own], _ = own_answers(model, 1)
    changed = own.token_ids.clone()
    changed[3 + 1] = (changed[3 + 1] + 2) % 96  # the first group's second token
    decisions = collect(model, [example(changed[:3].tolist(), changed[3:].tolist(), own.group_sizes[3:].tolist())])
    assert decisions.is_known[0].tolist() == [True, False, False]
    assert decisions.base_probs[0, 0] == 0  # what the model would emit there is none of the base's likeliest


def test_verified_groups_begin_with_whatever_the_trunk_chose() -> None:
    model = grafted()
    [own], _ = own_answers(model, 1)
    changed = own.token_ids.clone()
    changed[3] = (changed[3] + 2) % 96  # the answer's first token: sampled, not the likeliest
    sampled = example(changed[:3].tolist(), changed[3:].tolist(), own.group_sizes[3:].tolist())
    assert not collect(model, [sampled]).is_known[0].any()
    decisions = collect(model, [sampled], verified=True)
    assert len(decisions.logits) == int(sampled.response.sum())
    assert decisions.is_known[:, 0].all()


def test_an_answer_that_ends_leaves_nothing_to_decide() -> None:
    model = grafted()
    [own], _ = own_answers(model, 1)
    ids = own.token_ids[:9].tolist()
    decisions = collect(model, [example(ids[:3], ids[3:], [4, 0, 0, 0, 2, 0])])
    assert decisions.goes_on.tolist() == [[True, True, True], [True, False, False]]


def test_the_calibration_of_a_checkpoint_does_not_hide_its_raw_logits() -> None:
    plain = grafted()
    calibrated = grafted(stop_scale=(2.0, 2.0, 2.0, 1.0), stop_bias=(1.0, 1.0, 1.0, 0.0))
    examples, _ = own_answers(plain, 2)
    assert torch.equal(collect(plain, examples).logits, collect(calibrated, examples).logits)


def test_collecting_ends_at_max_tokens() -> None:
    model = grafted()
    examples, _ = own_answers(model, 4)
    assert len(collect(model, examples, max_tokens=48).logits) == 12
    assert len(collect(model, examples, max_tokens=25).logits) == 12


def test_a_data_set_without_a_teacher_or_without_answers_is_refused() -> None:
    model = grafted()
    [own], _ = own_answers(model, 1)
    ids = own.token_ids.tolist()
    with pytest.raises(TrainingError, match="--top-k"):
        collect(model, [example(ids[:3], ids[3:], [1] * 24, top_ids=None, top_logprobs=None)])
    with pytest.raises(TrainingError, match="no answer tokens"):
        collect(model, [])


def dial_data(scale: float, bias: float, number: int = 4000, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(number, generator=generator, dtype=torch.float64) * 2
    return logits, 1 - (scale * logits + bias).sigmoid()


@pytest.mark.parametrize(("scale", "bias"), [(1.0, 0.0), (0.4, 1.5), (2.5, -0.7)])
def test_the_fit_finds_the_true_scale_and_bias(scale: float, bias: float) -> None:
    assert fit_logits(*dial_data(scale, bias)) == pytest.approx((scale, bias), abs=0.02)


def test_a_fit_needs_decisions() -> None:
    logits, base_probs = dial_data(3.0, 1.0, FEWEST_DECISIONS - 1)
    assert fit_logits(logits, base_probs) == (1.0, 0.0)
    assert fit_logits(logits.repeat(2), base_probs.repeat(2)) != (1.0, 0.0)


def test_a_dial_that_points_the_wrong_way_becomes_the_mean() -> None:
    logits, base_probs = dial_data(-2.0, 0.5)
    scale, bias = fit_logits(logits, base_probs)
    assert scale == 0.05
    dial = 1 - (scale * logits + bias).sigmoid()
    assert dial.mean().item() == pytest.approx(base_probs.mean().item(), abs=1e-3)


@pytest.mark.parametrize("base_prob", [0.0, 1.0, 0.3])
@pytest.mark.parametrize("logit", [0.0, -4.0, 60.0])
def test_equal_logits_and_certain_targets_do_no_harm(logit: float, base_prob: float) -> None:
    logits = torch.full((500,), logit, dtype=torch.float64)
    scale, bias = fit_logits(logits, torch.full_like(logits, base_prob))
    assert 0.05 <= scale < 100
    assert abs(bias) < 100
    dial = 1 - torch.tensor(scale * logit + bias).sigmoid().item()
    assert dial == pytest.approx(base_prob, abs=0.02)


def test_what_is_no_number_is_refused() -> None:
    with pytest.raises(TrainingError, match="not a number"):
        fit_logits(torch.full((99,), math.nan, dtype=torch.float64), torch.zeros(99, dtype=torch.float64))


@given(
    rows=st.lists(st.tuples(st.floats(-40, 40), st.floats(0, 1)), min_size=FEWEST_DECISIONS, max_size=120),
)
@settings(max_examples=60)
def test_a_fit_is_never_worse_than_no_fit(rows: list[tuple[float, float]]) -> None:
    logits, base_probs = torch.tensor(rows, dtype=torch.float64).unbind(1)
    scale, bias = fit_logits(logits, base_probs)
    assert math.isfinite(scale + bias)
    assert scale >= 0.05

    def loss(scale: float, bias: float) -> float:
        value = torch.nn.functional.binary_cross_entropy_with_logits(scale * logits + bias, 1 - base_probs)
        return value.item() * len(logits)

    assert loss(scale, bias) <= loss(1.0, 0.0) + 1e-6


def decisions_of(
    logits: list[list[float]], probs: list[list[float]], known: list[list[bool]] | None = None
) -> Decisions:
    values = torch.tensor(logits, dtype=torch.float64)
    base_probs = torch.tensor(probs, dtype=torch.float64)
    always = torch.ones_like(values, dtype=torch.bool)
    return Decisions(values, base_probs, base_probs > 0.5, always if known is None else torch.tensor(known), always)


def test_each_place_is_fitted_by_itself_and_on_its_known_decisions_only() -> None:
    first, second = dial_data(2.0, 0.5), dial_data(0.5, -0.3, seed=1)
    logits, probs = torch.stack((first[0], second[0]), 1), torch.stack((first[1], second[1]), 1)
    known = torch.ones_like(probs, dtype=torch.bool)
    known[:2000, 1] = False
    probs[:2000, 1] = 0.9  # of no account
    found = fit(Decisions(logits, probs, known, known, torch.ones_like(known)))
    assert found.stop_scale == pytest.approx((2.0, 0.5, 1.0), abs=0.02)
    assert found.stop_bias == pytest.approx((0.5, -0.3, 0.0), abs=0.02)
    after, before = (
        calibration_error(reliability(decisions_of(logits.tolist(), probs.tolist()), c, 0))
        for c in (found, identity(3))
    )
    assert after < 0.01 < before


def test_bins_and_their_error() -> None:
    logit = torch.logit(torch.tensor(0.75, dtype=torch.float64)).item()
    decisions = decisions_of([[-logit], [-logit], [logit]], [[0.5], [0.7], [0.25]])
    bins = reliability(decisions, identity(2), 0)
    assert [b.number for b in bins] == [1, 2]
    assert [b.dial for b in bins] == pytest.approx([0.25, 0.75])
    assert [b.base_prob for b in bins] == pytest.approx([0.25, 0.6])
    assert calibration_error(bins) == pytest.approx(2 / 3 * 0.15)
    assert math.isnan(calibration_error([]))


def test_an_operating_point() -> None:
    go, end = -5.0, 5.0
    decisions = decisions_of(
        [[go, go], [go, end], [go, go], [end, go]],
        [[0.9, 0.8], [0.7, 0.1], [0.2, 0.9], [0.1, 0.1]],
        [[True, True], [True, True], [True, False], [True, True]],
    )
    point = operating_point(decisions, identity(3), 0.5)
    # 3 of 4 go on; of those the third's data part from the model, and 1 of the other 2 goes on.
    assert point.tokens_per_kv == pytest.approx(1 + 3 / 4 + 3 / 4 * 1 / 2)
    assert point.base_probs == pytest.approx((0.6, 0.8))
    assert point.agreement == pytest.approx(3 / 4)
    # At 0 all are accepted; at 1 none is, though 1 - sigmoid(-99) is 1.
    assert operating_point(decisions, identity(3), 0.0).tokens_per_kv == 3
    closed = operating_point(decisions_of([[-99.0, -99.0]], [[1.0, 1.0]]), identity(3), 1.0)
    assert closed.tokens_per_kv == 1
    assert all(math.isnan(p) for p in (*closed.base_probs, closed.agreement))


def test_the_report_has_a_row_for_each_place_and_confidence() -> None:
    logits, probs = dial_data(2.0, 0.5, 200)
    decisions = decisions_of([[z, z] for z in logits.tolist()], [[p, p] for p in probs.tolist()])
    text = report(decisions, Calibration((2.0, 1.0, 1.0), (0.5, 0.0, 0.0)), [0.5, 1.0])
    first, second, third = text.split("\n\n")
    assert [line.split(" | ")[:4] for line in first.splitlines()[2:]] == [
        ["| 1", "200", "2.000", "0.500"],
        ["| 2", "200", "1.000", "0.000"],
    ]
    assert "| 1 | after |" in second
    assert third.splitlines()[-1] == "| 1 | 1.000 | - | - | - |"
    assert all(
        len(line.split(" | ")) == len(table.splitlines()[0].split(" | "))
        for table in (first, second, third)
        for line in table.splitlines()
    )
