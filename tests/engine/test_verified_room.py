"""Verified groups in the core: drafts take only the room that nobody else wants, in budget, pool and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from counting_drafts import Counting, Drafting, answer, core_of, request, sequence_of, step
from hamburger.engine.core.batch import ScheduledBatch
from hamburger.engine.types.messages import AbortRequest, SubmitRequest
from playing import play
from verified import VerifyingRunner, verified_config, verified_core


def test_drafts_take_only_what_the_budget_leaves_and_delay_no_prompt() -> None:
    def prompts_of(most: int) -> tuple[list[list[int]], int]:
        core, runner = core_of(most=most, max_num_batched_slots=10)
        for name in "ab":
            core.add(request(name, num_prompt=1, max_tokens=40))
        step(core)
        core.add(request("c", num_prompt=30, max_tokens=4))
        for _ in range(8):
            step(core)
        of_c = [[slots for name, slots, _ in batch if name == "c"] for batch in runner.batches]
        return of_c, max(sum(slots + drafts for _, slots, drafts in batch) for batch in runner.batches)

    (without, _), (with_drafts, most_rows) = prompts_of(0), prompts_of(7)
    # 8 slots of the prompt beside two decoding sequences, whatever these would like to draft.
    assert without[1:5] == with_drafts[1:5] == [[8], [8], [8], [6]]
    assert most_rows == 10


def test_the_budget_goes_to_the_first_who_ask() -> None:
    core, runner = core_of(most=7, max_num_batched_slots=11)
    for name in "abc":
        core.add(request(name, num_prompt=1))
    step(core)
    step(core)
    assert runner.batches[1] == [("a", 1, 7), ("b", 1, 1), ("c", 1, 0)]


@pytest.mark.parametrize(("num_blocks", "num_drafts"), [(6, 7), (5, 7), (4, 3)])
def test_a_full_pool_means_fewer_drafts(num_blocks: int, num_drafts: int) -> None:
    core, runner = core_of(most=7, num_blocks=num_blocks, block_size=4, max_model_len=16)
    core.add(request("a", num_prompt=4, max_tokens=4, confidence=1.0))
    core.add(request("b", num_prompt=4, max_tokens=12))
    step(core)
    [_, output] = step(core)
    # Each takes a second block; with 4 there is none beyond "b"'s own, whose last three slots are for drafts.
    assert runner.batches[1] == [("a", 1, 0), ("b", 1, num_drafts)]
    assert len(output.token_ids) == 1 + num_drafts
    assert not core._scheduler.waiting


def test_a_sequence_that_needs_a_block_gets_it_before_any_draft() -> None:
    """Preemptions come when they come without drafts: here the pool holds one sequence and a half."""

    def preempted(most: int) -> tuple[int, dict[str, list[int]]]:
        core, _ = core_of(most=most, num_blocks=6, block_size=4, max_model_len=24)
        played = play(core, [request(name, num_prompt=4, max_tokens=16) for name in "ab"])
        return played.seen["preemptions"], played.tokens

    without, tokens = preempted(0)
    with_drafts, same = preempted(7)
    assert tokens == same == {name: answer(16) for name in "ab"}
    assert without >= 1
    assert with_drafts <= without


def test_a_replay_computes_the_same_slots_and_drafts_go_on() -> None:
    core, runner = core_of(wrong=[5], num_blocks=6, block_size=4, max_model_len=24)
    low, high = request("low", num_prompt=4, max_tokens=12), request("high", num_prompt=12, max_tokens=8)
    core.add(low)
    for _ in range(3):
        step(core)
    emitted = sequence_of(core, "low").output_ids[:]
    core.add(replace(high, priority=-1))
    played = play(core, [])
    assert played.seen["preemptions"] == 1
    assert emitted + played.tokens["low"] == answer(12)
    replayed = [slots for batch in runner.batches for name, slots, _ in batch if name == "low"]
    assert max(replayed[1:]) == 4 + len(emitted)  # in one pass
    after = next(i for i, batch in enumerate(runner.batches) if ("low", 4 + len(emitted), 0) in batch)
    assert any(drafts for batch in runner.batches[after:] for name, _, drafts in batch if name == "low")


def test_only_confirmed_slots_are_known_and_the_next_turn_reads_the_answer() -> None:
    core, _ = core_of(wrong=[2, 3, 6, 9], prefix_cache=True, num_blocks=64)
    core.add(request("a", num_prompt=5, max_tokens=14))
    known = []
    while core.has_work:
        blocks = core._scheduler.blocks
        step(core)
        known.append(len(blocks._key_of_block))
        if core.has_work:
            sequence = sequence_of(core, "a")
            assert known[-1] == sequence.num_known_blocks == sequence.num_computed_slots // 4
    # 5 + 14 tokens, the last of which was never fed.
    assert known[-1] == 18 // 4
    turn = SubmitRequest("b", [*range(5), *answer(14), 7, 8], request("b").params, arrival_time=0.0)
    core.add(turn)
    [output] = step(core)
    assert output.cached_slots == 16


def test_an_abort_frees_the_blocks_of_drafts_too() -> None:
    core, _ = core_of(most=7)
    core.add(request("a"))
    step(core)
    step(core)
    core.abort(AbortRequest("a"))
    core.check_integrity()
    assert core._scheduler.blocks.used_slots == 0


def test_a_step_that_memory_does_not_hold_leaves_no_blocks_of_drafts() -> None:
    sizes: list[int] = []

    def most_5(step: int, batch: ScheduledBatch) -> bool:
        sizes.append(batch.num_rows)
        return batch.num_rows > 5

    trunk = Counting()
    core = verified_core(VerifyingRunner(trunk, Drafting(trunk, 7), most_5), verified_config())
    played = play(core, [request("a", num_prompt=4), request("b", num_prompt=1)])
    assert played.tokens == {"a": answer(20), "b": answer(20)}
    # A prompt and "b" are 5 slots; what they draft next, 14 tokens, is halved until it fits.
    assert sizes[:4] == [5, 16, 8, 4]
    assert not played.seen["out_of_memory"]


def test_drafts_wait_until_all_that_they_follow_is_computed() -> None:
    """A prompt's last chunk emits without drafts, even one that the client predicted."""
    core, runner = core_of(most=0, max_num_seqs=4, max_num_batched_slots=4)
    core.add(request("a", num_prompt=6, prediction_ids=tuple(answer(20)), max_tokens=9))
    play(core, [])
    assert runner.batches == [[("a", 4, 0)], [("a", 2, 0)], [("a", 1, 3)], [("a", 1, 3)]]
