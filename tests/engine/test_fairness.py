"""Clients share an engine fairly: who of those that wait is next, and what each is charged with."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_engines import fake_config, fake_core
from fakes import ScriptedRunner
from hamburger.engine.core.scheduler import Scheduler
from hamburger.engine.core.sequence import Sequence
from hamburger.engine.core.waiting import OUTPUT_COST
from hamburger.engine.types.messages import SubmitRequest
from hamburger.engine.types.sampling_params import SamplingParams


def request(name: str, client: str, prompt: int = 1, priority: int = 0, max_tokens: int = 4) -> SubmitRequest:
    params = SamplingParams(ignore_eos=True, max_tokens=max_tokens)
    return SubmitRequest(name, [7] * prompt, params, 0.0, priority, client=client)


class OneSeat:
    """A scheduler with one seat; each request in it gets its answer at once."""

    def __init__(self, tokens: int = 4) -> None:
        self.scheduler = Scheduler(fake_config(max_num_seqs=1))
        self.tokens = tokens

    def add(self, name: str, client: str, prompt: int = 1, priority: int = 0) -> None:
        self.scheduler.add(Sequence(request(name, client, prompt, priority), (), 256))

    def serve(self) -> str:
        """The one that is next, to its end."""
        [item] = self.scheduler.schedule(0.0).sequences
        item.sequence.num_computed_slots += item.num_slots
        self.scheduler.count(item.sequence, self.tokens)
        self.scheduler.check_integrity()
        self.scheduler.remove(item.sequence.request_id)
        self.scheduler.check_integrity()
        return item.sequence.request_id

    def serve_all(self) -> list[str]:
        served = []
        while self.scheduler.has_work:
            served.append(self.serve())
        return served


def test_one_client_is_served_by_arrival_and_so_are_all_without_keys() -> None:
    seat = OneSeat()
    for name, prompt in (("a", 9), ("b", 1), ("c", 5)):
        seat.add(name, "", prompt)
    assert seat.serve_all() == ["a", "b", "c"]


def test_clients_take_turns_however_many_requests_one_of_them_sends() -> None:
    seat = OneSeat()
    for i in range(4):
        seat.add(f"flood{i}", "a")
    seat.add("b0", "b")
    seat.add("b1", "b")
    assert seat.serve_all() == ["flood0", "b0", "flood1", "b1", "flood2", "flood3"]


def test_who_has_been_served_less_goes_first_prompts_and_answers_counted() -> None:
    seat = OneSeat(tokens=5)
    seat.add("long", "a", 20)
    for i in range(2):
        seat.add(f"a{i}", "a")
    for i in range(4):
        seat.add(f"b{i}", "b", 2)
    # a is charged 20 + 2 * 5 = 30 for the long one; each of b's costs 2 + 2 * 5 = 12.
    assert seat.serve() == "long"
    assert seat.scheduler.waiting.served("a") == 20 + 5 * OUTPUT_COST
    assert seat.serve_all() == ["b0", "b1", "b2", "a0", "b3", "a1"]


def test_a_client_that_was_away_has_no_claim_to_the_time_before() -> None:
    seat = OneSeat()
    for i in range(8):
        seat.add(f"a{i}", "a")
    assert [seat.serve() for _ in range(4)] == ["a0", "a1", "a2", "a3"]
    for i in range(3):
        seat.add(f"b{i}", "b")  # not three before a's next: it begins where a is
    assert seat.scheduler.waiting.served("b") == seat.scheduler.waiting.served("a")
    assert seat.serve_all() == ["a4", "b0", "a5", "b1", "a6", "b2", "a7"]


def test_a_client_that_comes_back_owes_what_it_was_served() -> None:
    seat = OneSeat()
    seat.add("a0", "a", 50)
    seat.add("b0", "b")
    seat.add("b1", "b")
    assert seat.serve() == "a0"
    seat.add("a1", "a")
    assert seat.serve_all() == ["b0", "b1", "a1"]


def test_priority_goes_before_fairness() -> None:
    seat = OneSeat()
    seat.add("a0", "a", priority=-1)
    seat.add("a1", "a", priority=-1)
    seat.add("b0", "b", priority=0)
    seat.add("c0", "c", priority=0)
    assert seat.serve_all() == ["a0", "a1", "b0", "c0"]


def test_who_was_preempted_goes_on_before_anybody_starts() -> None:
    scheduler = Scheduler(fake_config(num_blocks=4, max_model_len=16, block_size=4))
    for name in "ab":
        scheduler.add(Sequence(request(name, "flood", 4, max_tokens=12), (), 256))
    for _ in range(6):
        for item in scheduler.schedule(0.0).sequences:
            item.sequence.num_computed_slots += item.num_slots
            item.sequence.accept([1], [0.0], None)
            scheduler.count(item.sequence, 1)
    assert [s.request_id for s in scheduler.waiting] == ["b"]
    scheduler.add(Sequence(request("other", "other"), (), 256))
    assert scheduler.waiting.head is not None
    assert scheduler.waiting.head.request_id == "b"
    scheduler.check_integrity()


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 12), st.integers(1, 12)), min_size=6, max_size=40))
def test_clients_that_wait_all_the_time_are_served_alike(drawn: list[tuple[str, int, int]]) -> None:
    """For one seat: what two that always wait were charged with differs by no
    more than one request may cost."""
    core = fake_core(ScriptedRunner(), fake_config(max_num_seqs=1), lambda: 0.0)
    left = Counter(client for client, _, _ in drawn)
    for i, (client, prompt, tokens) in enumerate(drawn):
        core.add(request(f"{i}", client, prompt, max_tokens=tokens))
    most = 12 + OUTPUT_COST * 12
    while core.has_work:
        for output in core.step().outputs:
            if output.finish_reason is not None:
                left[drawn[int(output.request_id)][0]] -= 1
        served = [core._scheduler.waiting.served(client) for client, number in left.items() if number > 1]
        assert max(served, default=0) - min(served, default=0) <= most
        core.check_integrity()
    assert not any(left.values())


@pytest.mark.parametrize("clients", ["a", "ab"])
def test_what_is_charged_is_what_was_computed(clients: str) -> None:
    core = fake_core(ScriptedRunner(eos_chance=0), fake_config(), lambda: 0.0)
    for client in clients:
        core.add(request(client, client, prompt=6, max_tokens=3))
    core.add(request("last", "z", max_tokens=8))
    while not all(core._scheduler.waiting.served(client) == 6 + 3 * OUTPUT_COST for client in clients):
        assert core.has_work
        core.step()
