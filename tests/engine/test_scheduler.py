"""Scheduler: which sequence gets how many slots and which blocks, step by step, and 1,000 random scenarios."""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf

import pytest

from fakes import ScriptedRunner, fake_config, fake_core
from hamburger.engine.batch import ScheduledBatch
from hamburger.engine.core import EngineCore
from hamburger.engine.messages import AbortRequest, SubmitRequest
from hamburger.engine.sampling_params import SamplingParams
from hamburger.engine.scheduler import Scheduler
from hamburger.engine.sequence import Sequence


def add(scheduler: Scheduler, name: str, num_prompt_tokens: int, arrival: float = 0.0) -> Sequence:
    request = SubmitRequest(name, list(range(num_prompt_tokens)), SamplingParams(ignore_eos=True), arrival)
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
    assert scheduler.num_waiting == 2
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
    assert list(scheduler.preempted) == [b]
    late = add(scheduler, "late", 4, arrival=1.0)
    assert scheduler.expire(11.0) == []
    assert scheduler.expire(11.1) == [late]
    assert list(scheduler.preempted) == [b]
    scheduler.check_integrity()


def test_a_request_id_in_use_is_refused() -> None:
    scheduler = Scheduler(fake_config())
    add(scheduler, "a", 1)
    with pytest.raises(ValueError, match="in use"):
        add(scheduler, "a", 1)


def play(core: EngineCore, runner: ScriptedRunner, draw: random.Random) -> int:
    """Random arrivals and aborts until all is done; returns the preemptions. Each step is checked."""
    num_requests, unfinished, preemptions = draw.randint(1, 14), set[str](), 0
    arrivals = sorted((draw.randint(0, 12), f"r{i}") for i in range(num_requests))
    finished: dict[str, list[list[int]]] = {}
    groups: dict[str, list[list[int]]] = {}
    step = 0
    while arrivals or core.has_work:
        while arrivals and arrivals[0][0] <= step:
            name = arrivals.pop(0)[1]
            prompt = [draw.randrange(256) for _ in range(draw.randint(1, 20))]
            params = SamplingParams(max_tokens=draw.randint(1, 48 - len(prompt)), seed=draw.randrange(9))
            core.add(SubmitRequest(name, prompt, params, 0.0))
            unfinished.add(name)
        if unfinished and draw.random() < 0.08:
            name = draw.choice(sorted(unfinished))
            core.abort(AbortRequest(name))
            unfinished.discard(name)
        result = core.step()
        core.check_integrity()
        assert result.stats is not None
        preemptions += result.stats.num_preemptions
        assert result.stats.num_running + result.stats.num_waiting == len(unfinished) - sum(
            output.finish_reason is not None for output in result.outputs
        )
        for output in result.outputs:
            assert output.request_id in unfinished, "a group after the end"
            groups.setdefault(output.request_id, []).append(output.token_ids)
            if output.finish_reason is not None:
                unfinished.discard(output.request_id)
                finished[output.request_id] = groups[output.request_id]
        step += 1
        assert step < 2000, "livelock"
    assert not unfinished
    for name, kept in finished.items():  # nothing was lost, and only the last group was trimmed
        emitted = runner.emitted[name]
        assert kept[:-1] == emitted[:-1]
        assert kept[-1] == emitted[-1][: len(kept[-1])]
    return preemptions


def test_a_thousand_random_scenarios_leak_nothing() -> None:
    preemptions = 0
    for scenario in range(1000):
        draw = random.Random(scenario)
        block_size = draw.choice([1, 2, 4, 8])
        max_num_seqs = draw.randint(1, 6)
        config = fake_config(
            max_model_len=48,
            block_size=block_size,
            num_blocks=-(-48 // block_size) + draw.randint(0, 32 // block_size),
            max_num_seqs=max_num_seqs,
            max_num_batched_slots=max_num_seqs + draw.randint(0, 20),
        )
        runner = ScriptedRunner(seed=scenario, eos_chance=0.01)
        core = fake_core(runner, config, clock=lambda: 0.0)
        preemptions += play(core, runner, draw)
        stats = core.step().stats
        assert stats is not None
        assert (stats.used_slots, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert preemptions > 100  # or the scenarios prove nothing about them
