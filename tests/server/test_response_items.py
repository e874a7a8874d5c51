"""The items of a response's input: as its clients know them when they ask for them, and as turns of a chat."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from hamburger.server.responses.items import Items, turns_of
from responses_api import RESPONSES, client
from serving import MODEL, error_of

ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)
ITEMS: TypeAdapter[Any] = TypeAdapter(Items)
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}"}
INPUT: list[Any] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    THOUGHT,
    {"type": "message", "id": "msg_9", "role": "assistant", "status": "completed", "content": [
        {"type": "output_text", "text": "Yes.", "annotations": []}, {"type": "refusal", "refusal": "No."},
    ]},
    {"role": "assistant", "content": "yes"},
    {"type": "reasoning", "summary": []},
    {**CALL, "status": "completed"},
    {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    {**CALL, "call_id": "c2"},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
    {"role": "user", "content": "And?"},
]  # fmt: skip


async def test_input_items_are_what_openai_s_client_takes_them_for() -> None:
    async with client() as (api, server):
        response = await api.responses.create(model=MODEL, input=INPUT)
        page = (await server.client.get(f"{RESPONSES}/{response.id}/input_items?order=asc&limit=100")).json()
        listed = [item.id async for item in api.responses.input_items.list(response.id, order="asc", limit=2)]
    data = page["data"]
    for item in data:
        ITEM.validate_python(item, strict=True)
        assert item["status"] == "completed"
    ids = [item["id"] for item in data]
    assert len(set(ids)) == len(ids) == len(INPUT)
    assert listed == ids
    assert [ids[i] for i in (0, 2, 3, 6)] == ["item_0", "rs_1", "msg_9", "fc_1"]
    assert ids[8] != "fc_1"  # another item has it
    assert data[3]["content"] == INPUT[3]["content"]
    assert data[4]["content"] == [{"type": "output_text", "text": "yes", "annotations": []}]
    assert (data[2]["content"], data[2]["summary"]) == (THOUGHT["content"], [])


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}


def said(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


@pytest.mark.parametrize(
    ("items", "reasoning"),
    [
        ([said("user", "a"), thought("A"), thought("B"), said("assistant", "b")], [None, "AB"]),
        ([said("user", "a"), thought("A"), said("assistant", "b"), thought("B"), CALL], [None, "AB"]),
        ([thought("A"), CALL, said("user", "a"), said("assistant", "b")], ["A", None, None]),
    ],
)
def test_no_reasoning_is_lost(items: list[dict[str, Any]], reasoning: list[str | None]) -> None:
    turns = turns_of(ITEMS.validate_python(items))
    assert [turn.get("reasoning_content") for turn in turns] == reasoning


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"input": [thought("A")]}, "input", "ends with reasoning"),
        ({"input": [said("user", "a"), thought("A")]}, "input", "ends with reasoning"),
        ({"input": {}}, "input", "a text or a list of items"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": None}]}, "input", "a text or a list"),
        ({"input": [5]}, "input", "input[0]: it must be an object"),
        ({"tools": [{"type": "web_search"}]}, "tools", "the server runs no tools"),
        ({"reasoning": {"summary": "auto"}}, "reasoning", "no summary is made"),
        ({"reasoning": {"generate_summary": "concise"}}, "reasoning", "no summary is made"),
        ({"text": 5}, "text", "it must be an object"),
    ],
)
async def test_what_is_wrong_is_told_by_name(fields: dict[str, Any], param: str, told: str) -> None:
    async with client() as (_, server):
        response = await server.post(RESPONSES, {"input": "Hi", **fields})
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param)
    assert told in error["message"]
