"""engine/drafting: what is foreseen, how likely it is, and how many drafts pay. Behaviour only, not how it is done."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hamburger.engine.drafting.answer_drafts import AnswerDrafts
from hamburger.engine.drafting.costs import MeasuredCosts, StepCosts
from hamburger.engine.drafting.policy import DraftPlan, DraftPolicy
from hamburger.engine.drafting.proposal import Drafter, Proposal
from verified import free_rows, policy_of


def proposal(*chances: float, drafter: Drafter = "micro") -> Proposal:
    return Proposal(drafter, [7] * len(chances), list(chances))


def test_the_first_drafts_of_a_proposal_and_what_they_bring() -> None:
    drafts = Proposal("micro", [1, 2, 3], [0.5, 1.0, 0.25])
    assert drafts.first(2) == Proposal("micro", [1, 2], [0.5, 1.0])
    assert drafts.first(3) is drafts.first(9) is drafts
    assert drafts.first(0) is drafts.first(-2) is None
    assert drafts.expected == 0.5 + 0.5 + 0.125


def rate(
    policy: DraftPolicy, num_rows: int, num_emitting: int, drafts: Sequence[Proposal | None], numbers: Sequence[int]
) -> float:
    """Tokens a millisecond, where micro-steps take none."""
    tokens = float(num_emitting)
    for of, number in zip(drafts, numbers, strict=True):
        if of is not None and (first := of.first(number)) is not None:
            tokens += first.expected
    return tokens / policy.costs().step(num_rows + sum(numbers))


def test_free_rows_take_all_drafts_and_dear_ones_none() -> None:
    drafts = [proposal(0.9, 0.5, 0.1), None, proposal(0.2)]
    assert free_rows().choose(3, 3, drafts, [0.0] * 3) == [3, 0, 1]
    assert policy_of([1.0, 2.0, 3.0, 4.0]).choose(3, 3, drafts, [0.0] * 3) == [0, 0, 0]
    assert free_rows().choose(3, 3, [None] * 3, [0.0] * 3) == [0, 0, 0]
    assert free_rows().plan(1).max_drafts == 7
    assert policy_of([1.0, 9.0]).plan(1).max_drafts == 0
    assert free_rows(0).plan(1).max_drafts == 0  # a plain base has no micro decoder


def test_a_draft_is_made_only_at_the_chance_that_its_request_asks_for() -> None:
    policy, drafts = free_rows(), [proposal(0.9, 0.5, 0.8)] * 4
    # Of a draft and all before it: 0.9, 0.45, 0.36.
    assert policy.choose(4, 4, drafts, [0.0, 0.4, 0.6, 0.95]) == [3, 2, 1, 0]


chances = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4)


@given(
    drafts=st.lists(st.none() | chances, min_size=1, max_size=4),
    steps=st.lists(st.floats(0.01, 2.0), min_size=16, max_size=16),
    other_rows=st.integers(0, 4),
)
@settings(max_examples=150)
def test_the_number_of_drafts_makes_the_most_tokens_a_second(
    drafts: list[list[float] | None], steps: list[float], other_rows: int
) -> None:
    """Compared with every other choice; and of each sequence always the first ones."""
    policy = policy_of([*itertools.accumulate(steps)], micro_drafts=4)
    offered = [None if one is None else proposal(*one) for one in drafts]
    num_emitting = len(drafts)
    num_rows = num_emitting + other_rows
    chosen = policy.choose(num_rows, num_emitting, offered, [0.0] * num_emitting)
    assert all(number <= len(one or ()) for number, one in zip(chosen, drafts, strict=True))
    every = itertools.product(*(range(1 + len(one or ())) for one in drafts))
    best = max(rate(policy, num_rows, num_emitting, offered, numbers) for numbers in every)
    found = rate(policy, num_rows, num_emitting, offered, chosen)
    assert found == pytest.approx(best, rel=1e-6) or (not sum(chosen) and best <= 1.02 * found * (1 + 1e-6))


MEASURED = MeasuredCosts((1, 2, 4, 8), (10.0, 11.0, 13.0, 30.0), (1.0, 1.5, 2.0, 3.0))


def test_costs_are_what_was_measured_and_between() -> None:
    costs = StepCosts(MEASURED)
    assert [costs.step(rows) for rows in (1, 2, 3, 4, 6, 8)] == pytest.approx([10, 11, 12, 13, 21.5, 30])
    assert [costs.micro_step(rows) for rows in (1, 2, 4, 8)] == pytest.approx([1, 1.5, 2, 3])
    assert costs.step(12) > costs.step(8)
    noisy = StepCosts(MeasuredCosts((1, 2, 4), (10.0, 9.0, 12.0), (1.0, 0.5, 2.0)))
    assert [noisy.step(rows) for rows in (1, 2, 4)] == sorted(noisy.step(rows) for rows in (1, 2, 4))


def test_costs_follow_what_steps_take() -> None:
    costs = StepCosts(MEASURED)
    for i in range(600):
        rows = (1, 2, 4)[i % 3]
        costs.observe(rows, 0, 0, 2 * (10, 11, 13)[i % 3] * (0.9, 1.1)[i % 2])
    assert [costs.step(rows) for rows in (1, 2, 4)] == pytest.approx([20, 22, 26], rel=0.1)
    assert costs.step(8) == pytest.approx(60, rel=0.3)  # a slow machine is slow at all numbers of rows
    before = costs.step(2)
    costs.observe(2, 0, 0, 100_000.0)
    assert costs.step(2) < 1.2 * before  # one step may be held up by anything


def test_costs_of_some_rows_alone_may_be_otherwise_than_measured() -> None:
    costs = StepCosts(MEASURED)
    for i in range(1500):
        rows, took = ((1, 10.0), (4, 39.0))[i % 2]
        costs.observe(rows, 0, 0, took)
    assert costs.step(4) / costs.step(1) > 2  # 1.3 were measured, and 3.9 are true


def test_more_rows_than_were_measured_never_take_less() -> None:
    costs = StepCosts(MeasuredCosts((1, 2, 4, 8), (10.0, 10.5, 11.0, 11.5), (1.0, 1.0, 1.0, 1.0)))
    for _ in range(300):
        costs.observe(1, 0, 0, 10.0)
        costs.observe(4, 0, 0, 16.0)  # slower than the 8 that were measured, of which none are seen
    assert costs.step(4) > costs.step(8)
    assert 0 < costs.step(8) <= costs.step(64) <= costs.step(512)


def test_what_micro_steps_take_is_told_from_what_steps_take() -> None:
    """Three times what was measured, as where logits are changed, while steps take what was."""
    costs = StepCosts(MEASURED)
    for i in range(600):
        micro_steps = 0 if i % 32 == 16 else 2
        costs.observe(1, micro_steps, 1, (10 + micro_steps * 3) * (0.95, 1.05)[i // 3 % 2])
    assert costs.step(1) == pytest.approx(10, rel=0.05)
    assert costs.micro_step(1) == pytest.approx(3, rel=0.1)


def test_steps_in_parts_have_costs_of_their_own() -> None:
    policy = policy_of([10.0, 10.5, 11.0, 11.5], micro_drafts=3, micro_step=1.0)
    for i in range(600):
        policy.acceptance.propose(proposal(0.5, 0.5, 0.5), 0.0)
        micro_steps = 0 if i % 32 == 16 else 1
        policy.observe(2, micro_steps, 1, 0.0105 + micro_steps * 0.008, in_parts=True)
    assert policy.plan(1, in_parts=True).max_drafts == 0
    assert policy.plan(1).max_drafts > 1


def test_a_plan_goes_deep_again_when_drafts_become_good() -> None:
    policy = policy_of([10.0, 10.5, 11.0, 11.5], micro_drafts=3, micro_step=0.8)

    def told(chance: float) -> int:
        for _ in range(300):
            depth = policy.plan(1).max_drafts
            if depth:
                policy.acceptance.propose(proposal(*[chance] * depth), 0.0)
            policy.observe(1 + depth, depth, 1, (10 + depth * 1.3) / 1000)
        return max(policy.plan(1).max_drafts, depth)

    assert [told(0.8), told(0.25), told(0.8)] == [3, 1, 3]


def test_micro_steps_that_a_neighbour_slowed_come_back() -> None:
    policy = policy_of([10.0, 10.5, 11.0, 11.5], micro_drafts=3, micro_step=0.8)

    def steps(number: int, micro_step: float) -> int:
        drafting = 0
        for _ in range(number):
            depth = policy.plan(1).max_drafts
            drafting += depth > 0
            policy.observe(1 + depth, depth, 1, (10 + depth * (0.5 + micro_step)) / 1000)
        return drafting

    assert steps(300, 0.8) > 280
    steps(1500, 12.0)
    assert steps(300, 12.0) < 250
    steps(1000, 0.8)
    assert steps(300, 0.8) > 280


def test_one_step_in_a_plan_makes_no_drafts() -> None:
    policy, depths = free_rows(3), []
    for _ in range(64):
        depths.append(policy.plan(1).max_drafts)
        policy.observe(1, 0, 0, 0.001)
    assert sorted(depths)[:3] == [0, 0, 3]
    assert depths[0] == 3


@pytest.mark.parametrize("true", [0.2, 0.5, 0.85])
@pytest.mark.parametrize("foretold", [0.3, 0.7])
def test_chances_become_those_that_drafts_have(true: float, foretold: float) -> None:
    policy, draw = free_rows(3), random.Random(3)
    made = proposal(foretold, foretold, foretold)
    for _ in range(1500):
        accepted = next((i for i in range(3) if draw.random() > true), 3)
        policy.acceptance.observe("micro", made.chances, accepted, 0.7)
    corrected = policy.acceptance.corrected(made, 0.7)
    assert corrected.token_ids == made.token_ids
    assert corrected.chances[:2] == pytest.approx([true, true], abs=0.12)
    assert all(0 <= chance <= 1 for chance in corrected.chances)


def test_a_policy_stops_drafting_what_is_never_accepted_and_begins_again() -> None:
    steps = [1.0, 1.3, 1.6, 1.9]
    policy = policy_of(steps, micro_drafts=3)
    assert policy.plan(1).max_drafts > 0
    for _ in range(400):
        policy.acceptance.propose(proposal(0.02, 0.02, 0.02), 0.0)
        policy.observe(1, 0, 0, 0.001)
    assert policy.plan(1).max_drafts == 0
    for _ in range(64 * 32 + 400):  # nothing is drafted meanwhile
        policy.observe(1, 0, 0, 0.001)
        policy.plan(1)
    assert policy.plan(1).max_drafts > 0


def test_drafters_are_left_alone_while_nothing_pays() -> None:
    policy, dear = free_rows(0), DraftPlan(0, 1.0, least=0.8)
    asked = [policy.begin_step(dear) for _ in range(160)]
    assert [i % 8 == 7 for i in range(160)] == [looks for _, looks in asked]
    assert all(are_asked for are_asked, _ in asked[:16])
    assert [are_asked for are_asked, _ in asked[16:]] == [looks for _, looks in asked[16:]]
    looks = [policy.begin_step(dear, 40)[1] for _ in range(80)]  # of many answers, for which it takes as much longer
    assert [i for i, look in enumerate(looks) if look] == [39, 79]
    assert policy.begin_step(DraftPlan(0, 1.0, least=0.1))[0]  # a draft may bring much
    assert not policy.begin_step(dear)[0]
    assert policy.choose(1, 1, [proposal(1.0)], [0.0]) == [1]
    assert policy.begin_step(dear) == (True, False)


def test_the_drafter_that_brings_most_drafts() -> None:
    text = list(range(20))
    drafts = AnswerDrafts([*text, 50, 0, 1], tuple(range(100, 110)))
    weak, strong = proposal(0.1), proposal(0.99, 0.99, 0.99, 0.99, 0.99, 0.99, 0.99)
    found = drafts.best(weak, 7, 0.0)
    assert found is not None
    assert (found.drafter, found.token_ids) == ("prediction", text_of(100, 7))
    found = drafts.best(strong, 7, 0.0)
    assert found is not None
    assert found.drafter == "micro"
    assert drafts.needs_micro
    # The answer goes another way, which the prompt knows.
    drafts.extend([2, 3])
    found = drafts.best(weak, 4, 0.0)
    assert found is not None
    assert (found.drafter, found.token_ids) == ("lookup", text_of(4, 4))
    assert all(0 < chance <= 1 for chance in found.chances)
    assert len(found.chances) == 4
    assert AnswerDrafts([1]).best(None, 7, 0.0) is None
    assert AnswerDrafts([1]).best(proposal(0.5, 0.5, 0.5), 2, 0.0) == proposal(0.5, 0.5)


def test_a_drafter_that_was_wrong_is_asked_again() -> None:
    """Where its drafts pay no more, it is looked at now and then, so that it comes back when it is right."""
    text = list(range(1000, 1300))
    drafts, passes = AnswerDrafts([1], tuple(text)), 0
    for i in range(60):  # the answer begins otherwise, and seems to follow the prediction again and again
        drafts.best(None, 7, 0.3, looks=i % 8 == 0)
        drafts.extend([text[i], text[i + 1], 5])
    assert drafts.best(None, 7, 0.3) is None
    answer = text[100:]
    while answer:
        found = drafts.best(None, 7, 0.3, looks=passes % 8 == 0)
        number = 1 + (0 if found is None else next((i for i, t in enumerate(found.token_ids) if t != answer[i]), 7))
        drafts.extend(answer[:number])
        answer, passes = answer[number:], passes + 1
    assert passes < 80


def test_a_drafter_that_is_right_comes_to_be_as_sure_as_a_request_asks() -> None:
    text = list(range(200))
    drafts, sure = AnswerDrafts([500], tuple(text)), 0
    for token_id in text:
        found = drafts.best(None, 7, 0.0)
        sure += found is not None and found.chances[0] >= 0.95
        drafts.extend([token_id])
    assert sure > 150


def text_of(first: int, number: int) -> list[int]:
    return list(range(first, first + number))


def test_rates_are_finite() -> None:
    """Whatever a machine was measured at."""
    for steps in ([1.0, 1.0], [1.0, 2.0], [1.0, 5.0], [0.001, 0.002]):
        policy = policy_of(steps, 3, 0.5)
        for num_emitting in (1, 2, 3, 64):
            assert math.isfinite(policy.plan(num_emitting, 100).min_chance)
            policy.choose(num_emitting + 100, num_emitting, [proposal(0.5)] * num_emitting, [0.0] * num_emitting)


@given(
    chances=st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=4), min_size=1, max_size=6),
    steps=st.lists(st.floats(0.1, 20), min_size=4, max_size=4),
)
def test_what_a_plan_calls_hopeless_is_never_chosen(chances: list[list[float]], steps: list[float]) -> None:
    policy = DraftPolicy(StepCosts(MeasuredCosts((1, 2, 4, 16), tuple(steps), (0.1, 0.1, 0.1, 0.1))), 0)
    number = len(chances)
    least = policy.plan(number).least
    hopeless = [proposal(*(0.999 * chance * min(least, 1.0) for chance in each)) for each in chances]
    assert policy.choose(number, number, hopeless, [0.0] * number) == [0] * number
