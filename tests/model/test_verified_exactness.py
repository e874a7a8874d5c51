"""Verified groups on real models: every answer is that of confidence 1, whatever is drafted and whoever is beside it.

Token by token in float32; with the CPU kernels each log-probability has the same bits too.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fakes import EOS, VOCAB_SIZE, ByteTokenizer, fake_info
from hamburger.engine import LLM
from hamburger.engine.core.core import EngineCore
from hamburger.engine.drafting.proposal import Proposal
from hamburger.engine.text.grammar import Grammars, choice_grammar, json_grammar, regex_grammar
from hamburger.engine.types.messages import GroupOutput, SubmitRequest, TokenLogprobs
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.model.assemble import assemble
from hamburger.model.batch import ForwardBatch, StepOutput
from hamburger.model.config import GraftConfig, ModelConfig
from hamburger.model.cpu.backend import CpuEmission
from hamburger.model.cpu.library import load_kernels
from hamburger.model.execution import Execution
from hamburger.model.steps import EagerSteps
from native_models import WIDE
from playing import play
from slow_cases import slow_but
from small_models import CPU, core_of, graft_config, params, random_tensors, trunk_config
from verified import free_rows, policy_of

CONTEXT = 64
GRAFTS: dict[str, GraftConfig | None] = {
    "hamburger": graft_config(),
    "short_list": graft_config(features="fused", micro_norm=True, short_list_size=100, stop_bias=(-2.0, 0.3, 0.0, 0.0)),
    "plain_base": None,
}
FORMS = ("kernels", "torch", "static")
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "n": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["kind", "n", "ok"],
    "additionalProperties": False,
}
GRAMMARS = Grammars(ByteTokenizer, VOCAB_SIZE, (EOS,))
# Each is asked with a prompt of its own.
ASKED: list[dict[str, Any]] = [
    {},
    {"logprobs": 0},
    {"logprobs": 5, "prompt_logprobs": 2},
    {"prompt_logprobs": 0, "max_tokens": 0},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 1.3, "seed": 2, "logprobs": 3},
    {"temperature": 0.9, "seed": 3, "top_k": 5},
    {"temperature": 0.9, "seed": 4, "top_p": 0.8},
    {"temperature": 1.5, "seed": 5, "min_p": 0.1},
    {"temperature": 0.5, "seed": 6, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "logprobs": 2},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.9, "logprobs": 2},
    {"repetition_penalty": 1.4},
    {"temperature": 0.8, "seed": 7, "presence_penalty": -1.0, "frequency_penalty": 0.5, "repetition_penalty": 0.8},
    {"logit_bias": {9: 100.0}, "max_tokens": 9},
    {"logit_bias": dict.fromkeys(range(0, VOCAB_SIZE, 2), -100.0), "temperature": 0.6, "seed": 8},
    {"logit_bias": {EOS: 3.5}, "min_tokens": 6, "temperature": 1.0, "seed": 9},
    {"logit_bias": {EOS: 4.0}, "ignore_eos": True},
    {"logit_bias": {EOS: 4.0}, "temperature": 1.0, "seed": 10},
    {"stop_token_ids": tuple(range(0, VOCAB_SIZE, 7)), "min_tokens": 5},
    {"stop_token_ids": tuple(range(0, VOCAB_SIZE, 31)), "temperature": 1.0, "seed": 11},
    {"grammar": json_grammar(SCHEMA)},
    {"grammar": json_grammar(SCHEMA), "temperature": 1.0, "seed": 12, "logprobs": 2},
    {"grammar": choice_grammar(["yes", "no", "perhaps not"]), "temperature": 2.0, "seed": 13},
    {"grammar": regex_grammar("[a-c]{3,9}x?"), "presence_penalty": 0.5},
    {"temperature": 1.0, "seed": 20},
    {"temperature": 1.0, "seed": 21},
]  # fmt: skip


def steps_of(name: str, form: str) -> EagerSteps:
    config = ModelConfig(
        trunk=trunk_config(vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,), **WIDE),
        graft=GRAFTS[name],
        adapter_rank=32 if name == "hamburger" else 0,
    )
    execution = {
        "kernels": Execution(kernels=load_kernels()),
        "torch": Execution(static_shapes=False),
        "static": Execution(static_shapes=True, packed=False),
    }[form]
    if form == "kernels" and execution.kernels is None:
        pytest.skip("built without a compiler, or for another processor")
    tensors = random_tensors(config, 5)
    return assemble(config, tensors, dtype=torch.float32, device=CPU, max_positions=CONTEXT, execution=execution)


def requests(prompts: str = "shared") -> list[SubmitRequest]:
    draw = random.Random(prompts)
    beginning = [draw.randrange(VOCAB_SIZE) for _ in range(9)]
    found = []
    for i, fields in enumerate(ASKED):
        prompt = [draw.randrange(VOCAB_SIZE) for _ in range(draw.choice([1, 3, 20]))]
        prompt = beginning + prompt if i % 3 == 0 else prompt
        if i >= len(ASKED) - 2:  # two choices of one prompt
            prompt = beginning
        asked = params(**{"max_tokens": 26, "confidence": 0.0, **fields})
        found.append(SubmitRequest(str(i), prompt, asked, 0.0, priority=draw.choice([0, 0, 1])))
    return found


def asking(requests: Iterable[SubmitRequest], **changes: Any) -> list[SubmitRequest]:
    return [replace(r, params=replace(r.params, **changes)) for r in requests]


@dataclass
class Answer:
    """All that a client sees of an answer, however it was cut into groups."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs | None] | None
    end: tuple[str | None, int | None]


def answer(outputs: Sequence[GroupOutput]) -> Answer:
    first, last = outputs[0], outputs[-1]
    return Answer(
        [token_id for output in outputs for token_id in output.token_ids],
        [entry for output in outputs for entry in output.logprobs or []],
        first.prompt_logprobs,
        (last.finish_reason, last.stop_token_id),
    )


def answers(core: EngineCore, asked: list[SubmitRequest], seen: Counter[str], at_once: int = 4) -> dict[str, Answer]:
    played = play(core, asked, at_once=at_once)
    seen.update(played.seen)
    for outputs in played.outputs.values():
        for output in outputs:
            if output.drafts is not None:
                drafted, accepted = len(output.drafts.token_ids), output.drafts.num_accepted
                seen.update(drafted=drafted, accepted=accepted, rejected=drafted > accepted)
                seen[output.drafts.drafter] += 1
    return {name: answer(outputs) for name, outputs in played.outputs.items()}


def numbers(found: Answer) -> list[float]:
    entries = [*found.logprobs, *(entry for entry in found.prompt_logprobs or [] if entry is not None)]
    return [value for entry in entries for value in (entry.logprob, *(p for _, p in entry.top))]


def assert_same(found: dict[str, Answer], wanted: dict[str, Answer], *, to_the_bit: bool) -> None:
    assert found.keys() == wanted.keys()
    for name, other in wanted.items():
        mine = found[name]
        assert (mine.token_ids, mine.end) == (other.token_ids, other.end), ASKED[int(name)]
        if to_the_bit:
            assert mine == other, ASKED[int(name)]
        else:
            assert numbers(mine) == pytest.approx(numbers(other), abs=1e-4), ASKED[int(name)]


class Meddling:
    """In the place of AnswerDrafts: drafts the true answer, which it is given as a prediction, cut, shifted or spoiled
    at random places; now and then what the micro decoder says, or nothing."""

    needs_micro = True

    def __init__(self, prompt_ids: Sequence[int], prediction_ids: Sequence[int]) -> None:
        self._truth, self._at, self._draw = [*prediction_ids], 0, random.Random(f"{prompt_ids}")

    def extend(self, token_ids: Sequence[int]) -> None:
        self._at += len(token_ids)

    def observe(self, *checked: object) -> None:
        """It learns nothing."""

    def best(self, micro: Proposal | None, most: int) -> Proposal | None:
        draw = self._draw
        kind = draw.random()
        if kind < 0.2:
            return micro.first(most) if micro is not None else None
        if kind < 0.3:
            return None
        at = self._at + (kind < 0.35)
        found = self._truth[at : at + draw.randint(1, most)] or [draw.randrange(VOCAB_SIZE)]
        if kind > 0.65:
            found[draw.randrange(len(found))] = draw.choice([draw.randrange(VOCAB_SIZE), EOS, self._truth[-1]])
        return Proposal("prediction", found, [0.9] * len(found))


@pytest.fixture
def meddling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hamburger.engine.core.sequence.AnswerDrafts", Meddling)


def unaided(steps: EagerSteps, asked: list[SubmitRequest]) -> dict[str, Answer]:
    """The answers at confidence 1, of composed groups."""
    core = core_of(steps, max_model_len=CONTEXT, grammars=GRAMMARS)
    return answers(core, asking(asked, confidence=1.0), Counter(), at_once=len(asked))


def foretold(asked: list[SubmitRequest], truth: dict[str, Answer]) -> list[SubmitRequest]:
    """With the answer as the prediction."""
    return [replace(r, params=replace(r.params, prediction_ids=(*truth[r.request_id].token_ids,))) for r in asked]


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


@pytest.mark.parametrize("name", ["hamburger", "short_list"])
@pytest.mark.usefixtures("meddling")
def test_one_call_of_the_kernels_and_its_parts_check_and_draft_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, seen, calls = steps_of(name, "kernels"), Counter[str](), Counter[bool]()
    plain = [
        request
        for request in requests("one call")
        if not request.params.grammar and request.params.logprobs is None and not request.params.logit_bias
        if request.params.repetition_penalty == 1 and not request.params.presence_penalty and request.params.max_tokens
        if not request.params.min_tokens and request.params.prompt_logprobs is None
    ]
    emit = CpuEmission.emit

    def counted(self: CpuEmission, states: Tensor, features: list[Tensor], batch: ForwardBatch) -> StepOutput:
        calls[batch.checks is not None and bool((batch.checks >= 0).any()) and batch.max_group_limit > 1] += 1
        return emit(self, states, features, batch)

    monkeypatch.setattr(CpuEmission, "emit", counted)
    truth = unaided(steps, plain)
    told = foretold(plain, truth)
    found = []
    for asked in (told, asking(told, logprobs=1)):
        core = core_of(steps, max_model_len=CONTEXT, policy=free_rows(3))
        outputs = play(core, asked, at_once=3).outputs
        found.append({name: [o.drafts for o in groups if o.drafts is not None] for name, groups in outputs.items()})
        if asked is told:
            assert_same({name: answer(groups) for name, groups in outputs.items()}, truth, to_the_bit=True)
            assert calls[True] > 10
            calls.clear()
    assert not calls  # log-probabilities: such batches go by parts
    for name, drafts in found[0].items():
        # Chances are rounded otherwise, and decide how many drafts there are; the first ones come from the same state.
        for one, other in zip(drafts[:1], found[1][name][:1], strict=True):
            both = min(len(one.token_ids), len(other.token_ids))
            assert one.token_ids[:both] == other.token_ids[:both]
            assert one.chances[:both] == pytest.approx(other.chances[:both], abs=0.01)
            seen[one.drafter] += 1
    assert min(seen["micro"], seen["prediction"]) > 1


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
        (0.0, 0.1, free_rows(steps.config.max_group - 1)),
        (0.9, 0.4, policy_of([1.0, 1.1, 1.2, 1.3, 1.4, 3.0, 5.0], steps.config.max_group - 1, 0.05)),
    ):
        told = asking([predicted(request, share) for request in asked], confidence=confidence)
        core = core_of(steps, max_model_len=CONTEXT, grammars=GRAMMARS, policy=policy)
        assert_same(answers(core, told, seen), truth, to_the_bit=True)
    assert seen["prediction"] > 50
    assert seen["lookup"] > 3
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
    asked = {name for fields in ASKED for name in fields} | {"confidence", "prediction_ids", "stop"}
    assert asked | {"skip_special_tokens"} == set(SamplingParams.__dataclass_fields__)
