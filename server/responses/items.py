"""The input of the Responses API: its items, and the turns of a chat that they are."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from hamburger.engine.types.errors import InvalidRequest
from hamburger.server.schema import ListOf, Schema

MAX_ITEMS = 10_000  # some hundredths of a second, which everybody waits for
_STRING_OR_LIST = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]})


def _parts(content: Any) -> Any:
    if isinstance(content, str):
        return [{"type": "input_text", "text": content}]
    if not isinstance(content, list):
        raise ValueError("it must be a text or a list of parts")
    return content


def _items(value: Any) -> Any:
    """Messages need not say that they are."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise ValueError("it must be a text or a list of items")
    return [{"type": "message", **item} if isinstance(item, dict) and "role" in item else item for item in value]


class TextPart(Schema):
    type: Literal["input_text", "output_text", "text"]
    text: str

    def stored(self, role: str) -> dict[str, Any]:
        """As part of a message of this role."""
        if role == "assistant":
            return {"type": "output_text", "text": self.text, "annotations": []}
        return {"type": "input_text", "text": self.text}


class RefusalPart(Schema):
    type: Literal["refusal"]
    refusal: str

    def stored(self, role: str) -> dict[str, Any]:
        """As TextPart; only an assistant refuses."""
        if role == "assistant":
            return {"type": "refusal", "refusal": self.refusal}
        return {"type": "input_text", "text": self.refusal}


Part = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
Parts = Annotated[ListOf[Part], BeforeValidator(_parts), _STRING_OR_LIST]


class InputItem(Schema):
    """id: the client's own, if it has one."""

    id: str | None = None

    def stored(self) -> dict[str, Any]:
        """As `input_items` gives it."""
        return {**self.model_dump(exclude_none=True), "status": "completed"}


class InputMessage(InputItem):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts

    def stored(self) -> dict[str, Any]:
        return super().stored() | {"content": [part.stored(self.role) for part in self.content]}


class FunctionCall(InputItem):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(InputItem):
    type: Literal["function_call_output"]
    call_id: str
    output: Parts

    def stored(self) -> dict[str, Any]:
        return super().stored() | {"output": [part.stored("user") for part in self.output]}


class ReasoningText(Schema):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(InputItem):
    """What the model wrote for itself; what others hid is left out."""

    type: Literal["reasoning"]
    content: ListOf[ReasoningText] | None = None

    def stored(self) -> dict[str, Any]:
        return super().stored() | {"summary": []}


Item = Annotated[InputMessage | FunctionCall | FunctionCallOutput | ReasoningItem, Field(discriminator="type")]
Items = Annotated[ListOf[Item], BeforeValidator(_items), Field(min_length=1, max_length=MAX_ITEMS), _STRING_OR_LIST]


def with_ids(items: Sequence[Item]) -> list[dict[str, Any]]:
    """As `input_items` gives them: each with an id of its own, the client's where it has one."""
    found: dict[str, dict[str, Any]] = {}
    for number, item in enumerate(items):
        item_id = item.id or f"item_{number}"
        while item_id in found:
            item_id = f"item_{uuid.uuid4().hex}"
        found[item_id] = {**item.stored(), "id": item_id}
    return list(found.values())


def turns_of(items: Sequence[Item]) -> list[dict[str, Any]]:
    """The input as messages of a chat. Calls belong to the assistant's message before them.

    Raises InvalidRequest for reasoning that nothing follows.
    """
    turns: list[dict[str, Any]] = []
    thoughts: list[str] = []  # of the assistant's next turn
    for item in items:
        match item:
            case ReasoningItem():
                thoughts += [part.text for part in item.content or ()]
                continue
            case InputMessage():
                turns.append({"role": item.role, "content": _text(item.content)})
            case FunctionCall():
                if not turns or turns[-1]["role"] != "assistant":
                    turns.append({"role": "assistant", "content": ""})
                turns[-1].setdefault("tool_calls", []).append(call_of_chat(item.call_id, item.name, item.arguments))
            case FunctionCallOutput():
                turns.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        if thoughts and turns[-1]["role"] == "assistant":
            thoughts.insert(0, turns[-1].get("reasoning_content", ""))
            turns[-1]["reasoning_content"] = "".join(thoughts)
        thoughts = []
    if isinstance(items[-1], ReasoningItem):
        message = "input ends with reasoning, which goes before what the assistant says after it: add that."
        raise InvalidRequest(message, "input")
    return turns


def call_of_chat(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _text(parts: Sequence[TextPart | RefusalPart]) -> str:
    return "\n".join(part.text if isinstance(part, TextPart) else part.refusal for part in parts)
