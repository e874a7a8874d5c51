"""LLM and SamplingParams name what is given as another type, before any work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fake_engines import fake_config, fake_core, fake_info
from fakes import ByteTokenizer, ScriptedRunner
from hamburger.engine import LLM, SamplingParams
from hamburger.engine.types.errors import InvalidRequest, TokenizerError

A_PROMPT = 'a text, a list of token ids, {"prompt": ...} or {"prompt_token_ids": ...}'


@pytest.fixture
def llm() -> LLM:
    config = fake_config()
    return LLM.from_core(fake_core(ScriptedRunner(), config), fake_info(config), ByteTokenizer())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n", None, "n is None: it must be a whole number."),
        ("n", 0, "n is 0: it must be in [1, 16384]."),
        ("max_tokens", "5", "max_tokens is '5': it must be a whole number."),
        ("max_tokens", 5.5, "max_tokens is 5.5: it must be a whole number."),
        ("logprobs", True, "logprobs is True: it must be a whole number."),
        ("seed", "a", "seed is 'a': it must be a whole number."),
        ("top_k", None, "top_k is None: it must be a whole number."),
        ("temperature", "0.5", "temperature is '0.5': it must be a number."),
        ("top_p", None, "top_p is None: it must be a number."),
        ("confidence", "high", "confidence is 'high': it must be a number."),
        ("ignore_eos", "no", "ignore_eos is 'no': it must be True or False."),
        ("settle", 0, "settle is 0: it must be True or False."),
        ("stop", 5, "stop is 5: it must be a string or a list of strings."),
        ("stop", ["a", 5], "stop holds 5: it must be a string or a list of strings."),
        ("stop_token_ids", 5, "stop_token_ids is 5: it must be a list of token ids."),
        ("stop_token_ids", [True], "stop_token_ids holds True: it must be a list of token ids."),
        ("allowed_token_ids", "ab", "allowed_token_ids is 'ab': it must be a list of token ids."),
        ("prediction_ids", [1, 2.5], "prediction_ids holds 2.5: it must be a list of token ids."),
        ("bad_words", ["word"], "bad_words is 'word': it must be a list with a list of token ids for each word."),
        ("bad_words", [5], "bad_words holds 5: it must be a list with a list of token ids for each word."),
        ("logit_bias", [5], "logit_bias is [5]: it must map token ids to numbers."),
        ("logit_bias", {"5": 1}, "logit_bias is {'5': 1}: it must map token ids to numbers."),
        ("thinking", 5, "thinking is 5: it must be a ThinkingBudget."),
        ("grammar", {"type": "object"}, "grammar is {'type': 'object'}: it must be a string."),
    ],
)
def test_a_field_of_another_type_is_named(field: str, value: object, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert (str(caught.value), caught.value.param) == (message, field)


def test_lists_and_iterators_become_tuples() -> None:
    params = SamplingParams(stop_token_ids=iter([1, 2]), bad_words=[np.array([3]), [4, 5]], prediction_ids=range(2))  # type: ignore[arg-type]
    assert (params.stop_token_ids, params.bad_words, params.prediction_ids) == ((1, 2), ((3,), (4, 5)), (0, 1))


def test_minus_one_is_off_as_in_vllm() -> None:
    assert SamplingParams(top_k=-1, seed=-1) == SamplingParams(top_k=0, seed=None)
    with pytest.raises(InvalidRequest, match="top_k is -2"):
        SamplingParams(top_k=-2)


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(max_tokens=np.int64(3), temperature=np.float32(0.5))  # type: ignore[arg-type]
    assert (params.max_tokens, params.temperature) == (3, 0.5)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (5, "prompts must be a text or a list of prompts, not 5."),
        (None, "prompts must be a text or a list of prompts, not None."),
        (b"text", "prompts must be a text or a list of prompts, not b'text'."),
        (["a", 5], f"A prompt must be {A_PROMPT}, not 5."),
        ([[5], [6.5]], f"A prompt must be {A_PROMPT}, not [6.5]."),
        (["a", {"prompt": b"a"}], f"A prompt must be {A_PROMPT}, not b'a'."),
        (["a", {}], f"A prompt must be {A_PROMPT}, and nothing beside it, not {{}}."),
        (
            ["a", {"prompt": "a", "multi_modal_data": 5}],
            f"A prompt must be {A_PROMPT}, and nothing beside it, not {{'prompt': 'a', 'multi_modal_data': 5}}.",
        ),
    ],
)
def test_what_is_no_prompt_is_named(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(prompts, progress=False)
    assert str(caught.value) == message
    if isinstance(prompts, list):
        assert caught.value.__notes__ == ["This is about prompt number 1, counted from 0."]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (5, 'messages must be a list of {"role": ..., "content": ...}, not 5.'),
        ("Hi", 'messages must be a list of {"role": ..., "content": ...}, not \'Hi\'.'),
        ({"role": "user"}, "messages must be a list of {\"role\": ..., \"content\": ...}, not {'role': 'user'}."),
        ([["Hi"]], 'messages must be a list of {"role": ..., "content": ...}, not hold \'Hi\'.'),
        (["Hi"], 'messages must be a list of {"role": ..., "content": ...}, not \'Hi\'.'),
        ([[]], "The conversation is empty: it needs at least one message."),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "messages hold a content of another kind: only text parts are supported, not 'image_url'.",
        ),
    ],
)
def test_what_is_no_chat_is_named(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.chat(messages, progress=False)
    assert (str(caught.value), caught.value.param) == (message, "messages")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (5, "sampling_params must be SamplingParams, or a list with one a prompt, not 5."),
        ({"seed": 1}, "sampling_params must be SamplingParams, or a list with one a prompt, not {'seed': 1}."),
        ([{"seed": 1}], "sampling_params holds {'seed': 1}: use SamplingParams."),
    ],
)
def test_what_are_no_sampling_params_is_named(llm: LLM, params: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(["a"], params, progress=False)
    assert (str(caught.value), caught.value.param) == (message, "sampling_params")


def test_what_is_no_priority_is_named(llm: LLM) -> None:
    for priority in ("high", ["high"]):
        with pytest.raises(InvalidRequest, match="a whole number, or a list with one a prompt") as caught:
            llm.generate(["a"], progress=False, priority=priority)  # type: ignore[arg-type]
        assert caught.value.param == "priority"
    with pytest.raises(ValueError, match="1 prompts came with 2 priorities"):
        llm.generate(["a"], progress=False, priority=[1, 2])


def test_a_text_that_the_tokenizer_cannot_take_is_counted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(text: str, *, add_special_tokens: bool = False) -> list[int]:
        if text == "bad":
            raise TokenizerError("The text is bad.")
        return [5]

    monkeypatch.setattr(llm.tokenizer, "encode", encode)
    with pytest.raises(TokenizerError) as caught:
        llm.generate(["good", "bad"], progress=False)
    assert caught.value.__notes__ == ["This is about prompt number 1, counted from 0."]
