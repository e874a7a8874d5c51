"""The whole path, streamed and not: every answer is the trimmed reference, wherever its groups are split."""

from __future__ import annotations

import asyncio
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from fake_engines import fake_config, fake_core, fake_engine, fake_info
from fakes import ByteTokenizer, ScriptedRunner, scripted_logprobs
from hamburger.engine import LLM
from hamburger.engine.request import GenerationRequest, RequestUpdate
from hamburger.engine.request_stream import RequestStream
from hamburger.engine.types.sampling_params import SamplingParams
from reference import CONTEXT, Case, expected, random_case


async def collect(stream: RequestStream) -> list[RequestUpdate]:
    return [update async for update in stream]


async def streamed(cases: list[Case], num_blocks: int = 256) -> list[list[RequestUpdate]]:
    runner = ScriptedRunner({str(i): case.groups for i, case in enumerate(cases)})
    async with fake_engine(runner, max_model_len=CONTEXT, num_blocks=num_blocks) as engine:
        streams = engine.submit([GenerationRequest(str(i), c.prompt_ids, c.params) for i, c in enumerate(cases)])
        return await asyncio.gather(*map(collect, streams))


def num_groups(groups: list[list[int]], num_tokens: int) -> int:
    """How many groups the first `num_tokens` tokens lie in."""
    lengths = [len(group) for group in groups]
    return next(n for n in range(1, len(groups) + 1) if sum(lengths[:n]) >= num_tokens)


@settings(max_examples=150)
@given(draw=st.randoms(use_true_random=False), num_cases=st.integers(1, 6))
def test_streamed_and_unstreamed_answers_are_the_trimmed_reference(draw: random.Random, num_cases: int) -> None:
    cases = [random_case(draw) for _ in range(num_cases)]
    answers = asyncio.run(streamed(cases))
    config = fake_config(max_model_len=CONTEXT)
    core = fake_core(ScriptedRunner({str(i): case.groups for i, case in enumerate(cases)}), config)
    llm = LLM.from_core(core, fake_info(config), ByteTokenizer())
    results = llm.generate([case.prompt_ids for case in cases], [case.params for case in cases], progress=False)
    for case, updates, result in zip(cases, answers, results, strict=True):
        want, last = expected(case), updates[-1]
        assert "".join(update.text for update in updates) == result.text == want.text
        assert [token for update in updates for token in update.token_ids] == result.token_ids == want.token_ids
        assert (last.finish_reason, last.stop_reason) == (result.finish_reason, result.stop_reason)
        assert (last.finish_reason, last.stop_reason) == (want.finish_reason, want.stop_reason)
        assert last.completion_tokens == len(want.token_ids)
        assert last.kv_slots == result.kv_slots == num_groups(case.groups, len(want.token_ids))
        k = case.params.logprobs
        logprobs = None if k is None else [scripted_logprobs(i, t, k) for i, t in enumerate(want.token_ids)]
        assert result.logprobs == logprobs
        assert [x for update in updates for x in update.logprobs or ()] == (logprobs or [])


def test_where_groups_are_split_never_changes_an_answer() -> None:
    """One text under all 512 ways to split it, against stop strings that end inside, at and across splits."""
    tokens = list("aab→b é".encode())
    params = SamplingParams(max_tokens=len(tokens), stop=("b é", "→b"), seed=0)
    splits = [[i for i in range(1, len(tokens)) if mask >> i & 1] for mask in range(0, 2 ** len(tokens), 2)]
    cases = [
        Case([1], params, [tokens[i:j] for i, j in zip([0, *split], [*split, len(tokens)], strict=True)])
        for split in splits
    ]
    config = fake_config(max_model_len=CONTEXT, max_group=len(tokens))
    core = fake_core(ScriptedRunner({str(i): case.groups for i, case in enumerate(cases)}), config)
    llm = LLM.from_core(core, fake_info(config), ByteTokenizer())
    results = llm.generate([[1]] * len(cases), params, progress=False)
    assert {(r.text, tuple(r.token_ids), r.stop_reason) for r in results} == {("aab", tuple(b"aab\xe2\x86\x92b"), "→b")}
    assert [r.kv_slots for r in results] == [num_groups(case.groups, 7) for case in cases]


async def test_a_tiny_pool_with_fifty_arrivals_gives_the_answers_of_a_large_one() -> None:
    draw = random.Random(7)
    cases = [random_case(draw) for _ in range(50)]
    large = await streamed(cases, num_blocks=4096)
    tiny = await streamed(cases, num_blocks=CONTEXT // 4)
    assert tiny == large
    assert all(updates[-1].finish_reason for updates in tiny)
