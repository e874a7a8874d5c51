"""Verified groups on real models: every answer is that of confidence 1, whatever is drafted and whoever is beside it.

Token by token in float32; with the CPU kernels each log-probability has the same bits too.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from exactness import (
    ASKED,
    CONTEXT,
    GRAFTS,
    GRAMMARS,
    answers,
    asking,
    assert_same,
    foretold,
    requests,
    steps_of,
    unaided,
)
from fake_engines import fake_info
from fakes import VOCAB_SIZE, ByteTokenizer
from hamburger.engine import LLM
from hamburger.engine.types.messages import SubmitRequest
from hamburger.engine.types.sampling_params import SamplingParams
from slow_cases import slow_but
from small_models import core_of, params
from verified import free_rows, policy_of

FORMS = ("kernels", "torch", "static")

CASES = [(name, form) for form in FORMS for name in GRAFTS]


@pytest.mark.parametrize(
    ("name", "form"), slow_but([("hamburger", "kernels"), ("short_list", "torch"), ("plain_base", "kernels")], CASES)
)
@pytest.mark.usefixtures("meddling")
def test_whatever_is_drafted_the_answers_are_those_of_confidence_1(name: str, form: str) -> None:
    steps, asked, seen = steps_of(name, form), requests(), Counter[str]()
    truth = unaided(steps, asked)
    assert len({tuple(found.token_ids) for found in truth.values()}) > 0.9 * len(truth)
    assert len({found.end for found in truth.values()}) > 3
    told, to_the_bit = foretold(asked, truth), form == "kernels"
    tight: dict[str, Any] = {"num_blocks": 32, "max_num_seqs": 6, "max_num_batched_slots": 24, "prefix_cache": True}
    for settings in ({"num_blocks": 400}, tight):
        core = core_of(
            steps, max_model_len=CONTEXT, grammars=GRAMMARS, policy=free_rows(steps.config.max_group - 1), **settings
        )
        assert_same(answers(core, told, seen), truth, to_the_bit=to_the_bit)
    assert seen["preemptions"] > 3
    assert seen["accepted"] > 100
    assert seen["rejected"] > 60
    assert (seen["micro"] > 10) == (name != "plain_base")
    # At confidence 1 nothing is drafted, and a row more in the batch changes nothing either.
    core = core_of(steps, max_model_len=CONTEXT, grammars=GRAMMARS, policy=free_rows())
    mixed = [r if int(r.request_id) % 2 else asking([r], confidence=1.0)[0] for r in told]
    assert_same(answers(core, mixed, Counter()), truth, to_the_bit=to_the_bit)


@pytest.mark.usefixtures("meddling")
@pytest.mark.parametrize("form", slow_but(["kernels"], ["kernels", "torch"]))
def test_alone_as_in_a_crowd(form: str) -> None:
    steps, asked = steps_of("hamburger", form), requests("alone")
    truth = unaided(steps, asked)
    for request in foretold(asked, truth)[::2]:
        core = core_of(
            steps,
            max_model_len=CONTEXT,
            max_num_seqs=1,
            max_num_batched_slots=7,
            grammars=GRAMMARS,
            policy=free_rows(3),
        )
        name = request.request_id
        assert_same(answers(core, [request], Counter()), {name: truth[name]}, to_the_bit=form == "kernels")


@pytest.mark.parametrize("name", ["hamburger", "plain_base"])
def test_its_own_drafters_at_every_confidence_and_with_any_prediction(name: str) -> None:
    steps, asked = steps_of(name, "kernels"), requests("own")
    truth = unaided(steps, asked)
    draw, seen = random.Random(3), Counter[str]()

    def predicted(request: SubmitRequest, share: float) -> SubmitRequest:
        text = [t if draw.random() < share else draw.randrange(VOCAB_SIZE) for t in truth[request.request_id].token_ids]
        return replace(request, params=replace(request.params, prediction_ids=(*text,)))

    for share, confidence, policy in (
        (1.0, 0.0, free_rows(steps.config.max_group - 1)),
        (0.7, 0.0, free_rows(steps.config.max_group - 1)),
        (0.5, 0.0, free_rows(steps.config.max_group - 1)),
        (0.0, 0.0, free_rows(steps.config.max_group - 1)),
        (0.0, 0.1, free_rows(steps.config.max_group - 1)),
        (0.9, 0.4, policy_of([1.0, 1.1, 1.2, 1.3, 1.4, 3.0, 5.0], steps.config.max_group - 1, 0.05)),
    ):
        told = asking([predicted(request, share) for request in asked], confidence=confidence)
        core = core_of(steps, max_model_len=CONTEXT, grammars=GRAMMARS, policy=policy)
        assert_same(answers(core, told, seen), truth, to_the_bit=True)
    assert seen["prediction"] > 50
    assert seen["lookup"] > 3
    assert seen["grammar"] > 8 or name == "hamburger"  # whose micro-steps follow it, too
    assert (seen["micro"] > 50) == (name == "hamburger")
    assert seen["accepted"] > 300
    assert seen["rejected"] > 60


@pytest.mark.usefixtures("meddling")
def test_stop_strings_across_groups() -> None:
    steps = steps_of("hamburger", "kernels")
    prompts = [[i, 5, 6] for i in range(6)]

    def llm(*, verified: bool) -> LLM:
        core = core_of(steps, max_model_len=CONTEXT, policy=free_rows(3) if verified else None)
        return LLM.from_core(core, fake_info(core.config), ByteTokenizer())

    greedy = params(max_tokens=30, ignore_eos=True, confidence=1.0, logprobs=1)
    plain = llm(verified=False).generate(prompts, greedy, progress=False)
    sizes = Counter[int]()
    for length in (1, 2, 4):
        asked = []
        for result in plain:
            printable = [t for t in result.token_ids if 32 <= t < 127] or [65]
            at = len(printable) // 2
            stop = bytes(printable[at : at + length]).decode()
            asked.append(replace(greedy, stop=(stop, "never"), min_tokens=length))
        wanted = llm(verified=False).generate(prompts, asked, progress=False)
        told = [
            replace(one, confidence=0.0, prediction_ids=(*result.token_ids,))
            for one, result in zip(asked, plain, strict=True)
        ]
        found = llm(verified=True).generate(prompts, told, progress=False)
        for mine, other in zip(found, wanted, strict=True):
            assert (mine.text, mine.token_ids, mine.logprobs) == (other.text, other.token_ids, other.logprobs)
            assert (mine.finish_reason, mine.stop_reason) == (other.finish_reason, other.stop_reason)
            sizes.update(map(len, mine.groups))
    assert max(sizes) > 3


def test_composed_groups_are_not_touched_by_what_verified_ones_need() -> None:
    """The same weights either way: only what is composed may differ from confidence 1."""
    steps, asked = steps_of("hamburger", "kernels"), requests("both")
    truth = unaided(steps, asked)
    seen = Counter[str]()
    composed = answers(core_of(steps, max_model_len=CONTEXT, grammars=GRAMMARS), asked, seen)
    assert not seen["drafted"]
    assert any(composed[name].token_ids != truth[name].token_ids for name in truth)


def test_params_of_the_cases_name_every_field() -> None:
    """A new field of SamplingParams wants a case here, or a word why it needs none."""
    asked = {name for fields in ASKED for name in fields} | {"confidence", "prediction_ids", "settle", "stop"}
    asked.add("n")  # each of n answers is a request of its own
    assert asked | {"skip_special_tokens", "include_stop_str_in_output"} == set(SamplingParams.__dataclass_fields__)
