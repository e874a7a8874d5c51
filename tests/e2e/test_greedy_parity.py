"""The embedded default's trunk in float32: text at confidence 1 is that of transformers, alone and in a crowd.

And so is the text of verified groups, whatever is drafted. On the CPU kernels these have the bits of confidence 1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hamburger.engine import LLM, SamplingParams
from hamburger.engine.core.core import EngineCore
from hamburger.engine.drafting.costs import MeasuredCosts, StepCosts
from hamburger.model.checkpoints.load import load_checkpoint
from hamburger.model.checkpoints.sources import resolve_source
from peer import hugging_face, is_greedy
from slow_cases import slow

QUESTIONS = [
    "Name three colours.", "What is the capital of France?", "Write a haiku about rain.", "What is 12 + 30?",
    "Who wrote Hamlet?", "Give me a synonym of happy.", "Translate 'good morning' into Spanish.", "What is an atom?",
    "List two prime numbers.", "Why is the sky blue?", "Explain gravity to a child.", "Name a river in Egypt.",
    "What do bees make?", "Write a Python function that adds two numbers.", "How many days has a leap year?",
    "What is the opposite of cold?", "Tell me a short joke.", "Which planet is the largest?",
    "What is photosynthesis?", "Say hello in French.",
]  # fmt: skip
REPEATS = ["Repeat ten times: one two three four five.", "Write 'the sun is warm' on eight lines."]  # past their ends
NEW_TOKENS = 32


class FreeRows(StepCosts):
    """Every draft pays, whatever steps take here."""

    def observe(self, rows: int, num_micro_steps: int, num_drafting: int, milliseconds: float) -> None: ...


@pytest.fixture(scope="module")
def llm() -> LLM:
    free = MeasuredCosts((1, 2), (1.0, 1.0), (0.0, 0.0))  # nothing is drafted at confidence 1, and measuring takes 4 s
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hamburger.engine.build.measure_costs", lambda *_: free)
        return LLM(dtype="float32", max_model_len=256, kv_cache_memory=1 << 30)


@pytest.fixture(scope="module")
def peer() -> Any:
    checkpoint = load_checkpoint(resolve_source(None), torch.float32)
    trunk = {n: t for n, t in checkpoint.tensors.items() if n.startswith(("model.", "lm_head."))}
    return hugging_face(checkpoint.config, trunk)


def conversations(questions: list[str]) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": question}] for question in questions]


@pytest.mark.parametrize("questions", [QUESTIONS[:3], slow(QUESTIONS[3:])], ids=["3", "the other 17"])
def test_greedy_equals_transformers_on_20_prompts(llm: LLM, peer: Any, questions: list[str]) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, confidence=1.0)
    answers = llm.chat(conversations(questions), sampling, progress=False)
    for answer in answers:
        assert len(answer.token_ids) == NEW_TOKENS
        assert is_greedy(peer, answer.prompt_ids, answer.token_ids)


def test_prompt_logprobs_equal_transformers(llm: LLM, peer: Any) -> None:
    texts = [" ".join(QUESTIONS), *QUESTIONS[:4]]
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    for result in llm.generate(texts, asked, progress=False):
        with torch.inference_mode():
            rows = peer(torch.tensor([result.prompt_ids])).logits[0, :-1].log_softmax(-1)
        first, *entries = result.prompt_logprobs or []
        assert first is None
        for token_id, row, entry in zip(result.prompt_ids[1:], rows, entries, strict=True):
            assert entry is not None
            assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-3)
            [(likeliest, logprob)] = entry.top
            assert likeliest == int(row.argmax())
            assert logprob == pytest.approx(float(row.max()), abs=1e-3)


@pytest.mark.slow
def test_a_request_alone_and_among_31_others_gives_the_same_text(llm: LLM) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    crowd = conversations([f"{question} ({i})" for i in range(4) for question in QUESTIONS][:32])
    together = llm.chat(crowd, sampling, progress=False)
    for i in (0, 17, 31):
        assert llm.chat([crowd[i]], sampling, progress=False)[0].token_ids == together[i].token_ids


@pytest.mark.slow
def test_verified_groups_are_greedy_as_transformers_is(peer: Any) -> None:
    llm = LLM(dtype="float32", max_model_len=256, kv_cache_memory=1 << 30, groups="verified")
    assert (llm.info.groups, llm.info.default_confidence) == ("verified", 0.0)
    assert type(llm._core) is EngineCore  # which step comes next depends on what this one confirms
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for questions in (QUESTIONS, *([question] for question in QUESTIONS[:5])):
        for answer in llm.chat(conversations(questions), sampling, progress=False):
            assert len(answer.token_ids) == NEW_TOKENS
            assert is_greedy(peer, answer.prompt_ids, answer.token_ids)


@pytest.mark.slow
@pytest.mark.parametrize("model", [None, "builtin"])
def test_verified_groups_have_the_bits_of_confidence_1(model: str | None) -> None:
    """On the compiled kernels, where there are any: alone and together, greedy and sampled."""
    llm = LLM(model, max_model_len=512, kv_cache_memory=1 << 29, groups="verified")
    questions, several = [*QUESTIONS, *REPEATS], 0
    for temperature in (0.0, 0.7):
        asked = [
            SamplingParams(
                temperature=temperature,
                seed=i,
                max_tokens=48,
                confidence=1.0,
                logprobs=2 if i % 5 == 0 else None,
                ignore_eos=question in REPEATS,
            )
            for i, question in enumerate(questions)
        ]
        plain = llm.chat(conversations(questions), asked, progress=False)
        policy = llm._core._policy
        assert policy is not None
        free: StepCosts = FreeRows(MeasuredCosts((1, 2), (1.0, 1.0), (0.0, 0.0)))
        for costs in (policy._costs, {False: free, True: free}):
            policy._costs = costs
            told = [replace(one, confidence=0.0) for one in asked]
            found = llm.chat(conversations(questions), told, progress=False)
            found += [llm.chat([conversations(questions)[i]], told[i], progress=False)[0] for i in (0, 3, 5)]
            for mine, other in zip(found, [*plain, plain[0], plain[3], plain[5]], strict=True):
                assert (mine.text, mine.token_ids, mine.logprobs) == (other.text, other.token_ids, other.logprobs)
                several += sum(len(group) > 1 for group in mine.groups)
    assert several > (100 if model is None else 20)  # the base drafts by lookup alone
