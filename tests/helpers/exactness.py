"""Requests of every kind, drafts that meddle, and answers to compare: for tests that verified groups change no text."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from fakes import EOS, VOCAB_SIZE, ByteTokenizer
from hamburger.engine.core.core import EngineCore
from hamburger.engine.drafting.proposal import Proposal
from hamburger.engine.grammar.matching import Grammars
from hamburger.engine.grammar.writing import choice_grammar, json_grammar, regex_grammar
from hamburger.engine.types.messages import GroupOutput, SubmitRequest, TokenLogprobs
from hamburger.engine.types.sampling_params import ThinkingBudget
from hamburger.model.assemble import assemble
from hamburger.model.config import GraftConfig, ModelConfig
from hamburger.model.cpu.library import load_kernels
from hamburger.model.execution import Execution
from hamburger.model.steps import EagerSteps
from native_models import WIDE
from playing import play
from small_models import CPU, core_of, graft_config, params, random_tensors, trunk_config

CONTEXT = 64
GRAFTS: dict[str, GraftConfig | None] = {
    "hamburger": graft_config(),
    "short_list": graft_config(features="fused", micro_norm=True, short_list_size=100, stop_bias=(-2.0, 0.3, 0.0, 0.0)),
    "plain_base": None,
}
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
    {"allowed_token_ids": (*range(40, 80), EOS), "temperature": 1.2, "seed": 14, "logprobs": 2},
    {"allowed_token_ids": tuple(range(0, VOCAB_SIZE, 5)), "repetition_penalty": 1.3},
    {"bad_words": (*((i,) for i in range(0, VOCAB_SIZE, 3)), *((i, i + 1) for i in range(VOCAB_SIZE - 1)))},
    {"bad_words": tuple((i, j) for i in range(60) for j in range(60, 100)), "temperature": 1.0, "seed": 15},
    {"thinking": ThinkingBudget(5, None, 7)},
    {"thinking": ThinkingBudget(2, 9, 7), "temperature": 1.0, "seed": 16, "allowed_token_ids": (7, 8, 9, 10)},
    {"grammar": regex_grammar("[a-e]{3,12}"), "bad_words": ((97,), (98, 99))},
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

    def extend(self, token_ids: Sequence[int]) -> list[tuple[Proposal, int]]:
        self._at += len(token_ids)
        return []

    def best(self, micro: Proposal | None, most: int, least: float, corrected: object, looks: bool) -> Proposal | None:
        del least, corrected, looks  # a wrong draft is what it is for
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


def unaided(steps: EagerSteps, asked: list[SubmitRequest]) -> dict[str, Answer]:
    """The answers at confidence 1, of composed groups."""
    core = core_of(steps, max_model_len=CONTEXT, grammars=GRAMMARS)
    return answers(core, asking(asked, confidence=1.0), Counter(), at_once=len(asked))


def foretold(asked: list[SubmitRequest], truth: dict[str, Answer]) -> list[SubmitRequest]:
    """With the answer as the prediction."""
    return [replace(r, params=replace(r.params, prediction_ids=(*truth[r.request_id].token_ids,))) for r in asked]
