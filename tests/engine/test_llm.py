"""LLM: the offline API, on scripted answers."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest

import hamburger.engine.llm as llm_module
from drafting import DraftingRunner
from fake_engines import fake_config, fake_core, fake_info
from fakes import BOS, EOS, ByteTokenizer, ScriptedRunner, scripted_logprobs
from hamburger.engine import LLM, SamplingParams
from hamburger.engine.grammar.writing import json_grammar
from hamburger.engine.request import DraftCounts, RequestUpdate
from hamburger.engine.types.config import ENGINE_SETTINGS, EngineArgs
from hamburger.engine.types.errors import InvalidRequest, OutOfMemory, QueueTimeout
from hamburger.engine.types.messages import StepOutputs, SubmitRequest
from hamburger.engine.types.sampling_params import ThinkingBudget
from hamburger.model.config import ConfigError
from reference import CONTEXT, expected, random_case


def make_llm(runner: ScriptedRunner, num_blocks: int = 256) -> LLM:
    config = fake_config(max_model_len=CONTEXT, num_blocks=num_blocks)
    return LLM.from_core(fake_core(runner, config), fake_info(config), ByteTokenizer())


def test_results_come_in_the_order_of_the_prompts() -> None:
    runner = ScriptedRunner({"0": [[104], [105, 32, 106], [EOS]], "1": [[EOS]], "2": [[120, 121, 122]]})
    results = make_llm(runner).generate(["ab", "c", "d"], SamplingParams(max_tokens=5, stop=("y",)), progress=False)
    assert [result.text for result in results] == ["hi j", "", "x"]
    first, second, third = results
    assert first.prompt_ids == [BOS, 97, 98]
    assert first.groups == [[104], [105, 32, 106], [EOS]]
    assert (first.token_ids, first.kv_slots) == ([104, 105, 32, 106, EOS], 3)
    assert first.tokens_per_kv == pytest.approx(5 / 3)
    assert (first.macro_steps, first.tokens_per_step, first.drafts) == (3, first.tokens_per_kv, DraftCounts())
    assert (first.finish_reason, first.stop_reason, first.logprobs) == ("stop", None, None)
    assert second.token_ids == [EOS]
    assert (third.token_ids, third.finish_reason, third.stop_reason) == ([120, 121], "stop", "y")


def test_prompts_and_params_in_all_their_forms() -> None:
    llm = make_llm(ScriptedRunner({"0": [[97, 98, 99]], "1": [[97, 98, 99]]}))
    [one] = llm.generate("x", SamplingParams(max_tokens=2), progress=False)
    assert (one.text, one.finish_reason) == ("ab", "length")
    both = llm.generate([[5], [6, 7]], [SamplingParams(max_tokens=n) for n in (1, 3)], progress=False)
    assert [(r.prompt_ids, r.text) for r in both] == [([5], "a"), ([6, 7], "abc")]
    assert llm.generate([], progress=False) == []
    for too_few in ([SamplingParams()], []):
        with pytest.raises(ValueError, match=f"2 prompts came with {len(too_few)}"):
            llm.generate([[5], [6]], too_few)


def test_the_text_of_a_prompt_goes_on_and_that_of_a_chat_begins() -> None:
    class SpaceCutting(ByteTokenizer):
        def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
            return super().token_bytes(token_id).removeprefix(b" " if first else b"")

    config = fake_config(max_model_len=CONTEXT)
    core = fake_core(ScriptedRunner({"0": [[32, 97], [EOS]]}), config)
    llm = LLM.from_core(core, fake_info(config), SpaceCutting())
    chat = [{"role": "user", "content": "x"}]
    assert [result.text for result in llm.generate(["x"], progress=False)] == [" a"]
    assert [result.text for result in llm.chat(chat, progress=False)] == ["a"]
    assert [result.text for result in llm.chat(chat, progress=False, continue_final_message=True)] == [" a"]


def verified_llm(text: str, micro: dict[int, str]) -> LLM:
    config = fake_config(max_model_len=CONTEXT, groups="verified", max_group=8)
    core = fake_core(DraftingRunner(text, micro), config)
    return LLM.from_core(core, fake_info(config, default_confidence=0.0), ByteTokenizer())


def test_verified_groups_are_macro_steps_whose_tokens_have_slots_of_their_own() -> None:
    llm = verified_llm("abcdef", {1: "bcX"})
    whole, cut = llm.generate(
        [[5], [5]], [SamplingParams(max_tokens=6), SamplingParams(max_tokens=6, stop=("b",))], progress=False
    )
    assert (whole.text, whole.groups) == ("abcdef", [[97], [98, 99, 100], [101], [102]])
    assert (whole.kv_slots, whole.macro_steps, whole.tokens_per_kv, whole.tokens_per_step) == (6, 4, 1.0, 1.5)
    assert whole.drafts == DraftCounts(drafted=3, accepted=2)
    assert (cut.text, cut.groups, cut.kv_slots, cut.macro_steps) == ("a", [[97], [98]], 2, 2)
    assert cut.drafts == DraftCounts(drafted=3, accepted=1)


def test_a_prediction_is_drafted_from_and_counted_by_itself() -> None:
    llm, prediction = verified_llm("abcdefgh", {}), tuple(b"abcdefgh")
    [result] = llm.generate("x", SamplingParams(max_tokens=8, prediction_ids=prediction), progress=False)
    assert (result.text, result.macro_steps) == ("abcdefgh", 2)
    assert result.drafts == DraftCounts(6, 6, drafted_of_prediction=6, accepted_of_prediction=6)


@pytest.mark.parametrize(
    ("ids", "says"),
    [((1,) * (CONTEXT + 1), "the prediction has"), ((999,), "prediction_ids holds the token id 999"), ((-1,), "-1")],
)
def test_a_wrong_prediction_is_named(ids: tuple[int, ...], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        verified_llm("a", {}).generate("x", SamplingParams(prediction_ids=ids), progress=False)
    assert caught.value.param == "prediction_ids"


def test_composed_groups_take_no_prediction() -> None:
    with pytest.raises(InvalidRequest, match="--groups verified"):
        make_llm(ScriptedRunner()).generate("x", SamplingParams(prediction_ids=(1,)), progress=False)


@pytest.mark.parametrize("stop", [("bc",), ["bc"], "bc"])
def test_stop_strings_are_a_tuple_a_list_or_one_text(stop: Any) -> None:
    [result] = make_llm(ScriptedRunner({"0": [[97], [98], [99], [100]]})).generate(
        ["x"], SamplingParams(max_tokens=4, stop=stop), progress=False
    )
    assert (result.text, result.stop_reason) == ("a", "bc")
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]


def test_chat_applies_the_template() -> None:
    llm = make_llm(ScriptedRunner({"0": [[97], [EOS]], "1": [[98], [EOS]]}))
    hello, bye = [{"role": "user", "content": "hello"}], [{"role": "user", "content": "bye"}]
    [one] = llm.chat(hello, progress=False)
    assert (bytes(one.prompt_ids), one.text) == (b"user: hello\nassistant: ", "a")
    assert one.prompt == "user: hello\nassistant: "
    several = llm.chat([hello, bye], progress=False, add_generation_prompt=False)
    assert [bytes(result.prompt_ids) for result in several] == [b"user: hello\n", b"user: bye\n"]


@pytest.mark.parametrize("name", ["chat_template_kwargs", "chat_template", "use_tqdm", "lora_request"])
def test_arguments_of_vllm_are_no_variables_of_a_template_that_ignores_them(name: str) -> None:
    given: dict[str, Any] = {name: {}}
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}': "):
        make_llm(ScriptedRunner()).chat([{"role": "user", "content": "hello"}], **given)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("ab", "ab"),
        ([BOS, 97, 98], None),
        ({"prompt": "ab"}, "ab"),
        ({"prompt_token_ids": [BOS, 97, 98], "prompt": None}, None),
    ],
)
def test_a_prompt_is_a_text_or_ids_alone_in_a_list_or_named_as_in_vllm(prompt: Any, text: str | None) -> None:
    llm = make_llm(ScriptedRunner({"0": [[99], [EOS]]}))
    for given in (prompt, [prompt], [prompt, [1]]):
        results = llm.generate(given, SamplingParams(max_tokens=1), progress=False)
        assert (results[0].prompt_ids, results[0].text) == ([BOS, 97, 98], "c")
        assert results[0].prompt_token_ids == results[0].prompt_ids
        assert results[0].prompt == text
    [first, _] = llm.generate(np.array([[1, 2], [3, 4]]), SamplingParams(max_tokens=1), progress=False)  # type: ignore[arg-type]
    assert first.prompt_ids == [1, 2]


def test_n_answers_a_prompt_with_seeds_of_their_own() -> None:
    runner = ScriptedRunner({"0": [[97], [EOS]], "0.1": [[EOS]], "0.2": [[98, 99], [EOS]], "1": [[100], [EOS]]})
    llm = make_llm(runner)
    params = [SamplingParams(n=3, seed=2**63 - 2, prompt_logprobs=1), SamplingParams(seed=5)]
    three, one = llm.generate([[7, 8], [9]], params, progress=False)
    assert [answer.text for answer in three.outputs] == ["a", "", "bc"]
    assert (three.text, [answer.others for answer in three.others]) == ("a", [(), ()])
    assert [answer.prompt_logprobs for answer in three.others] == [three.prompt_logprobs] * 2
    assert three.prompt_logprobs is not None
    assert one.outputs == [one]
    seeds = {request.request_id: request.params.seed for request in params_seen(llm, [[7, 8], [9]], params)}
    assert seeds == {"0": 2**63 - 2, "0.1": 2**63 - 1, "0.2": 0, "1": 5}
    each = llm.generate_each([([7, 8], params[0]), ([9], params[1])])
    assert dict(each) == {0: three, 1: one}


def params_seen(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[SubmitRequest]:
    """The requests that the engine gets, in their order."""
    seen, add = [], llm._core.add

    def watched(request: SubmitRequest) -> None:
        seen.append(request)
        add(request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm._core, "add", watched)
        llm.generate(prompts, params, progress=False, priority=list(range(len(prompts))))
    return seen


def test_lower_priorities_are_answered_first_and_results_keep_their_order() -> None:
    config = fake_config(max_num_seqs=1)
    core = fake_core(ScriptedRunner(), config)
    llm = LLM.from_core(core, fake_info(config), ByteTokenizer())
    seen: list[tuple[str, int]] = []
    add = core.add

    def watched(request: SubmitRequest) -> None:
        seen.append((request.request_id, request.priority))
        add(request)

    core.add = watched  # type: ignore[method-assign]
    results = llm.generate([[1], [2], [3]], SamplingParams(max_tokens=2), progress=False, priority=[5, -1, 5])
    assert seen == [("1", -1), ("0", 5), ("2", 5)]
    assert [result.prompt_ids for result in results] == [[1], [2], [3]]
    seen.clear()
    llm.chat([{"role": "user", "content": "x"}], SamplingParams(max_tokens=2), progress=False, priority=3)
    assert seen == [("0", 3)]


def test_text_parts_of_a_message_are_its_text() -> None:
    llm = make_llm(ScriptedRunner({"0": [[97], [EOS]]}))
    parts = [{"type": "text", "text": "what"}, {"type": "text", "text": "now?"}]
    [result] = llm.chat([{"role": "user", "content": parts}], progress=False)
    assert bytes(result.prompt_ids) == b"user: what\nnow?\nassistant: "


def test_bytes_are_no_token_ids() -> None:
    with pytest.raises(InvalidRequest, match=r"must be a text, a list of token ids, .*, not b'ab'"):
        make_llm(ScriptedRunner()).generate([b"ab"], progress=False)


def test_no_chats_have_no_answers() -> None:
    assert make_llm(ScriptedRunner()).chat([], progress=False) == []


def test_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    make_llm(ScriptedRunner({"0": [[97, 98, EOS]]})).generate("x")
    out, err = capsys.readouterr()
    assert out == ""
    assert "1/1" in err
    assert "3.00 tokens per step" in err


def test_nothing_runs_when_one_prompt_is_bad() -> None:
    runner = ScriptedRunner()
    with pytest.raises(InvalidRequest, match="empty") as caught:
        make_llm(runner).generate([[1], []])
    assert caught.value.param == "prompt"
    assert caught.value.__notes__ == ["This is about prompt number 1, counted from 0."]
    assert runner.num_steps == 0


def test_arguments_are_those_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[EngineArgs] = []

    def build(args: EngineArgs, on_progress: Callable[[str], None]) -> NoReturn:
        asked.append(args)
        raise ConfigError("built")

    monkeypatch.setattr("hamburger.engine.build.build_core", build)
    given = {name: declared.default for name, declared in ENGINE_SETTINGS.items() if not declared.of_server}
    choices: list[dict[str, Any]] = [{}, given, given | {"max_num_seqs": 3, "device": "cpu"}]
    for settings in choices:
        with pytest.raises(ConfigError, match="built"):
            LLM(**settings)
    assert asked[0] == asked[1] == EngineArgs(max_queue_seconds=math.inf)
    assert asked[2] == replace(asked[0], max_num_seqs=3, device="cpu")


@pytest.mark.parametrize("name", ["max_num_sequences", "max_queue", "max_queue_seconds", "num_engines"])
def test_a_keyword_that_is_no_setting_is_named(name: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        LLM(**{name: 1})  # type: ignore[arg-type]


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
