"""Predicted Outputs: the same answer in fewer macro-steps, what the usage says of it, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from drafting import drafting
from serving import CHAT, COMPLETIONS, HELLO, groups_of, serving, split

TEXT = "for x in range(9):"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def predicted(content: Any) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": content}}


def details(usage: dict[str, Any]) -> tuple[int, int]:
    found = usage["completion_tokens_details"]
    assert found.keys() == {"accepted_prediction_tokens", "rejected_prediction_tokens"}
    return found["accepted_prediction_tokens"], found["rejected_prediction_tokens"]


async def test_a_right_prediction_saves_steps_and_changes_nothing() -> None:
    async with drafting(TEXT) as server:
        plain = await server.chat(max_tokens=18, seed=1)
        quick = await server.chat(max_tokens=18, seed=1, **predicted(TEXT))
        assert quick["choices"][0] == plain["choices"][0]
        accepted, rejected = details(quick["usage"])
        assert quick["usage"]["macro_steps"] < plain["usage"]["macro_steps"]
        assert (accepted, rejected) == (18 - quick["usage"]["macro_steps"], 0)
        assert quick["usage"]["completion_tokens"] == quick["usage"]["kv_slots"] == 18
        assert quick["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
        assert "completion_tokens_details" not in plain["usage"]
        told = sum(server.metric("accepted_tokens_total", drafter="prediction", position=str(i)) for i in range(1, 8))
        assert told == accepted


@pytest.mark.parametrize("continuous", [False, True])
async def test_streamed_usage_tells_of_it_too(continuous: bool) -> None:
    async with drafting(TEXT) as server:
        options = {"include_usage": True, "continuous_usage_stats": continuous}
        asked = {"max_tokens": 18, "stream_options": options, "return_groups": True}
        chunks = await server.stream(CHAT, **asked, **predicted(TEXT))
    groups = groups_of(chunks)
    accepted, rejected = details(chunks[-1]["usage"])
    assert accepted == sum(group.get("accepted", 0) for group in groups) > 0
    assert rejected == 0
    assert {group["drafter"] for group in groups if "drafted" in group} == {"prediction"}


async def test_a_prediction_that_differs_is_partly_rejected() -> None:
    async with drafting(TEXT) as server:
        answer = await server.chat(max_tokens=18, **predicted("for y in range(9):"))
        assert answer["choices"][0]["message"]["content"] == TEXT
        accepted, rejected = details(answer["usage"])
        assert accepted > 0
        assert rejected > 0
        [wrong, _] = [await server.chat(max_tokens=18, **predicted(text)) for text in ("#" * 40, "")]
        assert wrong["choices"][0]["message"]["content"] == TEXT
        assert details(wrong["usage"])[0] == 0


async def test_content_may_be_text_parts_and_null_is_none() -> None:
    parts = [{"type": "text", "text": "for x"}, {"type": "text", "text": "in range(9):"}]
    async with drafting("for x\nin range(9):") as server:
        answer = await server.chat(max_tokens=18, **predicted(parts))
        assert details(answer["usage"])[0] > 0
        for nothing in (None, {"type": "content", "content": ""}):
            assert (await server.chat(max_tokens=2, prediction=nothing))["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    "beside",
    [
        {"logprobs": True, "top_logprobs": 2},
        {"presence_penalty": 1, "frequency_penalty": 1},
        {"max_completion_tokens": 18},
        {"stop": "zz", "logit_bias": {"5": 1}, "seed": 3},
        {"tools": []},
        {"n": 1},
        {"confidence": 1},
    ],
)
async def test_what_goes_with_it(beside: dict[str, Any]) -> None:
    limit = {} if "max_completion_tokens" in beside else {"max_tokens": 18}
    async with drafting(TEXT) as server:
        plain = await server.chat(**limit, **beside)
        quick = await server.chat(**limit, **beside, **predicted(TEXT))
        assert quick["choices"] == plain["choices"]
        assert (details(quick["usage"])[0] > 0) == (beside.get("confidence") != 1)


async def test_it_goes_with_a_grammar() -> None:
    async with drafting('{"a": 1}') as server:
        form = {"response_format": {"type": "json_object"}}
        answer = await server.chat(**form, **predicted('{"a": 1} and more'))
        assert answer["choices"][0]["message"]["content"] == '{"a": 1}'
        assert answer["choices"][0]["finish_reason"] == "stop"
        accepted, _ = details(answer["usage"])
        assert 0 < accepted < answer["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"n": 2, **predicted("a")}, "n", "one answer"),
        ({"tools": [TOOL], **predicted("a")}, "tools", "does not go with tools"),
        (predicted(7), "prediction", ""),
        (predicted(None), "prediction", ""),
        (predicted([{"type": "image_url"}]), "prediction", "only text parts"),
        ({"prediction": {"content": "a"}}, "prediction", ""),
        ({"prediction": {"type": "tokens", "content": "a"}}, "prediction", ""),
        ({"prediction": "a"}, "prediction", ""),
        (predicted("a" * 257), "prediction", "context length is 256 tokens, but the prediction has 257"),
        (predicted("a" * 2000), "prediction", "the prediction has 2000"),
    ],
)
async def test_refusals_name_the_field(body: dict[str, Any], param: str, says: str) -> None:
    async with drafting(TEXT) as server:
        status, error = await server.refused(CHAT, {"messages": HELLO, **body})
    assert status == 400
    assert error["param"] == param
    assert says in error["message"]


async def test_a_prediction_may_be_as_long_as_the_context() -> None:
    async with drafting(TEXT) as server:
        assert details((await server.chat(max_tokens=18, **predicted(TEXT + "a" * 238)))["usage"])[0] > 0


async def test_composed_groups_say_what_serves_it() -> None:
    async with serving(split("ab", 1, 1)) as server:
        status, error = await server.refused(CHAT, {"messages": HELLO, **predicted("a")})
        assert (status, error["param"]) == (400, "prediction")
        assert "--groups verified" in error["message"]
        assert (await server.chat(max_tokens=2, prediction=None))["usage"]["completion_tokens"] == 2


async def test_text_completions_have_none() -> None:
    async with drafting(TEXT) as server:
        status, error = await server.refused(COMPLETIONS, {"prompt": "a", **predicted("a")})
        assert (status, error["param"]) == (400, "prediction")
