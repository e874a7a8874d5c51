"""POST /v1/chat/completions: the answer's shape, streamed and not, and what the fields do."""

from typing import Any

import pytest

from fakes import EOS, scripted_logprobs, scripted_stop_prob
from serving import CHAT, HELLO, MODEL, ByChoice, serving, split

HI = [*split("Hi there", 2, 1, 4, 1), [EOS]]


async def test_the_whole_answer() -> None:
    async with serving(HI) as server:
        answer = await server.chat()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == MODEL
    assert isinstance(answer["created"], int)
    assert answer["system_fingerprint"].startswith("fp_")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hi there", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": len("user: hello\nassistant: "),
        "completion_tokens": 9,
        "total_tokens": len("user: hello\nassistant: ") + 9,
        "kv_slots": 5,
        "tokens_per_kv": 1.8,
        "macro_steps": 5,
        "tokens_per_step": 1.8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_one_event_a_group_and_the_role_comes_with_the_first() -> None:
    async with serving(HI) as server:
        chunks = await server.stream(CHAT)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": "Hi"},
        {"content": " "},
        {"content": "ther"},
        {"content": "e"},
        {"content": ""},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all("usage" not in chunk for chunk in chunks)


async def test_include_usage_adds_a_last_chunk_without_choices() -> None:
    async with serving(HI) as server:
        whole = await server.chat()
        *chunks, last = await server.stream(CHAT, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)


async def test_continuous_usage_counts_up() -> None:
    async with serving(HI) as server:
        options = {"include_usage": True, "continuous_usage_stats": True}
        *chunks, last = await server.stream(CHAT, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [2, 3, 7, 8, 9]
    assert [chunk["usage"]["kv_slots"] for chunk in chunks] == [1, 2, 3, 4, 5]
    assert last["usage"] == chunks[-1]["usage"]


async def test_groups_are_shown_when_asked_for() -> None:
    async with serving(HI) as server:
        whole = await server.chat(return_groups=True)
        chunks = await server.stream(CHAT, return_groups=True)
    assert whole["choices"][0]["groups"] == HI
    groups = [chunk["choices"][0]["group"] for chunk in chunks]
    assert [group["index"] for group in groups] == [0, 1, 2, 3, 4]
    assert [group["token_ids"] for group in groups] == HI
    assert groups[1]["stop_probs"] == [scripted_stop_prob(2, ord(" "))]


async def test_a_stop_string_inside_a_group_trims_text_usage_ids_and_logprobs_together() -> None:
    groups = [*split("one. two", 3, 4, 1), [EOS]]
    async with serving(groups) as server:
        whole = await server.chat(stop=". ", logprobs=True, return_groups=True)
        chunks = await server.stream(CHAT, stop=[". "], stream_options={"include_usage": True})
    [choice] = whole["choices"]
    assert choice["message"]["content"] == "one"
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == ". "
    assert choice["groups"] == [list(b"one"), list(b". ")]
    assert len(choice["logprobs"]["content"]) == whole["usage"]["completion_tokens"] == 5
    assert whole["usage"]["kv_slots"] == 2
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks[:-1]) == "one"
    assert chunks[-2]["choices"][0]["stop_reason"] == ". "
    assert chunks[-1]["usage"] == whole["usage"]


async def test_max_tokens_cuts_inside_a_group() -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        async with serving(split("abcdefgh", 4, 4)) as server:
            answer = await server.chat(**{name: 6})
        assert answer["choices"][0]["message"]["content"] == "abcdef"
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 6


async def test_logprobs_have_one_entry_a_token_streamed_or_not() -> None:
    groups = [list(b"a\xc3"), [0xA9], [EOS]]
    async with serving(groups) as server:
        whole = await server.chat(logprobs=True, top_logprobs=2)
        chunks = await server.stream(CHAT, logprobs=True, top_logprobs=2)
        none = await server.chat(logprobs=True)
    content = whole["choices"][0]["logprobs"]["content"]
    assert whole["choices"][0]["message"]["content"] == "aé"
    assert [entry["bytes"] for entry in content] == [[97], [0xC3], [0xA9], list(b"<eos>")]
    expected = scripted_logprobs(0, 97, 2)
    assert content[0]["token"] == "a"
    assert content[0]["logprob"] == expected.logprob
    assert [entry["logprob"] for entry in content[0]["top_logprobs"]] == [value for _, value in expected.top]
    assert [entry["token"] for entry in content[0]["top_logprobs"]] == ["a", "b"]
    streamed = [entry for chunk in chunks for entry in chunk["choices"][0]["logprobs"]["content"]]
    assert streamed == content
    assert [len(chunk["choices"][0]["logprobs"]["content"]) for chunk in chunks] == [2, 1, 1]
    assert all(entry["top_logprobs"] == [] for entry in none["choices"][0]["logprobs"]["content"])


async def test_streamed_characters_are_whole() -> None:
    async with serving([list("é".encode()[:1]), list("é".encode()[1:] + b"!"), [EOS]]) as server:
        chunks = await server.stream(CHAT)
    assert [chunk["choices"][0]["delta"]["content"] for chunk in chunks] == ["", "é!", ""]


async def test_n_choices_are_interleaved_by_index_and_charged_together() -> None:
    scripts = [[*split("abc", 1, 2), [EOS]], [*split("xy", 2), [EOS]]]
    async with serving(*scripts) as server:
        whole = await server.chat(n=2, seed=5)
        chunks = await server.stream(CHAT, n=2, stream_options={"include_usage": True})
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["abc", "xy"]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert whole["usage"]["completion_tokens"] == 7
    assert whole["usage"]["kv_slots"] == 5
    assert whole["usage"]["prompt_tokens"] == len("user: hello\nassistant: ")
    texts = ["", ""]
    roles = [0, 0]
    for chunk in chunks[:-1]:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["delta"]["content"]
        roles[choice["index"]] += "role" in choice["delta"]
    assert texts == ["abc", "xy"]
    assert roles == [1, 1]
    assert chunks[-1]["usage"] == whole["usage"]
    assert sorted(server.runner.seeds[:2], key=str) == [5, 6]  # choices of one seed differ


async def test_a_seed_may_be_below_0_and_minus_1_is_none() -> None:
    async with serving([[EOS]]) as server:
        for seed in (7, 7 - 2**63, -2, -1):
            await server.chat(seed=seed)
        assert server.runner.seeds[:-1] == [7, 7, 2**63 - 2]
        assert await server.chat(seed=-1, n=2)  # of which each draws its own
        assert len({*server.runner.seeds[3:], *server.runner.seeds[:3]}) == 5


@pytest.mark.parametrize(
    ("fields", "headers", "confidence"),
    [
        ({}, {}, 0.8),
        ({"model": MODEL}, {}, 0.8),
        ({"confidence": 0.5}, {}, 0.5),
        ({"confidence": 1}, {}, 1),
        ({"model": f"{MODEL}@0.25"}, {}, 0.25),
        ({}, {"X-HAMburger-Confidence": "0.75"}, 0.75),
        ({}, {"X-HAMburger-Confidence": "5e-05"}, 0.00005),
        ({"model": f"{MODEL}@0.25"}, {"X-HAMburger-Confidence": "0.75"}, 0.25),
        ({"model": f"{MODEL}@0.25", "confidence": 0}, {"X-HAMburger-Confidence": "0.75"}, 0),
    ],
)
async def test_confidence_field_beats_alias_beats_header(
    fields: dict[str, object], headers: dict[str, str], confidence: float
) -> None:
    async with serving([[EOS]]) as server:
        response = await server.post(CHAT, {"messages": HELLO, **fields}, headers=headers)
    assert response.status_code == 200
    assert response.json()["model"] == fields.get("model", MODEL)
    assert server.runner.confidences == [confidence]


async def test_messages_become_the_template_s_text() -> None:
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "tool_calls": []},
        {"role": "tool", "content": "d", "tool_call_id": "1"},
    ]
    async with serving([[EOS]]) as server:
        await server.chat(messages=messages)
        await server.chat(messages=messages, add_generation_prompt=False)
    text = "system: be kind\nuser: a\nb\nassistant: c\ntool: d\n"
    assert [bytes(prompt).decode() for prompt in server.runner.prompts] == [f"{text}assistant: ", text]


async def test_what_others_answered_with_comes_back_as_the_assistant_s_words() -> None:
    """A refusal, as OpenAI tells it, and an answer without a text."""
    told: list[dict[str, Any]] = [
        {"content": None, "refusal": "I can't."},
        {"content": [{"type": "refusal", "refusal": "I won't."}]},
        {"content": None, "refusal": None},
    ]
    messages = [turn for said in told for turn in (*HELLO, {"role": "assistant", **said})]
    async with serving([[EOS]], max_model_len=256, num_blocks=128) as server:
        await server.chat(messages=[*messages, *HELLO])
        prompt = bytes(server.runner.prompts[-1]).decode()
        status, error = await server.refused(CHAT, {"messages": [*HELLO, {"role": "assistant"}]})
    hello = "user: hello\nassistant: "
    assert prompt == f"{hello}I can't.\n{hello}I won't.\n{hello}\n{hello}"
    assert (status, error["message"]) == (400, "messages[1]: content is missing.")


async def test_values_that_ask_for_nothing_and_unknown_fields_pass(caplog: pytest.LogCaptureFixture) -> None:
    nothing = {
        "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "echo": False, "store": False,
        "service_tier": "auto", "repeat_penalty": 1.0,
        "cache_prompt": True, "modalities": ["text"], "parallel_tool_calls": True, "metadata": {"a": "b"},
        "user": "me", "chat_template_kwargs": {}, "priority": 0, "continue_final_message": False, "logit_bias": {},
        "stop": [], "max_tokens": None, "temperature": None, "top_k": -1, "stream": False, "stream_options": None,
        "do_sample": True, "until": 7,
    }  # fmt: skip
    async with serving(HI) as server:
        with caplog.at_level("DEBUG", "hamburger"):
            answer = await server.chat(**nothing)
    assert answer["choices"][0]["message"]["content"] == "Hi there"
    assert sum("do_sample" in record.message and "until" in record.message for record in caplog.records) == 1


async def test_a_temperature_of_0_is_greedy_whatever_top_p_says() -> None:
    runner = ByChoice([[EOS]])
    async with serving(runner=runner) as server:
        await server.chat(temperature=0, top_p=0.95)
    assert len(runner.prompts) == 1
