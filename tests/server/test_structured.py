"""response_format and structured_outputs: what ends an answer, and which requests are refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from fakes import EOS
from hamburger.engine.grammar.source import GrammarSource
from hamburger.server.bodies.answer_format import AnswerFormat
from serving import CHAT, COMPLETIONS, HELLO, Served, serving, split

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Served]:
    """One server, so that one process tries all grammars: most of a test's time is its start."""
    async with serving(max_group=20) as server:
        yield server


@pytest.mark.parametrize("sizes", [(1,) * 8, (2, 3, 2, 1), (4, 4), (3, 4, 1)])
@pytest.mark.parametrize("form", [{"type": "json_object"}, schema_format(OBJECT), schema_format(None)])
@pytest.mark.asyncio(loop_scope="module")
async def test_an_answer_ends_with_its_json(shared: Served, form: dict[str, Any], sizes: tuple[int, ...]) -> None:
    groups = split('{"a": 1}', *sizes)
    groups[-1] += [*b" and more"]  # the model would have gone on
    shared.runner.by_choice = (groups,)
    answer = await shared.chat(response_format=form, logprobs=True, return_groups=True)
    [choice] = answer["choices"]
    assert choice["message"]["content"] == '{"a": 1}'
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["content"]) == answer["usage"]["completion_tokens"] == 8
    assert sum(map(len, choice["groups"])) == 8
    chunks = await shared.stream(CHAT, response_format=form)
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == '{"a": 1}'


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"response_format": {"type": "json_object", "schema": OBJECT}}, '{"a": 1}'),
        ({"response_format": {"type": "json_schema", "schema": OBJECT}}, '{"a": 1}'),
        ({"guided_json": OBJECT}, '{"a": 1}'),
        ({"guided_json": json.dumps(OBJECT)}, '{"a": 1}'),
        ({"guided_regex": "[0-9]{3}"}, "123"),
        ({"guided_choice": ["yes", "no"]}, "no"),
        ({"guided_grammar": 'start: "a" ("b" | "c")'}, "ac"),
        ({"guided_grammar": 'root ::= "a" ("b" | "c")'}, "ac"),
        ({"json_schema": OBJECT}, '{"a": 1}'),
        ({"json_schema": json.dumps(OBJECT)}, '{"a": 1}'),
        ({"regex": "[0-9]{3}"}, "123"),
        ({"ebnf": 'root ::= x y\nx ::= "a"\ny ::= [b-c]'}, "ab"),
        ({"grammar": 'root ::= "a" ("b" | "c")'}, "ac"),
        ({"structured_outputs": {"grammar": 'root ::= "a" ("b" | "c")'}}, "ac"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_every_way_to_say_what_an_answer_must_look_like(
    shared: Served, path: str, fields: dict[str, Any], text: str
) -> None:
    shared.runner.by_choice = ([[*text.encode(), *b" and more"], [EOS]],)
    prompt: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": "a"}
    [choice] = (await shared.ok(path, {**prompt, "max_tokens": 30, **fields}))["choices"]
    assert (choice["message"]["content"] if path == CHAT else choice["text"]) == text
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("field", ["structured_outputs", "response_format", "guided_json"])
@pytest.mark.parametrize("compact", [True, False])
def test_json_is_as_compact_as_was_asked_whichever_field_asks_for_it(field: str, compact: bool) -> None:
    values: dict[str, Any] = {
        "structured_outputs": {"json": OBJECT}, "response_format": schema_format(OBJECT), "guided_json": OBJECT,
    }  # fmt: skip
    fields: dict[str, Any] = {field: values[field]}
    if compact:
        fields["structured_outputs"] = {**fields.get("structured_outputs", {}), "disable_any_whitespace": True}
    assert AnswerFormat.model_validate(fields).source() == (field, GrammarSource("json", OBJECT, compact))


async def test_an_empty_grammar_is_none() -> None:
    async with serving([[*b"any"], [EOS]]) as server:
        assert (await server.complete(grammar="", ebnf=""))["choices"][0]["text"] == "any"


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ({"regex": "[0-9]{3}"}, "123"),
        ({"choice": ["yes", "no"]}, "no"),
        ({"json": OBJECT}, '{"a": 1}'),
        ({"json": json.dumps(OBJECT)}, '{"a": 1}'),
        ({"json_object": True}, "{}"),
        ({"json": OBJECT, "disable_any_whitespace": True}, '{"a": 1}'),
        ({"regex": "a", "disable_any_whitespace": False}, "a"),
        ({"grammar": 'start: "a" ("b" | "c")'}, "ac"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_structured_outputs_of_completions(shared: Served, outputs: dict[str, Any], text: str) -> None:
    shared.runner.by_choice = ([[*text.encode()], [EOS]],)
    answer = await shared.complete(structured_outputs=outputs)
    assert answer["choices"][0]["text"] == text
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "type"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format", "schema goes with"),
        ({"response_format": {**schema_format({}), "schema": {}}}, "response_format", "schema goes with"),
        ({"response_format": {"type": "json_object", "schema": {"type": "foo"}}}, "response_format", "Invalid type"),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed"),
        ({"json_schema": "{"}, "json_schema", "no JSON"),
        ({"ebnf": "root ::= )"}, "ebnf", "no GBNF"),
        ({"ebnf": "root = a"}, "ebnf", "Expected token"),
        ({"grammar": "root ::= nothing"}, "grammar", "nothing"),
        ({"guided_choice": ["a"], "regex": "a"}, "guided_choice", "either regex"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex", "either response_format"),
        ({"response_format": {"type": "text", "json_schema": {}}}, "response_format", "json_schema"),
        ({"response_format": schema_format({"type": "foo"})}, "response_format", "Invalid type: foo"),
        ({"response_format": schema_format({"uniqueItems": True, "type": "array"})}, "response_format", "uniqueItems"),
        ({"response_format": schema_format(False)}, "response_format", "Unsatisfiable"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "choice"),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, "structured_outputs", "goes with"),
        ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs", "response_format"),
        ({"structured_outputs": {"disable_any_whitespace": True}, "regex": "a"}, "structured_outputs", "ask for some"),
        ({"structured_outputs": {"disable_any_whitespace": False}}, "structured_outputs", "exactly one"),
        ({"disable_any_whitespace": True}, "disable_any_whitespace", "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "no JSON"),
        ({"structured_outputs": {"json": "3"}}, "structured_outputs", "no JSON Schema"),
        ({"structured_outputs": {"json": {}}, "response_format": schema_format({})}, "structured_outputs", "either"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 3, "max_tokens": 9}, "min_tokens", "grammar"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_refused(shared: Served, path: str, fields: dict[str, Any], param: str, told: str) -> None:
    prompt: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": "a"}
    before = shared.runner.num_steps
    status, error = await shared.refused(path, {**prompt, **fields})
    assert (status, error["param"]) == (400, param)
    assert told in error["message"]
    assert shared.runner.num_steps == before


async def test_text_asks_for_nothing() -> None:
    async with serving([[*b"any"], [EOS]]) as server:
        assert (await server.chat(response_format={"type": "text"}))["choices"][0]["message"]["content"] == "any"


async def test_an_answer_that_is_cut_says_so() -> None:
    async with serving(split('{"a": 1}', 4, 4)) as server:
        answer = await server.chat(response_format={"type": "json_object"}, max_tokens=6)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["message"]["content"] == '{"a": '
