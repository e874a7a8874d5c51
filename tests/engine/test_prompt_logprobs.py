"""Prompt log-probabilities through scheduler, core and both clients, on a scripted runner: each once, none lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_engines import fake_config, fake_core, fake_engine, fake_info
from fakes import EOS, ByteTokenizer, ScriptedRunner, scripted_score
from hamburger.engine import LLM
from hamburger.engine.core.batch import BatchResult, ScheduledBatch
from hamburger.engine.core.core import EngineCore
from hamburger.engine.request import GenerationRequest, RequestUpdate, resolve_request
from hamburger.engine.request_stream import RequestStream
from hamburger.engine.types.errors import ContextOverflow, InvalidRequest, NeverFits, PromptTooLong
from hamburger.engine.types.messages import GroupOutput, StepStats, SubmitRequest, TokenLogprobs
from hamburger.engine.types.sampling_params import SamplingParams


def still() -> float:
    return 0.0


def scripted(prompt_ids: list[int], k: int) -> list[TokenLogprobs | None]:
    """What ScriptedRunner says of a prompt."""
    return [None, *(scripted_score(i, token_id, k) for i, token_id in enumerate(prompt_ids) if i)]


def asking(k: int | None = 2, max_tokens: int = 3, **fields: Any) -> SamplingParams:
    return SamplingParams(prompt_logprobs=k, max_tokens=max_tokens, seed=1, **fields)


def play(core: EngineCore, requests: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, list[GroupOutput]]:
    outputs: dict[str, list[GroupOutput]] = {name: [] for name in requests}
    for name, (prompt_ids, params) in requests.items():
        core.add(SubmitRequest(name, prompt_ids, params, 0.0))
    while core.has_work:
        step = core.step()
        core.check_integrity()
        for output in step.outputs:
            outputs[output.request_id].append(output)
    return outputs


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("slots_a_step", range(1, 13))
def test_every_chunk_size(slots_a_step: int, max_tokens: int) -> None:
    prompt = list(range(40, 51))
    runner = ScriptedRunner({"a": [[1], [2], [3]]})
    core = fake_core(runner, fake_config(max_num_seqs=1, max_num_batched_slots=slots_a_step), still)
    first, *others = play(core, {"a": (prompt, asking(max_tokens=max_tokens))})["a"]
    assert first.prompt_logprobs == scripted(prompt, 2)
    assert [output.prompt_logprobs for output in others] == [None] * max(max_tokens - 1, 0)
    assert runner.num_scored == 10
    assert runner.num_steps == -(-11 // slots_a_step) + max(max_tokens - 1, 0)


def test_a_request_for_the_prompt_alone_ends_with_it() -> None:
    runner = ScriptedRunner({"b": [[1, 2], [EOS]]})
    core = fake_core(runner, fake_config(max_num_batched_slots=8), still)
    core.add(SubmitRequest("a", [5] * 12, asking(max_tokens=0, logprobs=1), 0.0))
    core.add(SubmitRequest("b", [6] * 2, asking(None), 0.0))
    assert core.step().outputs == []
    step = core.step()
    done, group = step.outputs
    assert done == GroupOutput("a", [], [], [], "length", None, 0.0, scripted([5] * 12, 2))
    assert (group.request_id, group.token_ids, group.prompt_logprobs) == ("b", [1, 2], None)
    assert step.stats == StepStats(
        num_running=1, num_waiting=0, num_preemptions=0, used_slots=4, total_slots=1024, prompt_slots=6,
        decoded_sequences=1, group_sizes=[2], seconds=0.0, generated_slots=1,
    )  # fmt: skip
    core.check_integrity()
    assert runner.batches == [[("a", 8, False)], [("a", 4, False), ("b", 2, True)]]


@pytest.mark.parametrize("max_tokens", [0, 8])
def test_a_preemption_amid_the_prompt_neither_loses_nor_repeats_any(max_tokens: int) -> None:
    runner = ScriptedRunner({"a": [[i] for i in range(8)], "b": [[i] for i in range(8)]})
    config = fake_config(num_blocks=5, max_model_len=20, max_num_seqs=2, max_num_batched_slots=2)
    core = fake_core(runner, config, still)
    a, b = [1, 2, 3], list(range(60, 72))
    core.add(SubmitRequest("a", a, asking(0, max_tokens=8), 0.0))
    core.add(SubmitRequest("b", b, asking(1, max_tokens=max_tokens), 0.0))
    outputs: list[GroupOutput] = []
    scored_at_preemption = None
    while core.has_work:
        before = runner.num_scored
        step = core.step()
        outputs += step.outputs
        assert step.stats is not None
        if step.stats.num_preemptions:
            scored_at_preemption = before - (len(a) - 1)
    assert scored_at_preemption is not None
    assert 0 < scored_at_preemption < len(b) - 1
    given = {o.request_id: o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None}
    assert given == {"a": scripted(a, 0), "b": scripted(b, 1)}
    assert sum(o.prompt_logprobs is not None for o in outputs) == 2
    assert runner.num_scored == len(a) - 1 + len(b) - 1


@settings(max_examples=200)
@given(
    requests=st.lists(
        st.tuples(
            st.lists(st.integers(0, 255), min_size=1, max_size=20),
            st.sampled_from([None, 0, 1, 3]),
            st.integers(0, 20),
        ),
        min_size=1,
        max_size=8,
    ),
    block_size=st.sampled_from([1, 3, 4]),
    spare_blocks=st.integers(0, 6),
    max_num_seqs=st.integers(1, 5),
    spare_slots=st.integers(0, 12),
)
def test_chunks_and_memory_never_change_them(
    requests: list[tuple[list[int], int | None, int]],
    block_size: int,
    spare_blocks: int,
    max_num_seqs: int,
    spare_slots: int,
) -> None:
    asked = {
        str(i): (prompt_ids, asking(k, max_tokens=max_tokens if k is not None else max_tokens + 1))
        for i, (prompt_ids, k, max_tokens) in enumerate(requests)
    }
    config = fake_config(
        max_model_len=42,
        block_size=block_size,
        num_blocks=-(-42 // block_size) + spare_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_slots=max_num_seqs + spare_slots,
    )
    runner = ScriptedRunner(eos_chance=0.02)
    outputs = play(fake_core(runner, config, still), asked)
    for name, (prompt_ids, params) in asked.items():
        k = params.prompt_logprobs
        first, *others = outputs[name]
        assert first.prompt_logprobs == (None if k is None else scripted(prompt_ids, k))
        assert all(output.prompt_logprobs is None for output in others)
        assert outputs[name][-1].finish_reason is not None
        if params.max_tokens == 0:
            assert [output.token_ids for output in outputs[name]] == [[]]
    scored = [prompt_ids for prompt_ids, params in asked.values() if params.prompt_logprobs is not None]
    assert runner.num_scored == sum(len(prompt_ids) - 1 for prompt_ids in scored)


class Forgetful(ScriptedRunner):
    """Loses the last entry of what it found out about each prompt."""

    def run(self, batch: ScheduledBatch) -> BatchResult:
        result = super().run(batch)
        return BatchResult(result.groups, {name: entries[:-1] for name, entries in result.prompt_logprobs.items()})


def test_a_runner_that_loses_an_entry_is_an_error() -> None:
    core = fake_core(Forgetful(), clock=still)
    with pytest.raises(RuntimeError, match=r"2 prompt log-probabilities.*range\(1, 4\)"):
        play(core, {"a": ([1, 2, 3, 4], asking())})


def test_llm_gives_them_aligned_with_the_prompt() -> None:
    config = fake_config()
    runner = ScriptedRunner({"0": [[97, 98], [99]], "2": [[100], [EOS]]})
    llm = LLM.from_core(fake_core(runner, config), fake_info(config), ByteTokenizer())
    prompts = [[5, 6, 7], [8], [9, 10]]
    asked = [asking(3), asking(0, max_tokens=0), asking(None)]
    scored, alone, plain = llm.generate(prompts, asked, progress=False)
    assert scored.prompt_logprobs == scripted([5, 6, 7], 3)
    assert (scored.text, scored.groups, scored.kv_slots) == ("abc", [[97, 98], [99]], 2)
    assert (alone.prompt_logprobs, alone.text, alone.token_ids, alone.groups) == ([None], "", [], [])
    assert (alone.finish_reason, alone.kv_slots, alone.tokens_per_kv) == ("length", 0, 0.0)
    assert plain.prompt_logprobs is None


async def collect(stream: RequestStream) -> list[RequestUpdate]:
    return [update async for update in stream]


async def test_the_first_update_brings_them_and_32_at_once_do() -> None:
    prompts = [[i] * (1 + 5 * i) for i in range(32)]
    async with fake_engine(ScriptedRunner(), max_num_batched_slots=16) as engine:
        requests = [GenerationRequest(str(i), p, asking(i % 3, max_tokens=i % 4)) for i, p in enumerate(prompts)]
        answers = await asyncio.gather(*map(collect, engine.submit(requests)))
    for i, (prompt_ids, updates) in enumerate(zip(prompts, answers, strict=True)):
        assert updates[0].prompt_logprobs == scripted(prompt_ids, i % 3)
        assert all(update.prompt_logprobs is None for update in updates[1:])
        assert updates[-1].completion_tokens <= i % 4
        if i % 4 == 0:
            assert [(u.token_ids, u.finish_reason, u.kv_slots, u.text) for u in updates] == [([], "length", 0, "")]


@pytest.mark.parametrize("fields", [{"max_tokens": 0}, {"prompt_logprobs": -1}, {"prompt_logprobs": 21}])
def test_what_no_request_may_ask(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**fields)
    assert caught.value.param == next(iter(fields))


def test_a_prompt_alone_may_fill_the_context() -> None:
    def ask(num_tokens: int, max_tokens: int | None, total_slots: int = 16) -> SubmitRequest:
        info = fake_info(fake_config(max_model_len=16, num_blocks=4), total_slots=total_slots)
        params = SamplingParams(prompt_logprobs=0, max_tokens=max_tokens)
        return resolve_request(GenerationRequest("r", [1] * num_tokens, params), info, 0.0)

    assert ask(16, 0).params.max_tokens == 0
    assert ask(15, None).params.max_tokens == 1
    with pytest.raises(PromptTooLong):
        ask(17, 0)
    for max_tokens in (1, None):
        with pytest.raises(PromptTooLong):
            ask(16, max_tokens)
    with pytest.raises(ContextOverflow):
        ask(15, 2)
    with pytest.raises(NeverFits):
        ask(16, 0, total_slots=15)
