"""LLM: how many requests run: seats, errors in the middle, results one by one. On scripted answers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

import hamburger.engine.llm as llm_module
from fake_engines import fake_config, fake_core, fake_info, make_llm
from fakes import EOS, ByteTokenizer, ScriptedRunner, scripted_logprobs
from hamburger.engine import LLM, SamplingParams
from hamburger.engine.grammar.writing import json_grammar
from hamburger.engine.request import RequestUpdate
from hamburger.engine.types.errors import InvalidRequest, OutOfMemory, QueueTimeout
from hamburger.engine.types.messages import StepOutputs
from hamburger.engine.types.sampling_params import ThinkingBudget
from reference import CONTEXT, expected, random_case


def test_a_long_list_is_fed_as_seats_come_free() -> None:
    runner = ScriptedRunner()
    config = fake_config(max_num_seqs=3, max_queue=1)
    core = fake_core(runner, config)
    llm = LLM.from_core(core, fake_info(config), ByteTokenizer())
    most_waiting, step = 0, core.step

    def watched() -> StepOutputs:
        nonlocal most_waiting
        outputs = step()
        core.check_integrity()
        assert outputs.stats is not None
        most_waiting = max(most_waiting, outputs.stats.num_waiting)
        return outputs

    core.step = watched  # type: ignore[method-assign]
    results = llm.generate([[i % 256] for i in range(2000)], SamplingParams(max_tokens=3), progress=False)
    assert [result.prompt_ids for result in results] == [[i % 256] for i in range(2000)]
    assert most_waiting == 0
    assert max(len(batch) for batch in runner.batches) == 3


def test_time_on_the_list_is_no_time_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(step=0.5)
    monkeypatch.setattr(llm_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    config = fake_config(max_num_seqs=1, max_queue_seconds=5)
    core = fake_core(ScriptedRunner(), config, clock=lambda: next(clock))
    results = LLM.from_core(core, fake_info(config), ByteTokenizer()).generate([[1]] * 20, progress=False)
    assert len(results) == 20


def test_a_request_that_memory_does_not_hold_raises() -> None:
    config = fake_config()
    core = fake_core(ScriptedRunner(out_of_memory=lambda step, batch: True), config)
    with pytest.raises(OutOfMemory, match="of this request alone"):
        LLM.from_core(core, fake_info(config), ByteTokenizer()).generate([[1, 2]], progress=False)
    assert not core.has_work


def test_a_request_that_waits_too_long_raises() -> None:
    config = fake_config(max_queue_seconds=5, max_num_seqs=2)
    core = fake_core(ScriptedRunner(), config, clock=lambda: 1e12)
    with pytest.raises(QueueTimeout, match="longer than the 5 s"):
        LLM.from_core(core, fake_info(config), ByteTokenizer()).generate([[1], [2]], progress=False)
    assert not core.has_work


def test_an_error_leaves_an_empty_engine() -> None:
    runner = ScriptedRunner({"0": [[97], [98], [EOS]]}, fail_at_step=2)
    llm = make_llm(runner)
    with pytest.raises(RuntimeError, match="scripted failure"):
        llm.generate([[1], [2]], progress=False)
    runner.fail_at_step = None
    assert llm.generate([[1]], progress=False)[0].text == "ab"


def test_an_interrupt_amid_scheduling_leaves_no_block_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    config = fake_config()
    core = fake_core(ScriptedRunner({"0": [[97], [EOS]]}), config)
    llm = LLM.from_core(core, fake_info(config), ByteTokenizer())
    blocks = core._scheduler.blocks

    def interrupted(*args: object, **kwargs: object) -> bool:
        blocks._free.pop()  # taken, and not yet given to anyone
        raise KeyboardInterrupt

    monkeypatch.setattr(blocks, "grow", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1], [2]], progress=False)
    assert llm.generate([[1]], progress=False)[0].text == "a"
    core.check_integrity()
    stats = core.step().stats
    assert stats is not None
    assert stats.used_slots == 0


def test_each_result_comes_as_it_finishes_and_its_seat_is_taken_at_once() -> None:
    runner = ScriptedRunner({str(i): [[97]] * n + [[EOS]] for i, n in enumerate([9, 1, 2, 0])})
    config = fake_config(max_num_seqs=2)
    llm = LLM.from_core(fake_core(runner, config), fake_info(config), ByteTokenizer())
    taken: list[int] = []

    def requests() -> Iterator[tuple[list[int], SamplingParams]]:
        for i in range(4):
            taken.append(i)
            yield [i], SamplingParams()

    updates = 0

    def count(_: RequestUpdate) -> None:
        nonlocal updates
        updates += 1

    each = llm.generate_each(requests(), count)
    index, result = next(each)
    assert (index, result.prompt_ids, result.text, taken) == (1, [1], "a", [0, 1])
    assert [(i, r.text) for i, r in each] == [(2, "aa"), (3, ""), (0, "a" * 9)]
    assert taken == [0, 1, 2, 3]
    assert updates == 2 + 3 + 1 + 10


def test_each_answer_is_that_of_generate() -> None:
    prompts = [[i] for i in range(50)]
    params = [SamplingParams(max_tokens=20, seed=i) for i in range(50)]
    each = dict(make_llm(ScriptedRunner()).generate_each(zip(prompts, params, strict=True)))
    assert [each[i] for i in range(50)] == make_llm(ScriptedRunner()).generate(prompts, params, progress=False)


def test_a_bad_request_among_many_is_named_when_it_is_reached() -> None:
    llm = make_llm(ScriptedRunner())
    with pytest.raises(InvalidRequest, match="empty") as caught:
        list(llm.generate_each((prompt, SamplingParams()) for prompt in ([1], [2], [])))
    assert caught.value.__notes__ == ["This is about prompt number 2, counted from 0."]
    assert len(llm.generate([[1]], progress=False)) == 1


def test_one_that_fails_in_the_engine_is_named() -> None:
    llm = make_llm(ScriptedRunner())
    asked = [([1], SamplingParams(max_tokens=2)), ([1], SamplingParams(max_tokens=2, grammar="x"))]
    with pytest.raises(InvalidRequest, match="The grammar cannot be used") as caught:
        list(llm.generate_each(asked))
    assert caught.value.__notes__ == ["This is about prompt number 1, counted from 0."]


def test_thoughts_that_must_end_with_a_forbidden_token_are_refused() -> None:
    llm, thinking = make_llm(ScriptedRunner()), ThinkingBudget(3, begin=None, end=30)
    with pytest.raises(InvalidRequest, match="end its thoughts") as caught:
        llm.generate([[1]], SamplingParams(thinking=thinking, stop_token_ids=(30,), min_tokens=2), progress=False)
    assert caught.value.param == "min_tokens"
    for harmless in ({"stop_token_ids": (30,)}, {"stop_token_ids": (31,), "min_tokens": 2}):
        params = SamplingParams(thinking=thinking, max_tokens=4, **harmless)
        assert len(llm.generate([[1]], params, progress=False)) == 1


def test_a_request_that_the_engine_loses_is_no_endless_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    config = fake_config()
    core = fake_core(ScriptedRunner(), config)
    monkeypatch.setattr(core, "add", lambda request: None)
    with pytest.raises(RuntimeError, match="ran out of work"):
        LLM.from_core(core, fake_info(config), ByteTokenizer()).generate([[1]], progress=False)


def test_an_iterator_that_is_closed_frees_the_engine() -> None:
    config = fake_config()
    core = fake_core(ScriptedRunner({"0": [[97]] * 50, "1": [[EOS]]}), config)
    llm = LLM.from_core(core, fake_info(config), ByteTokenizer())
    each = llm.generate_each([([1], SamplingParams()), ([2], SamplingParams())])
    assert next(each)[0] == 1
    with pytest.raises(RuntimeError, match="generating already"):
        llm.generate([[1]], progress=False)
    each.close()
    assert not core.has_work
    assert llm.generate([[1]], SamplingParams(max_tokens=2), progress=False)[0].text == "aa"


@pytest.mark.parametrize("num_blocks", [256, CONTEXT // 4])
def test_random_answers_equal_the_reference(num_blocks: int) -> None:
    draw = random.Random(num_blocks)
    cases = [random_case(draw) for _ in range(300)]
    llm = make_llm(ScriptedRunner({str(i): case.groups for i, case in enumerate(cases)}), num_blocks)
    results = llm.generate([case.prompt_ids for case in cases], [case.params for case in cases], progress=False)
    for case, result in zip(cases, results, strict=True):
        want = expected(case)
        got = (result.token_ids, result.text, result.finish_reason, result.stop_reason)
        assert got == (want.token_ids, want.text, want.finish_reason, want.stop_reason), case
        assert [token for group in result.groups for token in group] == result.token_ids
        assert result.kv_slots == len(result.groups)
        assert len(result.stop_probs) == len(result.token_ids)
        k = case.params.logprobs
        assert result.logprobs == (
            None if k is None else [scripted_logprobs(i, token, k) for i, token in enumerate(want.token_ids)]
        )


def test_a_grammar_shapes_the_answer() -> None:
    llm = make_llm(ScriptedRunner({"0": [[*b'{"a"'], [*b": 1} and more"]]}))
    [result] = llm.generate([[1]], SamplingParams(grammar=json_grammar()), progress=False)
    assert (result.text, result.finish_reason, result.kv_slots) == ('{"a": 1}', "stop", 2)


def test_a_grammar_that_cannot_be_is_refused_and_the_next_call_works() -> None:
    llm = make_llm(ScriptedRunner())
    with pytest.raises(InvalidRequest, match="Invalid type"):
        llm.generate([[1]], SamplingParams(grammar=json_grammar({"type": "foo"})), progress=False)
    assert len(llm.generate([[1]], SamplingParams(max_tokens=3, seed=0), progress=False)) == 1
