"""Schemas of tools' arguments: what they must be, what stands where there is none, and names that tools share."""

from __future__ import annotations

import json
from typing import Any

import pytest

from byte_grammars import takes
from hamburger.engine.grammar.writing import json_grammar
from hamburger.engine.types.errors import InvalidRequest
from hamburger.server.tools.call_schemas import format_or_call, list_of_calls
from hamburger.server.tools.tool_fields import Function
from serving import CHAT, HELLO, serving


def function(name: str, parameters: Any = None, **fields: Any) -> Function:
    return Function(name=name, parameters=parameters, **fields)


def calls(*functions: Function) -> str:
    return json_grammar(list_of_calls(functions, 2))


def call(name: str, arguments: Any) -> str:
    return json.dumps([{"name": name, "arguments": arguments}])


def constant(value: int, **names: str) -> dict[str, Any]:
    """Arguments with an `x` of this value, which is told by a reference."""
    return {"$defs": {"i": {"const": value, **names}}, "properties": {"x": {"$ref": "#/$defs/i"}}, "required": ["x"]}


def test_without_a_schema_there_are_no_arguments() -> None:
    grammar = calls(function("now"))
    assert [takes(grammar, call("now", of)) for of in ({}, {"a": 1})] == [True, False]
    assert takes(calls(function("any", {})), call("any", {"a": 1}))


@pytest.mark.parametrize("kind", ["boolean", "array", ["string", "null"]])
async def test_arguments_that_are_no_object_are_refused_by_name(kind: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": kind}}}
    async with serving([[104]]) as server:
        status, error = await server.refused(CHAT, {"messages": HELLO, "tools": [tool]})
    assert (status, error["param"]) == (400, "tools")
    assert "tools[0].function.parameters: its type is" in error["message"]
    assert "must be object" in error["message"]


def test_an_object_or_nothing_is_an_object() -> None:
    grammar = calls(function("f", {"type": ["object", "null"], "properties": {"a": {"const": 1}}}))
    assert [takes(grammar, call("f", of)) for of in ({"a": 1}, None)] == [True, False]


@pytest.mark.parametrize("names", [{"$id": "item"}, {"$anchor": "q"}, {"$dynamicAnchor": "q"}])
def test_tools_that_call_different_schemas_by_one_name_are_refused(names: dict[str, str]) -> None:
    tools = [function("f", constant(7, **names)), function("g", constant(8, **names))]
    [(key, name)] = names.items()
    with pytest.raises(InvalidRequest, match=rf"different schemas of the \{key} '{name}': rename one"):
        list_of_calls(tools, 2)
    with pytest.raises(InvalidRequest, match="rename one"):
        format_or_call(constant(9, **names), [function("f", constant(7, **names), strict=True)], 2)


def test_a_propertys_name_hides_no_schema() -> None:
    def of(kind: str) -> dict[str, Any]:
        return {"properties": {"default": {"$id": "https://x.y/u", "type": kind}, "p": {"$ref": "https://x.y/u"}}}

    with pytest.raises(InvalidRequest, match="rename one"):
        list_of_calls([function("f", of("integer")), function("g", of("string"))], 2)


@pytest.mark.parametrize(
    ("path", "tool", "place"),
    [
        ("/v1/messages", {"name": "f", "input_schema": {"type": "array"}}, "tools[0].input_schema"),
        ("/v1/responses", {"type": "function", "name": "f", "parameters": {"type": None}}, "tools[0].parameters"),
    ],
)
async def test_it_is_named_as_the_client_wrote_it(path: str, tool: dict[str, Any], place: str) -> None:
    asked = {"input": "a"} if path == "/v1/responses" else {"messages": HELLO, "max_tokens": 5}
    async with serving([[104]]) as server:
        answer = await server.client.post(path, json=asked | {"tools": [tool]})
    assert answer.status_code == 400
    assert f"{place}: its type is " in answer.json()["error"]["message"]


def test_tools_may_share_a_schema_by_its_name() -> None:
    whole = {"$id": "http://x/y", **constant(7)}
    grammar = calls(function("f", whole), function("g", whole))
    assert [takes(grammar, call(name, {"x": x})) for name in "fg" for x in (7, 8)] == [True, False] * 2


async def test_a_strict_schema_that_cannot_be_used_is_told_without_our_rules() -> None:
    parameters = {"properties": {"a": {"type": "array", "uniqueItems": True}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}
    async with serving([[104]]) as server:
        _, error = await server.refused(CHAT, {"messages": HELLO, "tools": [tool]})
    assert error["message"] == 'The grammar cannot be used: Unimplemented keys: ["uniqueItems"].'


@pytest.mark.parametrize("choice", ["required", "auto"])
async def test_of_several_tools_the_one_whose_schema_cannot_be_used_is_named(choice: str) -> None:
    parameters = [{}, {"properties": {"a": {"type": "array", "uniqueItems": True}}}, {"not": {}}]
    functions = [{"name": name, "parameters": of, "strict": True} for name, of in zip("fgh", parameters, strict=True)]
    tools = [{"type": "function", "function": function} for function in functions]
    async with serving([[104]]) as server:
        _, error = await server.refused(CHAT, {"messages": HELLO, "tools": tools, "tool_choice": choice})
    assert error["message"] == "The tool 'g': The grammar cannot be used: Unimplemented keys: [\"uniqueItems\"]."
    assert error["param"] == "tools"


@pytest.mark.parametrize("field", ["guided_json", "json_schema"])
async def test_a_schema_of_another_type_is_told_its_forms(field: str) -> None:
    async with serving([[104]]) as server:
        _, error = await server.refused(CHAT, {"messages": HELLO, field: [1]})
    assert error["message"] == f"{field}: it must be a JSON Schema (an object, true or false), or the text of one."


async def test_a_body_that_is_nested_too_deeply_is_told_so() -> None:
    deep = json.loads("[" * 150 + "]" * 150)
    async with serving([[104]]) as server:
        answer = await server.client.post(CHAT, json={"messages": HELLO, "metadata": {"a": [deep, [deep]]}})
        deeper = await server.client.post(
            CHAT, content='{"a": ' + "[" * 300 + "]" * 300 + "}", headers={"Content-Type": "application/json"}
        )
    assert "nested too deeply" not in answer.text
    assert deeper.json()["error"]["message"] == "The request's body is nested too deeply: have fewer levels."
