"""Verified groups in the core: which slots, blocks and rows drafts take, and that no wrong one leaves a trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from counting_drafts import Counting, Drafting, answer, core_of, request, sequence_of, step
from fake_engines import fake_info
from fakes import EOS, VOCAB_SIZE, ByteTokenizer, scripted_logprobs
from hamburger.engine import LLM, SamplingParams
from hamburger.engine.core.batch import BatchResult, ScheduledBatch
from hamburger.engine.core.block_manager import BlockManager
from hamburger.engine.core.core import EngineCore
from hamburger.engine.core.sequence import Sequence
from hamburger.engine.device.constraint import GrammarConstraint
from hamburger.engine.drafting.proposal import Proposal
from hamburger.engine.grammar.writing import regex_grammar
from hamburger.engine.types.messages import CheckedDrafts, GroupOutput, RequestFailed
from playing import play
from verified import VerifyingRunner, free_rows, policy_of, verified_config, verified_core


def test_each_token_has_its_slot_and_rejected_drafts_give_their_blocks_back() -> None:
    # Places 3 and 8 are foreseen wrongly.
    core, runner = core_of(wrong=[3, 8], num_blocks=64)
    core.add(request("a", num_prompt=3))
    lives: list[tuple[list[int], tuple[int, int] | None, int, list[int]]] = []
    while core.has_work and len(lives) < 5:
        [output] = step(core)
        sequence = sequence_of(core, "a")
        drafts = None if output.drafts is None else (len(output.drafts.token_ids), output.drafts.num_accepted)
        lives.append((output.token_ids, drafts, sequence.num_computed_slots, list(sequence.block_ids)))
    assert lives == [
        ([100], None, 3, [0]),  # the prompt; its answer's first token is the fourth slot
        # Rows in slots 3 to 6, of blocks 0 and 1. Drafts 1 and 2 stay, the third is wrong: slots 3 to 5 count.
        ([101, 102, 103], (3, 2), 6, [0, 1]),
        ([104, 105, 106, 107], (3, 3), 10, [0, 1, 2]),
        # Slots 10 to 13, of which the first draft is wrong: block 3 was used by drafts only, and is given back.
        ([108], (3, 0), 11, [0, 1, 2]),
        ([109, 110, 111, 112], (3, 3), 15, [0, 1, 2, 3]),
    ]
    assert runner.batches == [[("a", 3, 0)], *[[("a", 1, 3)]] * 4]
    sequence = sequence_of(core, "a")
    assert sequence.groups == [[100 + i] for i in range(13)]
    assert [sequence.slot_position(slot) for slot in range(16)] == list(range(16))
    assert (sequence.num_macro_steps, sequence.num_slots) == (5, 16)


def test_what_a_step_tells_of_its_drafts() -> None:
    core, _ = core_of(wrong=[2])
    core.add(request("a", num_prompt=1, logprobs=2))
    core.add(request("b", num_prompt=1, confidence=1.0))
    assert [output.drafts for output in step(core)] == [None, None]
    outputs = core.step()
    first, second = outputs.outputs
    assert first.drafts is not None
    assert (first.drafts.drafter, first.drafts.token_ids, first.drafts.num_accepted) == ("micro", [101, 99, 103], 1)
    assert first.token_ids == [101, 102]
    assert first.logprobs == [scripted_logprobs(1, 101, 2), scripted_logprobs(2, 102, 2)]
    assert (second.token_ids, second.drafts) == ([101], None)
    assert outputs.stats is not None
    assert outputs.stats.drafts == [first.drafts]
    assert (outputs.stats.group_sizes, outputs.stats.decoded_sequences) == ([2, 1], 2)
    assert outputs.stats.prompt_slots == 0


@pytest.mark.parametrize("max_tokens", range(1, 12))
@pytest.mark.parametrize("confidence", [0.0, 1.0])
def test_max_tokens_or_the_context_ends_inside_a_group(max_tokens: int, confidence: float) -> None:
    by_context = {"num_prompt": 16 - max_tokens, "max_tokens": None}
    for asked in ({"max_tokens": max_tokens}, by_context):
        core, _ = core_of(most=12, max_model_len=16, num_blocks=4)
        outputs = play(core, [request("a", confidence=confidence, **asked)]).outputs["a"]
        assert [token_id for output in outputs for token_id in output.token_ids] == answer(max_tokens)
        assert [output.finish_reason for output in outputs][-1] == "length"
        # No draft is made that could not be kept: the last token of all is always the trunk's own.
        wanted = [(max_tokens - 1 - 8 * i, 8) for i in range(2) if max_tokens - 1 > 8 * i]
        if confidence == 0:
            assert [len(output.token_ids) for output in outputs] == [1, *(min(pair) for pair in wanted)]
            assert all(o.drafts is None or len(o.drafts.token_ids) == len(o.token_ids) - 1 for o in outputs)


def ends(**fields: Any) -> dict[str, Any]:
    return fields


@pytest.mark.parametrize(
    ("instead", "asked", "wanted", "stop"),
    [
        ({3: EOS}, ends(), [*answer(3), EOS], EOS),
        ({3: EOS}, ends(ignore_eos=True, max_tokens=6), [100, 101, 102, EOS, 104, 105], None),
        ({}, ends(stop_token_ids=(102,)), answer(3), 102),
        ({1: 102, 4: 102}, ends(stop_token_ids=(102,), min_tokens=2), [100, 102, 102], 102),
        ({1: 102, 2: 50, 4: 102}, ends(stop_token_ids=(102,), min_tokens=2), [100, 102, 50, 103, 102], 102),
        ({0: EOS}, ends(), [EOS], EOS),
    ],
)
def test_an_end_among_accepted_drafts_cuts_the_group_there(
    instead: dict[int, int], asked: dict[str, Any], wanted: list[int], stop: int | None
) -> None:
    core, _ = core_of(Counting(instead), most=7)
    plain, _ = core_of(Counting(instead), most=0)
    outputs = play(core, [request("a", logprobs=1, **asked)]).outputs["a"]
    unaided = play(plain, [request("a", logprobs=1, **asked)]).outputs["a"]
    assert [t for o in outputs for t in o.token_ids] == [t for o in unaided for t in o.token_ids] == wanted
    assert (outputs[-1].finish_reason, outputs[-1].stop_token_id) == ("length" if stop is None else "stop", stop)
    assert [e for o in outputs for e in o.logprobs or []] == [e for o in unaided for e in o.logprobs or []]
    for output in outputs:
        # Tokens behind the end were never tokens, so their drafts were not accepted.
        assert output.drafts is None or output.drafts.num_accepted <= len(output.token_ids)
    if len(wanted) > 1 and stop is not None:
        assert outputs[-1].drafts is not None
        assert outputs[-1].drafts.num_accepted == len(outputs[-1].token_ids)


def test_max_tokens_0_and_prompt_logprobs() -> None:
    core, runner = core_of(max_num_batched_slots=8)
    asked = [
        request("a", num_prompt=20, max_tokens=0, prompt_logprobs=2),
        request("b", num_prompt=9, max_tokens=9, prompt_logprobs=1),
        request("c", num_prompt=1, max_tokens=9),
    ]
    played = play(core, asked)
    [output] = played.outputs["a"]
    assert (output.token_ids, output.finish_reason, output.drafts) == ([], "length", None)
    assert output.prompt_logprobs == [None, *(scripted_logprobs(1000 + i, i, 2) for i in range(1, 20))]
    first, *others = played.outputs["b"]
    assert first.prompt_logprobs == [None, *(scripted_logprobs(1000 + i, i, 1) for i in range(1, 9))]
    assert all(output.prompt_logprobs is None for output in others)
    assert played.tokens["b"] == played.tokens["c"] == answer(9)
    assert runner.seen["accepted"]


class Spoiling(VerifyingRunner):
    """Leaves an error in every matcher with drafts, as a walk along some may that were not accepted."""

    num_spoilt = 0

    def run(self, batch: ScheduledBatch) -> BatchResult:
        drafting = [item.sequence.matcher for item in batch.sequences if item.drafts or item.max_drafts]
        for matcher in [matcher for matcher in drafting if matcher is not None]:
            self.num_spoilt += 1
            matcher.advance(VOCAB_SIZE - 3)
            matcher.go_back(1)
            assert matcher.error is not None
        return super().run(batch)


@pytest.mark.parametrize(("pattern", "reason"), [("[d-z]{14}", "stop"), ("[d-k]{14}", None)])
def test_an_error_behind_drafts_is_forgotten_and_one_behind_the_answer_is_not(pattern: str, reason: str | None) -> None:
    trunk = Counting()
    runner = Spoiling(trunk, Drafting(trunk, 3, ()))
    core = verified_core(runner, verified_config())
    core.add(request("a", grammar=regex_grammar(pattern)))
    outputs, failures = list[GroupOutput](), list[RequestFailed]()
    while core.has_work:
        told = core.step()
        core.check_integrity()
        outputs, failures = outputs + told.outputs, failures + told.failures
    found = [token_id for output in outputs for token_id in output.token_ids]
    assert runner.num_spoilt > 5
    if reason is None:  # after k comes l, which is not allowed
        assert [failure.kind for failure in failures] == ["grammar"]
        assert found == answer(8)  # as without drafts
    else:
        assert (failures, outputs[-1].finish_reason, found) == ([], reason, answer(20)[:14])


def test_an_error_behind_the_token_that_ends_the_answer_is_none() -> None:
    trunk = Counting()
    core = verified_core(Spoiling(trunk, Drafting(trunk, 3, ())), verified_config())
    core.add(request("a", grammar=regex_grammar("[d-k]{14}"), stop_token_ids=(ord("k"),)))
    found, failures = list[int](), list[RequestFailed]()
    while core.has_work:
        told = core.step()
        found += [token_id for output in told.outputs for token_id in output.token_ids]
        failures += told.failures
    assert (failures, bytes(found)) == ([], b"defghijk")


class Asking(VerifyingRunner):
    """Asks every matcher what may come where its answer stands, behind each draft that may, and behind what is chosen,
    as the device does."""

    def run(self, batch: ScheduledBatch) -> BatchResult:
        result = super().run(batch)
        emitting = [item for item in batch.sequences if item.emits]
        for item, group in zip(emitting, result.groups, strict=True):
            if (matcher := item.sequence.matcher) is None:
                continue
            drafts = item.drafts.token_ids if item.drafts else []
            for path in [*(drafts[:number] for number in range(len(drafts) + 1)), group.token_ids]:
                constraint = GrammarConstraint({0: (matcher, path)}, VOCAB_SIZE, torch.device("cpu"))
                constraint.allowed(constraint.rows)
                constraint.restore()
        return result


@pytest.mark.parametrize("num_left", [0, 5])
def test_where_rules_and_a_grammar_leave_nothing_the_request_fails(num_left: int) -> None:
    trunk = Counting()
    core = verified_core(Asking(trunk, Drafting(trunk, 3, ())), verified_config())
    allowed = tuple(answer(num_left)) or (97,)
    core.add(request("a", grammar=regex_grammar("defgh[i-z]{9}"), allowed_token_ids=allowed))
    outputs, failures = list[GroupOutput](), list[RequestFailed]()
    while core.has_work:
        told = core.step()
        outputs, failures = outputs + told.outputs, failures + told.failures
    assert [failure.kind for failure in failures] == ["grammar"]
    assert "leave no token" in failures[0].message
    assert [token_id for output in outputs for token_id in output.token_ids] == answer(num_left)  # as without drafts


@pytest.mark.parametrize("confidence", [0.0, 1.0])
def test_a_stop_string_behind_which_nothing_may_follow_ends_the_answer(confidence: float) -> None:
    trunk, config = Counting(), verified_config()
    core = verified_core(Asking(trunk, Drafting(trunk, 3, ())), config)
    llm = LLM.from_core(core, fake_info(config), ByteTokenizer())
    params = SamplingParams(
        allowed_token_ids=tuple(b"defg"),
        bad_words=tuple((ord("g"), token_id) for token_id in b"defg"),
        stop=("g",),
        confidence=confidence,
    )
    [result] = llm.generate([[1, 2]], params, progress=False)
    assert (result.text, result.finish_reason, result.stop_reason) == ("def", "stop", "g")


def test_what_was_drafted_for_another_place_is_forgotten() -> None:
    trunk = Counting()
    made = iter([Proposal("micro", [101, 102], [0.9, 0.9])])
    runner = VerifyingRunner(trunk, lambda tokens, params, output_index: next(made, None))
    play(verified_core(runner), [request("a")])
    assert [drafts for [(_, _, drafts)] in runner.batches[:4]] == [0, 2, 0, 0]


def test_without_a_policy_or_where_rows_are_dear_nothing_is_drafted() -> None:
    for policy in (policy_of([1.0, 9.0]), free_rows()):
        trunk = Counting()
        runner = VerifyingRunner(trunk, Drafting(trunk))
        core = verified_core(runner, verified_config(), policy)
        play(core, [request("a")])
        assert (runner.seen["drafted"] > 0) == (policy.costs().step(2) < 2)
    runner = VerifyingRunner(trunk, Drafting(trunk))
    runner.config = verified_config()
    played = play(EngineCore(runner.config, runner, lambda: 0.0), [request("a")])
    assert (played.tokens["a"], runner.seen["drafted"]) == (answer(20), 0)


def test_accept_counts_slots_of_confirmed_tokens_and_drafts_that_were_kept() -> None:
    sequence = Sequence(request("a", max_tokens=5), (EOS,), 64, "verified")
    sequence.scheduled_time, sequence.num_computed_slots = 0.0, 4
    assert sequence.accept([100], [0.5], None).token_ids == [100]
    assert (sequence.num_slots, sequence.num_computed_slots, sequence.num_tokens_left) == (5, 4, 4)
    sequence.num_computed_slots += 1
    drafts = CheckedDrafts("micro", [101, 102, 9], [0.9] * 3, 2)
    output = sequence.accept([101, 102, 103], [0.5] * 3, None, drafts)
    assert output.drafts == drafts
    assert (sequence.num_slots, sequence.num_computed_slots) == (8, 7)
    sequence.num_computed_slots += 1
    output = sequence.accept([EOS, 7, 8], [0.5] * 3, None, CheckedDrafts("micro", [EOS, 7, 9], [0.9] * 3, 2))
    assert (output.token_ids, output.finish_reason, output.drafts and output.drafts.num_accepted) == ([EOS], "stop", 1)
    assert sequence.num_computed_slots < sequence.num_slots


def test_grow_as_far_and_shrink() -> None:
    blocks = BlockManager(4, 4)
    one, other = (Sequence(request(name, num_prompt=3), (), 64, "verified") for name in "ab")
    assert blocks.grow_as_far(one, 3) == 3
    assert (one.block_ids, blocks.grow_as_far(one, 4), one.block_ids) == ([0], 4, [0])
    assert (blocks.grow_as_far(one, 9), one.block_ids) == (9, [0, 1, 2])
    assert (blocks.grow_as_far(other, 30), other.block_ids) == (4, [3])
    assert (blocks.grow_as_far(one, 30), one.block_ids) == (12, [0, 1, 2])
    assert (blocks.grow_as_far(one, 2), one.block_ids) == (2, [0, 1, 2])  # what it has, it keeps
    blocks.shrink(one, 5)
    assert (one.block_ids, blocks.num_free_blocks) == ([0, 1], 1)
    blocks.shrink(one, 4)
    blocks.shrink(one, 4)
    assert one.block_ids == [0]
    blocks.shrink(other, 0)
    assert (other.block_ids, blocks.num_free_blocks) == ([], 3)
    blocks.free(one)
    blocks.check_integrity()
