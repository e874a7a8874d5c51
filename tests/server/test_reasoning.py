"""What a model writes for itself, apart from its answer: split as it comes, and told in each API's form."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import EOS, ByteTokenizer
from hamburger.engine.types.errors import InvalidRequest
from hamburger.engine.types.sampling_params import ThinkingBudget
from hamburger.server.tools.reasoning import Markers, Reasoning, markers_of, template_kwargs
from serving import CHAT, HELLO, Served, serving, split, typed_events

THINK = Markers("<think>", "</think>")
THOUGHT, ANSWER = "It is sunny, as < and </ say.", "Sunny."
WRITTEN = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
ROOM: dict[str, Any] = {"max_model_len": 2048, "num_blocks": 1024}


class Thinker(ByteTokenizer):
    """A model whose template opens the reasoning itself, unless it is told not to think."""

    loader = ByteTokenizer().loader  # other processes know no tests
    chat_template = tool_template = "{{ messages }} {{ enable_thinking }} <think> </think>"

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        told = [
            {**message, "content": message.get("reasoning_content", "") + message["content"]} for message in messages
        ]
        end = "" if kwargs.get("enable_thinking", True) else "<think>\n\n</think>\n\n"
        return super().apply_chat_template(told, **kwargs) + end


class Opener(Thinker):
    """As DeepSeek's: the prompt ends with the first marker."""

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        return super().apply_chat_template(messages, **kwargs) + "<think>\n"


def parts(reasoning: Reasoning, pieces: Sequence[str]) -> tuple[str, str]:
    found = [reasoning.add(piece, is_final=i == len(pieces) - 1) for i, piece in enumerate(pieces)]
    return "".join(thought for thought, _ in found), "".join(answer for _, answer in found)


@pytest.mark.parametrize(
    ("prompt", "text", "thought", "answer"),
    [
        ("", WRITTEN, THOUGHT, ANSWER),
        ("", ANSWER, "", ANSWER),
        ("", "<thin", "", "<thin"),
        ("", " <think>a", "a", ""),
        ("", "<think>a</thi", "a</thi", ""),
        ("", "<think></think>b", "", "b"),
        ("", "<think>a</think>", "a", ""),
        ("", "<think>a</think> b <think>c</think>", "a", "b <think>c</think>"),
        ("x<think>\n", f"{THOUGHT}</think>{ANSWER}", THOUGHT, ANSWER),
        ("x<think>\n", "never ends", "never ends", ""),
        ("x <think> y", "a</think>b", "", "a</think>b"),
        ("", "", "", ""),
    ],
)
def test_an_answer_is_split(prompt: str, text: str, thought: str, answer: str) -> None:
    assert parts(Reasoning(THINK, prompt), [text]) == (thought, answer)
    assert parts(Reasoning(THINK, prompt), [*text, ""]) == (thought, answer)


@settings(max_examples=500)
@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "</thi", "\n", " ", "a", "nk>"]), max_size=8),
    st.booleans(),
    st.data(),
)
def test_how_it_is_cut_does_not_matter(words: list[str], is_open: bool, data: st.DataObject) -> None:
    text, prompt = "".join(words), "<think>" if is_open else ""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parts(Reasoning(THINK, prompt), pieces) == parts(Reasoning(THINK, prompt), [text])


@pytest.mark.parametrize(
    ("template", "effort", "enabled", "told"),
    [
        ("enable_thinking", None, False, {"enable_thinking": False}),
        ("enable_thinking", "low", None, {"enable_thinking": True}),
        ("enable_thinking", "none", None, {"enable_thinking": False}),
        ("reasoning_effort", "low", None, {"reasoning_effort": "low"}),
        ("", "none", None, {}),
        ("", None, None, {}),
        (None, "low", None, None),
        ("", None, True, None),
    ],
)
def test_what_the_template_is_told(template: str, effort: str, enabled: bool, told: dict[str, Any] | None) -> None:
    if told is None:
        with pytest.raises(InvalidRequest, match=r"does not read|reads neither"):
            template_kwargs(template, effort, enabled)
    else:
        assert template_kwargs(template, effort, enabled) == told


def test_markers_are_those_of_the_template_unless_they_are_special() -> None:
    class Special(Thinker):
        def is_special(self, token_id: int) -> bool:
            return True

        def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
            return [1]

    assert markers_of(Thinker()) == THINK
    assert markers_of(ByteTokenizer()) is None
    assert markers_of(Special()) is None


def prompt_of(server: Served) -> str:
    return bytes(server.runner.prompts[-1]).decode()


@pytest.mark.parametrize("tokenizer", [Thinker(), Opener()])
async def test_a_chat_tells_it_apart(tokenizer: ByteTokenizer) -> None:
    text = WRITTEN.removeprefix("<think>\n") if isinstance(tokenizer, Opener) else WRITTEN
    sizes = [5] * (len(text) // 5)
    async with serving([*split(text, *sizes, len(text) - sum(sizes)), [EOS]], tokenizer=tokenizer, **ROOM) as server:
        [choice] = (await server.chat())["choices"]
        assert choice["message"] == {
            "role": "assistant", "reasoning_content": THOUGHT, "content": ANSWER, "refusal": None
        }  # fmt: skip
        chunks = await server.stream(CHAT)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == THOUGHT
        assert "".join(delta.get("content", "") for delta in deltas) == ANSWER
        assert sum("reasoning_content" in delta for delta in deltas) > 2
        assert deltas[0]["role"] == "assistant"
        assert (deltas[-1], chunks[-1]["choices"][0]["finish_reason"]) == ({}, "stop")
        hidden = (await server.chat(include_reasoning=False))["choices"][0]["message"]
        assert (hidden["content"], "reasoning_content" in hidden) == (ANSWER, False)
        plain = (await server.chat(separate_reasoning=False))["choices"][0]["message"]
        assert (plain["content"], "reasoning_content" in plain) == (text, False)


async def test_thinking_may_be_turned_off_and_is_given_back() -> None:
    async with serving([[*b"ok"], [EOS]], tokenizer=Thinker(), **ROOM) as server:
        for fields in ({"reasoning_effort": "none"}, {"enable_thinking": False}):
            answer = await server.chat(**fields)
            assert prompt_of(server).endswith("assistant: <think>\n\n</think>\n\n")
            assert answer["choices"][0]["message"]["content"] == "ok"
            counted = await server.ok("/tokenize", {"messages": HELLO, **fields})
            assert counted["count"] == answer["usage"]["prompt_tokens"]
        said = {"role": "assistant", "reasoning_content": "hm ", "content": "yes"}
        await server.chat(messages=[*HELLO, said, *HELLO])
        assert "assistant: hm yes\n" in prompt_of(server)
    async with serving([[*b"ok"], [EOS]]) as server:
        for name, value in (("reasoning_effort", "low"), ("enable_thinking", True)):
            status, error = await server.refused(CHAT, {"messages": HELLO, name: value})
            assert (status, error["param"]) == (400, name)


async def test_a_grammar_leaves_no_room_for_it() -> None:
    async with serving([[*b'{"a": 1}'], [EOS]], tokenizer=Opener(), max_group=9, **ROOM) as server:
        answer = await server.chat(response_format={"type": "json_object"})
    assert answer["choices"][0]["message"]["content"] == '{"a": 1}'


class TokenThinker(Thinker):
    """Its markers are tokens of their own, 1 and 2."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        parts = re.split("(</?think>)", text)
        texts = {part: ByteTokenizer.encode(self, part) for part in parts}
        return [i for part in parts for i in ([1 + THINK.index(part)] if part in THINK else texts[part])]

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        return THINK[token_id - 1].encode() if token_id in (1, 2) else super().token_bytes(token_id, first=first)


async def test_a_budget_of_it_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which keeps it: tests/engine/test_token_rules.py."""
    monkeypatch.setattr("fake_engines.ByteTokenizer", TokenThinker)
    asked: dict[str, Any] = {"messages": HELLO, "max_tokens": 50}
    tool = {"type": "function", "function": {"name": "now"}}
    async with serving([[1, *b"abc", 2, *b"ok", EOS]], tokenizer=TokenThinker(), max_group=9, **ROOM) as server:
        for fields, expected in (
            ({"thinking_token_budget": 3}, ThinkingBudget(3, 1, 2)),
            ({"thinking_token_budget": 0, "separate_reasoning": False}, ThinkingBudget(0, 1, 2)),
            ({"thinking_token_budget": 3, "tools": [tool]}, ThinkingBudget(3, 1, 2)),
            ({"thinking_token_budget": -1}, None),
            ({}, None),
        ):
            [choice] = (await server.ok(CHAT, {**asked, **fields}))["choices"]
            assert server.runner.budgets[-1] == expected
            if "separate_reasoning" not in fields:
                assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("abc", "ok")
        thinking = {"type": "enabled", "budget_tokens": 9}
        await server.ok("/v1/messages", {**asked, "thinking": thinking})
        assert server.runner.budgets[-1] == ThinkingBudget(9, 1, 2)
    async with serving([[97]], tokenizer=Thinker(), **ROOM) as server:  # its markers are texts
        status, error = await server.refused(CHAT, {**asked, "thinking_token_budget": 3})
        assert (status, error["param"]) == (400, "thinking_token_budget")


async def test_its_tokens_are_counted_where_its_markers_are_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fake_engines.ByteTokenizer", TokenThinker)
    asked: dict[str, Any] = {"messages": HELLO, "max_tokens": 50}
    for script, number in (
        ([[1, *b"ab"], [*b"c", 2, *b"ok", EOS]], 3),
        ([[1, *b"ab"], [*b"cde", EOS]], 6),
        ([[*b"no ", 1, *b"ab", 2, EOS]], 0),
    ):
        async with serving(script, tokenizer=TokenThinker(), max_group=9, **ROOM) as server:
            whole = (await server.ok(CHAT, asked))["usage"]
            assert whole["completion_tokens_details"] == {"reasoning_tokens": number}
            options = {"include_usage": True, "continuous_usage_stats": True}
            *_, last, end = await server.stream(CHAT, max_tokens=50, stream_options=options)
            assert last["usage"]["completion_tokens_details"] == end["usage"]["completion_tokens_details"]
            assert end["usage"] == {**whole, "prompt_tokens_details": end["usage"]["prompt_tokens_details"]}
            response = await server.ok("/v1/responses", {"input": "hi"})
            assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": number}
            plain = await server.ok(CHAT, {**asked, "separate_reasoning": False})
            assert "completion_tokens_details" not in plain["usage"]
    async with serving([[*b"hi"], [EOS]], tokenizer=Thinker(), **ROOM) as server:  # its markers are texts
        assert "completion_tokens_details" not in (await server.ok(CHAT, asked))["usage"]


async def test_calls_come_behind_it() -> None:
    text = WRITTEN.replace(ANSWER, '{"name": "now", "arguments": {}}')
    tool = {"type": "function", "function": {"name": "now"}}
    async with serving([[*text.encode()], [EOS]], tokenizer=Thinker(), max_group=99, **ROOM) as server:
        message = (await server.chat(tools=[tool]))["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (THOUGHT, None)
    assert message["tool_calls"][0]["function"]["name"] == "now"


@pytest.mark.parametrize("opener", [False, True])
@pytest.mark.parametrize("said", ['{"a": 1}', '{"name": "now", "arguments": {}}'])
async def test_it_may_stand_before_what_is_of_a_format_or_a_call(said: str, opener: bool) -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    asked: dict[str, Any] = {"tools": [tool], "response_format": {"type": "json_object", "schema": schema}}
    tokenizer, text = (Opener(), WRITTEN.removeprefix("<think>\n")) if opener else (Thinker(), WRITTEN)
    script = [[*text.replace(ANSWER, said).encode()], [EOS]]
    async with serving(script, tokenizer=tokenizer, max_group=99, **ROOM) as server:
        message = (await server.chat(**asked))["choices"][0]["message"]
        assert message["reasoning_content"] == THOUGHT
        assert (message["content"], len(message.get("tool_calls", []))) == ((said, 0) if '"a"' in said else (None, 1))
        # Where it would stay in the text, there is none, as with a format alone.
        status, _ = await server.refused(CHAT, {"messages": HELLO, **asked, "separate_reasoning": False})
        assert status == 400


async def test_messages_have_a_block_of_it() -> None:
    asked: dict[str, Any] = {"max_tokens": 200, "messages": [{"role": "user", "content": "hi"}]}
    async with serving([*split(WRITTEN, 9, 20, len(WRITTEN) - 29), [EOS]], tokenizer=Thinker(), **ROOM) as server:
        whole = await server.ok("/v1/messages", asked)
        told = typed_events((await server.post("/v1/messages", {**asked, "stream": True})).text)
        hidden = {"type": "adaptive", "display": "omitted"}
        shown = await server.ok("/v1/messages", {**asked, "thinking": hidden})
        assert shown["content"] == [{"type": "text", "text": ANSWER}]
        back = [*asked["messages"], {"role": "assistant", "content": whole["content"]}, *asked["messages"]]
        await server.ok("/v1/messages", {**asked, "messages": back, "thinking": {"type": "disabled"}})
        assert f"assistant: {THOUGHT}{ANSWER}\n" in prompt_of(server)
        assert prompt_of(server).endswith("</think>\n\n")
        refused = await server.post("/v1/messages", {**asked, "thinking": {"type": "enabled", "budget_tokens": 9}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "thinking")
    assert whole["content"] == [
        {"type": "thinking", "thinking": THOUGHT, "signature": whole["id"]}, {"type": "text", "text": ANSWER}
    ]  # fmt: skip
    deltas = [event["delta"] for event in told if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == THOUGHT
    assert "".join(delta.get("text", "") for delta in deltas) == ANSWER
    signed = [delta["type"] for delta in deltas]
    assert signed.count("signature_delta") == 1
    assert signed.index("signature_delta") == signed.count("thinking_delta")  # behind all of it
    assert [event["index"] for event in told if event["type"] == "content_block_stop"] == [0, 1]


async def test_a_response_that_is_cut_while_it_thinks_is_no_message_yet() -> None:
    async with serving(split(WRITTEN, 12, len(WRITTEN) - 12), tokenizer=Thinker(), **ROOM) as server:
        asked = {"input": "hi", "max_output_tokens": 12}
        whole = await server.ok("/v1/responses", asked)
        streamed = typed_events((await server.post("/v1/responses", {**asked, "stream": True})).text)[-1]["response"]
    for response in (whole, streamed):
        [item] = response["output"]
        assert (response["status"], item["type"], item["status"]) == ("incomplete", "reasoning", "incomplete")
        assert THOUGHT.startswith(item["content"][0]["text"])


async def test_responses_have_an_item_of_it() -> None:
    async with serving([*split(WRITTEN, 9, 20, len(WRITTEN) - 29), [EOS]], tokenizer=Thinker(), **ROOM) as server:
        whole = await server.ok("/v1/responses", {"input": "hi"})
        told = typed_events((await server.post("/v1/responses", {"input": "hi", "stream": True})).text)
        await server.ok("/v1/responses", {"input": "go on", "previous_response_id": whole["id"]})
        assert f"assistant: {THOUGHT}{ANSWER}\n" in prompt_of(server)
        again = [{"role": "user", "content": "hi"}, *whole["output"], {"role": "user", "content": "go on"}]
        await server.ok("/v1/responses", {"input": again, "reasoning": {"effort": "none"}})
        assert f"assistant: {THOUGHT}{ANSWER}\n" in prompt_of(server)
        assert prompt_of(server).endswith("</think>\n\n")
    thought, message = whole["output"]
    assert (thought["type"], thought["content"][0]["text"]) == ("reasoning", THOUGHT)
    assert message["content"][0]["text"] == ANSWER
    final = told[-1]["response"]["output"]
    assert [item["content"][0]["text"] for item in final] == [THOUGHT, ANSWER]
    assert "".join(event["delta"] for event in told if event["type"] == "response.reasoning_text.delta") == THOUGHT
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
