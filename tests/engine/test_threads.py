"""StepThreads on a scripted machine: what a step takes with so many threads, alone and beside another program."""

from __future__ import annotations

import resource

import pytest

from hamburger.engine.device.cpu_threads import StepThreads, involuntary_switches

ALONE = {1: 0.010, 2: 0.006, 3: 0.005, 4: 0.004}


class Machine:
    """Runs steps. beside: seconds of a step while another program runs; a core is lost 100 times a second then."""

    def __init__(self, most: int, beside: dict[int, float] | None = None) -> None:
        self.now, self.switches, self.beside = 0.0, 0.0, beside
        self.is_busy = False
        self.load = self.growth = 1.0  # of a batch: how long its steps are, and what a step makes of that
        self.applied: list[int] = []
        self.in_force = most
        self.taken = dict.fromkeys(range(1, most + 1), 0.0)
        self.threads = StepThreads(
            lambda: self.in_force, self._set, clock=lambda: self.now, switches=lambda: int(self.switches)
        )

    def _set(self, number: int) -> None:
        assert number != self.in_force
        self.applied += [number] * (number != len(self.taken))
        self.in_force = number

    def run(self, seconds: float, *, decodes: bool = True) -> None:
        end = self.now + seconds
        while self.now < end:
            self.steps(1, decodes=decodes)

    def steps(self, number: int, *, decodes: bool = True) -> None:
        for _ in range(number):
            assert self.in_force == len(self.taken)  # outside of steps nothing is changed
            with self.threads.step(decodes=decodes):
                disturbed = self.is_busy and self.beside is not None
                took = self.load * (self.beside if disturbed and self.beside else ALONE)[self.in_force]
                self.load *= self.growth
                self.now += took
                self.taken[self.in_force] += took
                self.switches += took * (100 if disturbed and self.in_force > 1 else 1)


def test_a_machine_of_its_own_keeps_all_threads() -> None:
    machine = Machine(4)
    machine.run(60)
    assert (machine.threads.number, machine.applied) == (4, [])


def test_it_is_undecided_until_it_has_watched_and_while_it_tries() -> None:
    beside = {number: seconds * (4 if number == 4 else 1) for number, seconds in ALONE.items()}
    alone, busy = Machine(4, beside), Machine(4, beside)
    busy.is_busy = True
    for machine in (alone, busy):
        machine.run(0.28)
        assert machine.threads.is_undecided
    alone.run(0.05)
    assert not alone.threads.is_undecided
    busy.run(0.05)
    assert (busy.threads.is_undecided, busy.threads.number) == (True, 4)
    busy.run(1)
    assert (busy.threads.is_undecided, busy.threads.number) == (False, 3)


@pytest.mark.parametrize("most", [2, 4])
def test_a_busy_core_is_left_alone_and_taken_again_when_it_is_free(most: int) -> None:
    beside = {number: seconds * (4 if number == most else 1) for number, seconds in ALONE.items()}
    machine = Machine(most, beside)
    machine.run(5)
    machine.is_busy = True
    machine.run(3)
    assert machine.threads.number == most - 1
    machine.run(600)
    assert machine.threads.number == most - 1
    assert machine.taken[most] < 5 + 0.03 * 603  # trials that come to nothing are few and short
    machine.is_busy = False
    machine.run(125)  # the longest rest before it looks again
    assert machine.threads.number == most


def test_it_goes_down_as_far_as_helps() -> None:
    machine = Machine(4, {1: 0.010, 2: 0.008, 3: 0.020, 4: 0.080})
    machine.is_busy = True
    machine.run(20)
    assert machine.threads.number == 2


def test_fewer_threads_that_do_not_help_are_tried_less_and_less() -> None:
    """Such as beside the HTTP server's own process, which takes a core for a moment only."""
    machine = Machine(2, {1: 0.010, 2: 0.0062})
    machine.is_busy = True
    machine.run(300)
    assert machine.threads.number == 2
    assert machine.taken[1] < 0.01 * 300


def test_what_is_gained_must_be_more_than_noise() -> None:
    machine = Machine(2, {1: 0.0099, 2: 0.0100})
    machine.is_busy = True
    machine.run(30)
    assert machine.threads.number == 2


def test_steps_with_prompts_take_no_part_in_a_trial() -> None:
    machine = Machine(2, {1: 0.010, 2: 0.012})
    machine.is_busy = True
    machine.run(30, decodes=False)
    assert (machine.threads.number, machine.applied) == (2, [])
    machine.run(0.2)  # into the other number's turn
    assert machine.applied
    tried = len(machine.applied)
    machine.run(30, decodes=False)
    assert (machine.threads.number, len(machine.applied)) == (2, tried)
    machine.run(1)
    assert machine.threads.number == 1


def test_what_is_clear_is_settled_soon() -> None:
    """Six steps: with two threads next to a busy program one may take a second."""
    machine = Machine(2, {1: 0.010, 2: 0.8})
    machine.is_busy = True
    machine.steps(1 + 6)
    assert machine.threads.number == 1


@pytest.mark.parametrize("growth", [0.98, 1.02])
def test_batches_that_shrink_or_grow_favour_neither_number(growth: float) -> None:
    machine = Machine(2, {1: 0.010, 2: 0.010})
    machine.is_busy = True
    machine.run(0.295)
    machine.growth = growth
    machine.steps(60)
    assert machine.applied
    assert machine.threads.number == 2


def test_whoever_sets_another_number_meanwhile_is_followed() -> None:
    machine = Machine(4, {1: 0.010, 2: 0.008, 3: 0.020, 4: 0.080})
    machine.is_busy = True
    machine.run(20)
    assert machine.threads.number == 2
    machine.in_force = 1
    with machine.threads.step(decodes=True):
        assert machine.in_force == 1
    assert (machine.threads.number, machine.in_force) == (1, 1)


def test_a_step_that_fails_leaves_no_trace() -> None:
    machine = Machine(2, {1: 0.010, 2: 0.040})
    machine.is_busy = True

    def fail() -> None:
        with machine.threads.step(decodes=True):
            machine.now += 100
            raise RuntimeError("step")

    for _ in range(3):
        with pytest.raises(RuntimeError, match="step"):
            fail()
    machine.run(5)
    assert machine.threads.number == 1
    with pytest.raises(RuntimeError, match="step"):
        fail()
    assert machine.in_force == 2
    assert machine.threads.number == 1


def test_the_system_counts_the_cores_that_it_takes() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    found = involuntary_switches()
    assert before <= found <= resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
