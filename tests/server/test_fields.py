"""Fields of other servers' APIs: each is served, refused by name or ignored for a reason, as the document says."""

from __future__ import annotations

import re
from typing import Any

import pytest

import fields
from fakes import EOS, scripted_score
from hamburger.server.bodies.chat import ChatBody
from hamburger.server.bodies.completion import CompletionBody
from hamburger.server.bodies.known_fields import IGNORED
from hamburger.server.messages.body import MessagesBody, PromptBody
from hamburger.server.responses.body import ResponsesBody
from hamburger.server.schema import Schema
from serving import CHAT, COMPLETIONS, HELLO, serving, split

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
PROMPTS: dict[str, dict[str, Any]] = {CHAT: {"messages": HELLO}, COMPLETIONS: {"prompt": "ab"}}
HARMLESS: dict[str, Any] = {
    "service_tier": "auto", "length_penalty": 1.0, "spaces_between_special_tokens": True, "thinking_token_budget": -1,
    "n_predict": -1, "n_probs": 0, "n_cmpl": 1, "n_indent": 0, "min_keep": 0, "repeat_penalty": 1.0, "typical_p": 1,
    "mirostat": 0, "dynatemp_range": 0.0, "dry_multiplier": 0.0, "xtc_probability": 0.0, "top_n_sigma": -1.0,
    "adaptive_target": -0.5, "t_max_predict_ms": 0, "reasoning_budget_tokens": -1, "repetition_ngram_size": 0,
    "function_call": "auto", "modalities": ["text"], "reasoning_effort": "none", "verbosity": "medium",
    "do_preprocess": True, "thinking_budget_tokens": -1, "min_new_tokens": 0, "sampling_logprobs_mode": "selected",
}  # fmt: skip


def test_the_document_is_what_the_code_does() -> None:
    assert fields.DOCUMENT.read_text(encoding="utf-8") == "".join(fields.lines()), "python deploy/fields.py"


@pytest.mark.parametrize("body", [ChatBody, CompletionBody, ResponsesBody, MessagesBody, PromptBody])
def test_no_remedy_is_refused_itself(body: type[Schema]) -> None:
    for name, refused in body.refused.items():
        if (found := re.match(r"(?:use|ask for) (\w+)", refused.instead)) is not None:
            assert found[1] not in body.refused, name


@pytest.mark.parametrize("body", [ChatBody, CompletionBody])
def test_no_field_has_two_fates(body: type[ChatBody | CompletionBody]) -> None:
    assert not body.model_fields.keys() & (body.refused.keys() | IGNORED.keys())
    assert not body.refused.keys() & IGNORED.keys()


@pytest.mark.parametrize("body", [ResponsesBody, MessagesBody])
def test_a_chats_other_forms_leave_out_nothing_that_shapes_an_answer(body: type[ResponsesBody | MessagesBody]) -> None:
    told = {"user", "stream_options", "add_generation_prompt", "continue_final_message"}  # as the last message says
    told |= {"service_tier"}  # Anthropic's has other values
    assert (
        ChatBody.model_fields.keys() | ChatBody.refused.keys()
    ) - told <= body.model_fields.keys() | body.refused.keys()
    assert not body.model_fields.keys() & body.refused.keys()
    assert not body.refused.keys() & IGNORED.keys()


@pytest.mark.parametrize(
    ("path", "prompt"), [(RESPONSES, {"input": "Hi"}), (MESSAGES, {"messages": HELLO, "max_tokens": 2})]
)
async def test_what_a_chat_refuses_its_other_forms_refuse_too(path: str, prompt: dict[str, Any]) -> None:
    async with serving([[97]]) as server:
        wrong: dict[str, Any] = {
            "use_beam_search": True, "repeat_penalty": 1.5, "stop_regex": "a", "functions": [{"name": "f"}],
            "chat_template": "{{ 1 }}", "include_reasoning": False,
        }  # fmt: skip
        for name, value in wrong.items():
            told = await server.post(path, {**prompt, name: value})
            assert (told.status_code, name in told.json()["error"]["message"]) == (400, True)
        kept: dict[str, Any] = {
            "use_beam_search": False,
            "repeat_penalty": 1.0,
            "stop_regex": None,
            "functions": [],
            "lora_path": "",
        }
        assert (await server.post(path, {**prompt, **kept, "include_reasoning": True})).status_code == 200


@pytest.mark.parametrize(("path", "body"), [(CHAT, ChatBody), (COMPLETIONS, CompletionBody)])
async def test_each_is_refused_by_name_unless_it_asks_for_nothing(path: str, body: type[Any]) -> None:
    async with serving([[97]]) as server:
        for name, refused in body.refused.items():
            status, error = await server.refused(path, {**PROMPTS[path], name: {"a": 1}})
            assert (status, error["param"]) == (400, name)
            assert name in error["message"]
            assert refused.instead in error["message"]
            harmless = HARMLESS.get(name)
            for value in (None, harmless) if name in HARMLESS else (None,):
                assert value is None or refused.asks_nothing(value)
                await server.ok(path, {**PROMPTS[path], name: value, "max_tokens": 1})


async def test_what_is_ignored_changes_no_answer() -> None:
    async with serving([[97], [98]]) as server:
        plain = await server.complete(max_tokens=2)
        odd = await server.complete(max_tokens=2, **dict.fromkeys(IGNORED, "x"))
    assert odd["choices"] == plain["choices"]


async def test_an_answer_may_keep_its_stop_string() -> None:
    for name in ("include_stop_str_in_output", "no_stop_trim"):
        async with serving(split("ab.cd", 2, 2, 1)) as server:
            [choice] = (await server.chat(stop=[".c"], **{name: True}))["choices"]
            assert (choice["message"]["content"], choice["stop_reason"]) == ("ab.c", ".c")
            chunks = await server.stream(COMPLETIONS, stop=[".c"], **{name: True})
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ab.c"


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, "fgh"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "abc"),
        ({"truncate_prompt_tokens": 8}, "abcdefgh"),
        ({"truncate_prompt_tokens": 0}, ""),
        ({"truncate_prompt_tokens": None}, "abcdefgh"),
        ({"truncation_side": "right"}, "abcdefgh"),
        ({"truncate_prompt_tokens": -1}, "abcdefgh"),
    ],
)
async def test_a_prompt_is_cut_where_that_is_asked(asked: dict[str, Any], kept: str) -> None:
    async with serving([[120], [121]]) as server:
        body = {"prompt": "abcdefgh", "max_tokens": 2, "add_special_tokens": False, "echo": True, **asked}
        if not kept:
            assert (await server.refused(COMPLETIONS, body))[0] == 400
            return
        answer = await server.ok(COMPLETIONS, body)
        assert answer["choices"][0]["text"] == f"{kept}xy"
        assert answer["usage"]["prompt_tokens"] == len(kept)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_prompt_beyond_the_context_is_cut_to_what_fits(path: str) -> None:
    messages = [{"role": "user", "content": "a" * 2000}]
    long: dict[str, Any] = {"messages": messages} if path == CHAT else {"prompt": "a" * 2000}
    async with serving([[120], [121]], max_model_len=99) as server:
        status, error = await server.refused(path, {**long, "max_tokens": 2})
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert "maximum context length is 99 tokens" in error["message"]
        answer = await server.ok(path, {**long, "max_tokens": 2, "truncate_prompt_tokens": -1})
        assert answer["usage"]["prompt_tokens"] == 97
        answer = await server.ok(path, {**long, "truncate_prompt_tokens": -1})
        assert answer["usage"]["prompt_tokens"] == 99 - (1 if path == CHAT else 16)  # a completion's default
        assert (await server.refused(path, {**long, "truncate_prompt_tokens": -2}))[1]["param"] == (
            "truncate_prompt_tokens"
        )


async def test_token_ids_are_told() -> None:
    groups = split("xyz", 2, 1)
    async with serving(groups) as server:
        whole = await server.complete(prompt=["ab", "c"], max_tokens=3, return_token_ids=True, add_special_tokens=False)
        assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [[97, 98], [99]]
        assert whole["choices"][0]["token_ids"] == [*b"xyz"]
        chat = await server.chat(max_tokens=3, return_token_ids=True)
        assert bytes(chat["prompt_token_ids"]) == b"user: hello\nassistant: "
        first, *rest = await server.stream(CHAT, max_tokens=3, return_token_ids=True)
        assert first["prompt_token_ids"] == chat["prompt_token_ids"]
        assert not any("prompt_token_ids" in chunk for chunk in rest)
        told = [chunk["choices"][0].get("token_ids", []) for chunk in [first, *rest]]
        assert [token for ids in told for token in ids] == chat["choices"][0]["token_ids"]
        assert "token_ids" not in (await server.chat(max_tokens=3))["choices"][0]


async def test_log_probabilities_of_a_prompt_are_those_of_vllm() -> None:
    """{token id: {"logprob", "rank", "decoded_token"}}: of a text in each choice, of a chat in the answer."""
    fields = {"max_tokens": 2, "prompt_logprobs": 2, "n": 2}
    async with serving(split("xy", 2)) as server:
        whole = await server.complete(prompt=["ab", "c"], add_special_tokens=False, **fields)
        first, again, *others = (choice["prompt_logprobs"] for choice in whole["choices"])
        logprob, rival = scripted_score(1, 98, 2).top
        assert first == [
            None,
            {
                "98": {"logprob": logprob[1], "rank": 1, "decoded_token": "b"},
                "99": {"logprob": rival[1], "rank": 2, "decoded_token": "c"},
            },
        ]
        assert again == first
        assert others == [[None]] * 2
        chat = await server.chat(**fields)
        assert [*map(len, chat["prompt_logprobs"][1:])] == [2] * (chat["usage"]["prompt_tokens"] - 1)
        assert chat["prompt_logprobs"][0] is None
        assert not any("prompt_logprobs" in choice for choice in chat["choices"])
        alone = await server.complete(prompt="ab", max_tokens=0, prompt_logprobs=0, add_special_tokens=False)
        assert [*alone["choices"][0]["prompt_logprobs"][1]] == ["98"]
        assert "prompt_logprobs" not in (await server.complete(max_tokens=2))["choices"][0]
        for path, body in PROMPTS.items():
            for wrong in ({"stream": True}, {"prompt_logprobs": 21}, {"prompt_logprobs": -1}):
                status, error = await server.refused(path, {**body, "prompt_logprobs": 1, **wrong})
                assert (status, error["param"]) == (400, "prompt_logprobs")


async def test_echo_tells_no_more_rivals_than_logprobs_asks_for() -> None:
    async with serving(split("xy", 2)) as server:
        asked = {"prompt": "ab", "max_tokens": 2, "echo": True, "add_special_tokens": False, "logprobs": 1}
        plain = await server.complete(**asked)
        both = await server.complete(**asked, prompt_logprobs=3)
        assert both["choices"][0]["logprobs"] == plain["choices"][0]["logprobs"]
        assert len(both["choices"][0]["prompt_logprobs"][1]) == 3


async def test_tokens_may_be_named_by_their_ids() -> None:
    async with serving(split("xy", 2)) as server:
        chat = await server.chat(max_tokens=2, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)
        entries = chat["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in entries] == ["token_id:120", "token_id:121"]
        assert [entry["bytes"] for entry in entries] == [[120], [121]]
        told = (await server.complete(max_tokens=2, logprobs=1, return_tokens_as_token_ids=True))["choices"][0]
        assert told["logprobs"]["tokens"] == ["token_id:120", "token_id:121"]


async def test_completions_take_both_names_of_the_limit() -> None:
    async with serving(split("abcdef", 1, 1, 1, 1, 1, 1)) as server:
        assert (await server.complete(max_completion_tokens=3))["choices"][0]["text"] == "abc"
        status, error = await server.refused(COMPLETIONS, {"prompt": "a", "max_tokens": 2, "max_completion_tokens": 3})
        assert (status, error["param"]) == (400, "max_tokens")


async def test_words_and_tokens_may_be_forbidden() -> None:
    for path, prompt in PROMPTS.items():
        async with serving(split("abcabd", 1, 1, 1, 1, 1, 1), max_model_len=99) as server:
            for fields, param in (
                ({"bad_words": [" "]}, "bad_words"),
                ({"bad_words": ["a" * 30_000]}, "bad_words"),
                ({"bad_words": "a"}, "bad_words"),
                ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
                ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
                ({"allowed_token_ids": []}, "allowed_token_ids"),  # nothing is allowed, not all
                ({"allowed_token_ids": [EOS], "min_tokens": 2}, "min_tokens"),
                ({"allowed_token_ids": [97], "bad_words": ["a"], "min_tokens": 2}, "min_tokens"),
            ):
                status, error = await server.refused(path, {**prompt, "max_tokens": 5, **fields})
                assert (status, error["param"]) == (400, param)
            await server.ok(path, {**prompt, "max_tokens": 6, "bad_words": ["x"], "allowed_token_ids": [*b"abcd"]})
