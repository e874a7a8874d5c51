"""Scheduler: which sequence gets how many slots and which blocks, step by step."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import pytest

from fake_engines import fake_config
from hamburger.engine.core.batch import ScheduledBatch
from hamburger.engine.core.scheduler import Scheduler
from hamburger.engine.core.sequence import Sequence
from hamburger.engine.types.messages import SubmitRequest
from hamburger.engine.types.sampling_params import SamplingParams


def add(scheduler: Scheduler, name: str, num_prompt_tokens: int, arrival: float = 0.0, priority: int = 0) -> Sequence:
    params = SamplingParams(ignore_eos=True)
    request = SubmitRequest(name, list(range(num_prompt_tokens)), params, arrival, priority)
    sequence = Sequence(request, (), 256)
    scheduler.add(sequence)
    return sequence


def run(batch: ScheduledBatch, group: SequenceOf[int] = (1, 2)) -> list[tuple[str, int, bool]]:
    """Pretend to compute a batch: everything that emits gets the same group."""
    for item in batch.sequences:
        item.sequence.num_computed_slots += item.num_slots
        if item.emits:
            item.sequence.accept(list(group), [0.0] * len(group), None)
    return [(item.sequence.request_id, item.num_slots, item.emits) for item in batch.sequences]


def test_prefill_is_chunked_and_shares_steps_with_decode() -> None:
    scheduler = Scheduler(fake_config(max_num_batched_slots=10))
    a = add(scheduler, "a", 4)
    b = add(scheduler, "b", 15)
    add(scheduler, "c", 3)
    assert run(scheduler.schedule(0.0)) == [("a", 4, True), ("b", 6, False)]
    assert (a.block_ids, b.block_ids) == ([0], [1, 2, 3, 4])
    # The decode comes first, then the older prefill takes the rest of the budget.
    assert run(scheduler.schedule(1.0)) == [("a", 1, True), ("b", 9, True)]
    assert (a.block_ids, b.block_ids) == ([0, 5], [1, 2, 3, 4])
    # Both decode and leave eight slots, of which the newcomer needs three.
    assert run(scheduler.schedule(2.0)) == [("a", 1, True), ("b", 1, True), ("c", 3, True)]
    assert [s.scheduled_time for s in scheduler.running] == [0.0, 0.0, 2.0]
    scheduler.check_integrity()


def test_sequences_with_one_slot_come_first_in_a_batch() -> None:
    scheduler = Scheduler(fake_config())
    add(scheduler, "long", 5)
    add(scheduler, "one", 1)
    assert run(scheduler.schedule(0.0)) == [("one", 1, True), ("long", 5, True)]


def test_a_decode_grows_by_one_slot_whatever_its_group_size() -> None:
    scheduler = Scheduler(fake_config())
    a = add(scheduler, "a", 4)
    for step in range(9):
        run(scheduler.schedule(0.0), group=[1, 2, 3, 4])
        assert a.num_computed_slots == 4 + step
        assert len(a.block_ids) == -(-(4 + step) // 4)
    assert a.num_tokens == 4 + 9 * 4


def test_first_come_first_served_up_to_max_num_seqs() -> None:
    scheduler = Scheduler(fake_config(max_num_seqs=2))
    for name in "abc":
        add(scheduler, name, 2)
    assert run(scheduler.schedule(0.0)) == [("a", 2, True), ("b", 2, True)]
    scheduler.remove("a")
    assert run(scheduler.schedule(0.0)) == [("b", 1, True), ("c", 2, True)]


def test_a_big_request_at_the_head_is_not_overtaken() -> None:
    scheduler = Scheduler(fake_config(num_blocks=8, max_model_len=32, block_size=4))
    add(scheduler, "a", 16)
    add(scheduler, "big", 20)
    add(scheduler, "small", 1)
    assert run(scheduler.schedule(0.0)) == [("a", 16, True)]
    assert len(scheduler.waiting) == 2
    scheduler.remove("a")
    assert run(scheduler.schedule(0.0)) == [("small", 1, True), ("big", 20, True)]


def test_preemption_takes_the_newest_and_replays_its_groups() -> None:
    scheduler = Scheduler(fake_config(num_blocks=4, max_model_len=16, block_size=4))
    a = add(scheduler, "a", 4)
    b = add(scheduler, "b", 4)
    assert run(scheduler.schedule(0.0)) == [("a", 4, True), ("b", 4, True)]
    for _ in range(4):
        assert run(scheduler.schedule(0.0)) == [("a", 1, True), ("b", 1, True)]
    assert (a.block_ids, b.block_ids) == ([0, 2], [1, 3])
    # The ninth slots need a third block each: b gives its own to a.
    batch = scheduler.schedule(0.0)
    assert [s.request_id for s in batch.preempted] == ["b"]
    assert run(batch) == [("a", 1, True)]
    assert (a.block_ids, b.block_ids, b.num_computed_slots) == ([0, 2, 1], [], 0)
    assert len(b.groups) == 5
    # b (9 slots, 3 blocks) waits while a runs, before c who came later.
    add(scheduler, "c", 1)
    for _ in range(7):
        assert run(scheduler.schedule(0.0)) == [("a", 1, True)]
    scheduler.check_integrity()
    scheduler.remove("a")
    assert run(scheduler.schedule(5.0)) == [("b", 9, True)]  # no block would be left for b to grow into beside c
    assert b.block_ids == [0, 1, 2]
    assert len(b.groups) == 6
    assert b.scheduled_time == 0.0  # when it first ran
    scheduler.check_integrity()


def test_only_requests_that_never_ran_expire() -> None:
    scheduler = Scheduler(fake_config(num_blocks=4, max_model_len=16, block_size=4, max_queue_seconds=10))
    add(scheduler, "a", 4)
    b = add(scheduler, "b", 4)
    for _ in range(6):
        run(scheduler.schedule(0.0))
    assert [*scheduler.waiting] == [b]
    late = add(scheduler, "late", 4, arrival=1.0)
    assert scheduler.expire(11.0) == []
    assert scheduler.expire(11.1) == [late]
    assert [*scheduler.waiting] == [b]
    scheduler.check_integrity()


def test_priority_comes_before_arrival_in_the_queue() -> None:
    scheduler = Scheduler(fake_config(max_num_seqs=1))
    for name, priority in (("a", 5), ("b", 0), ("c", -1), ("d", 0), ("e", 5)):
        add(scheduler, name, 1, priority=priority)
    started = []
    while scheduler.has_work:
        [(name, _, _)] = run(scheduler.schedule(0.0))
        started.append(name)
        scheduler.check_integrity()
        scheduler.remove(name)
    assert started == ["c", "b", "d", "a", "e"]


def test_a_higher_priority_takes_the_seat_of_the_newest_of_the_lowest() -> None:
    scheduler = Scheduler(fake_config(max_num_seqs=3))
    for name, priority in (("a", 1), ("b", 2), ("c", 2)):
        add(scheduler, name, 4, priority=priority)
    run(scheduler.schedule(0.0))
    run(scheduler.schedule(0.0))
    urgent = add(scheduler, "urgent", 3, priority=-7)
    batch = scheduler.schedule(1.0)
    scheduler.check_integrity()
    assert [s.request_id for s in batch.preempted] == ["c"]
    assert run(batch) == [("a", 1, True), ("b", 1, True), ("urgent", 3, True)]
    assert [s.request_id for s in scheduler.running] == ["urgent", "a", "b"]
    # Of the same priority as b, "late" waits behind c; "mid" takes b's place.
    add(scheduler, "late", 1, priority=2)
    add(scheduler, "mid", 1, priority=1)
    batch = scheduler.schedule(2.0)
    assert [s.request_id for s in batch.preempted] == ["b"]
    assert [s.request_id for s in scheduler.waiting] == ["b", "c", "late"]
    run(batch)
    assert scheduler.schedule(3.0).preempted == []
    scheduler.remove("urgent")
    assert ("b", 7, True) in run(scheduler.schedule(4.0))  # its prompt and its three groups
    assert urgent.block_ids == []
    scheduler.check_integrity()


def test_a_higher_priority_takes_blocks_only_if_they_are_enough() -> None:
    scheduler = Scheduler(fake_config(num_blocks=8, max_model_len=32, block_size=4))
    add(scheduler, "first", 8, priority=0)
    low = [add(scheduler, name, 4, priority=1) for name in "ab"]
    run(scheduler.schedule(0.0))
    assert [s.block_ids for s in low] == [[2], [3]]
    # "first" takes a third block, 3 are left. "big" needs 4, and one in reserve for each other that runs.
    add(scheduler, "big", 16, priority=0)
    batch = scheduler.schedule(0.0)
    assert [s.request_id for s in batch.preempted] == ["b", "a"]
    assert ("big", 16, True) in run(batch)
    scheduler.check_integrity()
    scheduler.remove("big")
    run(scheduler.schedule(0.0))
    assert [s.request_id for s in scheduler.running] == ["first", "a"]
    # 28 slots are 7 blocks, and "first" holds 3: all of the lower priority would not be enough, so none is disturbed.
    add(scheduler, "bigger", 28, priority=0)
    batch = scheduler.schedule(0.0)
    assert batch.preempted == []
    assert [item.sequence.request_id for item in batch.sequences] == ["first", "a"]
    # And who is behind "bigger" does not overtake it, whatever it needs.
    add(scheduler, "small", 1, priority=1)
    run(batch)
    assert scheduler.schedule(0.0).preempted == []
    assert [s.request_id for s in scheduler.waiting] == ["bigger", "b", "small"]
    scheduler.check_integrity()


def test_a_higher_priority_starts_though_every_slot_of_the_budget_decodes() -> None:
    scheduler = Scheduler(fake_config(max_num_seqs=3, max_num_batched_slots=3))
    for name in "abc":
        add(scheduler, name, 1, priority=1)
    run(scheduler.schedule(0.0))
    add(scheduler, "urgent", 2)
    batch = scheduler.schedule(0.0)
    assert [s.request_id for s in batch.preempted] == ["c"]
    assert run(batch) == [("urgent", 1, False), ("a", 1, True), ("b", 1, True)]
    assert run(scheduler.schedule(0.0)) == [("urgent", 1, True), ("a", 1, True), ("b", 1, True)]


def test_the_memory_of_a_growing_sequence_comes_from_the_lowest_priority() -> None:
    scheduler = Scheduler(fake_config(num_blocks=4, max_model_len=16, block_size=4))
    add(scheduler, "low", 4, priority=1)
    run(scheduler.schedule(0.0))
    add(scheduler, "high", 4, priority=0)
    for _ in range(4):
        run(scheduler.schedule(0.0))
    assert [len(s.block_ids) for s in scheduler.running] == [2, 2]
    run(scheduler.schedule(0.0))
    scheduler.check_integrity()
    assert [s.request_id for s in scheduler.running] == ["high"]
    assert [s.request_id for s in scheduler.waiting] == ["low"]


def test_a_low_priority_expires_while_others_go_before_it() -> None:
    scheduler = Scheduler(fake_config(max_num_seqs=1, max_queue_seconds=10))
    low = add(scheduler, "low", 1, arrival=0.0, priority=1)
    for second in range(1, 11):
        add(scheduler, f"high {second}", 1, arrival=float(second))
        assert scheduler.expire(float(second)) == []
        assert run(scheduler.schedule(float(second))) == [(f"high {second}", 1, True)]
        scheduler.remove(f"high {second}")
    assert scheduler.expire(10.5) == [low]
    assert not scheduler.has_work
    scheduler.check_integrity()


def test_a_long_prompt_gets_fewer_slots_the_more_lies_before_them() -> None:
    scheduler = Scheduler(fake_config(max_num_batched_slots=33, even_context=32))
    add(scheduler, "long", 200)
    # Alone it has the whole budget.
    assert run(scheduler.schedule(0.0)) == [("long", 33, False)]
    add(scheduler, "stream", 1, priority=-1)
    assert run(scheduler.schedule(0.0)) == [("stream", 1, True), ("long", 32, False)]
    # Beside another's answer as many as cost what 32 do: 11 behind 65, which cost 1 + 65 / 32 each, and so on.
    for number in (11, 10, 9, 9):
        assert run(scheduler.schedule(0.0)) == [("stream", 1, True), ("long", number, False)]
    scheduler.check_integrity()


def test_prompts_share_what_a_step_may_take_by_what_they_cost() -> None:
    scheduler = Scheduler(fake_config(max_num_batched_slots=21, even_context=10, prefix_cache=False))
    add(scheduler, "stream", 1)
    run(scheduler.schedule(0.0))
    add(scheduler, "first", 24)
    add(scheduler, "second", 60)
    assert run(scheduler.schedule(0.0)) == [("stream", 1, True), ("first", 20, False)]
    # Four slots behind 20 cost three times as much: 12 of 20, and 8 are left for the second.
    assert run(scheduler.schedule(0.0)) == [("stream", 1, True), ("first", 4, True), ("second", 8, False)]


def test_a_request_id_in_use_is_refused() -> None:
    scheduler = Scheduler(fake_config())
    add(scheduler, "a", 1)
    with pytest.raises(ValueError, match="in use"):
        add(scheduler, "a", 1)
