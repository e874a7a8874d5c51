"""The decision between all micro-steps and early exit, in exact numbers."""

from __future__ import annotations

import pytest

from hamburger.model.early_exit import WEIGHT, Costs, EarlyExit


def decider(micro_step: float = 8.0, check: float = 2.0, max_group: int = 4) -> EarlyExit:
    exit_ = EarlyExit(max_group)
    exit_.measured(8, Costs(micro_step, check))
    return exit_


def see(exit_: EarlyExit, longest: int, times: int, width: int = 4) -> None:
    for _ in range(times):
        exit_.saw(8, width, longest)


def test_nothing_is_spared_before_anything_was_seen() -> None:
    assert not decider(check=1e-9).pays(8, 4, behind=False)


def test_a_bucket_that_was_not_measured_and_groups_of_one_token_run_all() -> None:
    exit_ = decider()
    see(exit_, longest=1, times=1000)
    exit_.saw(16, 4, 1)
    assert not exit_.pays(16, 4, behind=False)
    assert not exit_.pays(8, 1, behind=False)


def test_it_pays_from_the_step_at_which_the_expected_cost_falls_below_all() -> None:
    """p = q for all i after n steps of one token, q = (63/64)^n: 2 + 4q + 24q against 24, so q < 22/28, so n = 16."""
    exit_ = decider()
    see(exit_, longest=1, times=15)
    assert (1 - WEIGHT) ** 15 > 22 / 28
    assert not exit_.pays(8, 4, behind=False)
    see(exit_, longest=1, times=1)
    assert (1 - WEIGHT) ** 16 < 22 / 28
    assert exit_.pays(8, 4, behind=False)


@pytest.mark.parametrize(
    ("longest", "check", "pays"),
    [
        (1, 23.9, True),  # one check, no micro-step, of three
        (1, 24.1, False),
        (2, 7.9, True),  # two checks, one micro-step
        (2, 8.1, False),
        (3, 2.6, True),  # three checks, two micro-steps
        (3, 2.7, False),
        (4, 0.1, False),  # three checks for nothing
    ],
)
def test_what_it_costs_when_all_steps_are_alike(longest: int, check: float, pays: bool) -> None:
    exit_ = decider(check=check)
    see(exit_, longest, times=3000)
    assert exit_.pays(8, 4, behind=False) is pays


def test_narrower_steps_spare_less_and_are_seen_for_themselves() -> None:
    exit_ = decider(check=7.0)
    see(exit_, longest=2, times=3000)
    assert exit_.pays(8, 4, behind=False)  # 2 checks and 1 micro-step, 22, for 24
    assert not exit_.pays(8, 2, behind=False)  # 1 check and 1 micro-step for 1
    exit_ = decider()
    see(exit_, longest=2, times=3000, width=2)  # says nothing of third and fourth tokens
    assert not exit_.pays(8, 4, behind=False)


def test_behind_a_running_step_the_host_s_work_is_paid_too() -> None:
    """Of three micro-steps (24) one check (2) leaves 22 for the host."""
    exit_ = decider()
    see(exit_, longest=1, times=3000)
    assert exit_.pays(8, 4, behind=True)  # nothing was seen of the host yet
    exit_.saw_host(21.9)
    assert exit_.pays(8, 4, behind=True)
    exit_.saw_host(21.9 + 64 * 0.2)  # the mean is now 22.1
    assert not exit_.pays(8, 4, behind=True)
    assert exit_.pays(8, 4, behind=False)


def test_it_turns_back_when_groups_grow() -> None:
    exit_ = decider()
    see(exit_, longest=1, times=3000)
    see(exit_, longest=4, times=3000)
    assert not exit_.pays(8, 4, behind=False)
