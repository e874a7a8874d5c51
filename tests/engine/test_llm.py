"""LLM: the offline API, on scripted answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import pytest

from drafting import DraftingRunner
from fake_engines import fake_config, fake_core, fake_info, make_llm
from fakes import BOS, EOS, ByteTokenizer, ScriptedRunner
from hamburger.engine import LLM, SamplingParams
from hamburger.engine.request import DraftCounts
from hamburger.engine.types.config import ENGINE_SETTINGS, EngineArgs
from hamburger.engine.types.errors import InvalidRequest
from hamburger.engine.types.messages import SubmitRequest
from hamburger.model.config import ConfigError
from reference import CONTEXT


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
