"""What clients send of tools: functions, which of them may be called, and calls that were made."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from hamburger.engine.types.errors import cut
from hamburger.server.schema import ListOf, Schema, one_of
from hamburger.server.tools.json_calls import utf8

MAX_TOOLS = 128
FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,128}$")]  # as Anthropic has it; OpenAI's have 64


def _of_an_object(schema: dict[str, Any]) -> dict[str, Any]:
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise ValueError(f"its type is {cut(json.dumps(kind))}: it must be object, as arguments have names")
    return schema


Parameters = Annotated[dict[str, Any], AfterValidator(_of_an_object)]  # a JSON Schema


class Function(Schema):
    """strict: a call that the model chooses to make follows the schema. Where a call is forced, it always does."""

    name: FunctionName
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None

    def arguments_schema(self) -> dict[str, Any]:
        """Arguments are an object, also where the schema does not say so; without one there are none."""
        if self.parameters is None:
            return {"type": "object", "additionalProperties": False}
        return {**self.parameters, "type": "object"}

    def own_schema(self) -> dict[str, Any]:
        """What holds the arguments of a call that the model chooses to make."""
        return self.arguments_schema() if self.strict else {"type": "object"}


class Tool(Schema):
    type: Literal["function"]
    function: Function


class NamedFunction(Schema):
    name: str


class NamedChoice(Schema):
    type: Literal["function"]
    function: NamedFunction


class AllowedFunctions(Schema):
    mode: Literal["auto", "required"]
    tools: ListOf[NamedChoice] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedTools(Schema):
    """The model is told of all tools, and may call only these."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedChoice | AllowedTools,
    one_of(
        '"none", "auto", "required", {"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", '
        '"allowed_tools": {"mode": "auto" or "required", "tools": [{"type": "function", "function": {"name": ...}}]}}'
    ),
]


class CalledFunction(Schema):
    name: str
    arguments: str


class MadeCall(Schema):
    """A call in an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it: the arguments as an object."""
        function = {"name": self.function.name, "arguments": arguments_object(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": function}


def is_object(arguments: str) -> bool:
    """Whether a call's arguments are whole."""
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


def arguments_object(arguments: str) -> dict[str, Any]:
    """A call's arguments as the object that templates and other APIs want. Of what is none it is empty, as vLLM has it:
    a model wrote them, or began to, and the conversation must be able to go on."""
    try:
        value = json.loads(arguments or "{}")
        if "\\u" in arguments:
            value = json.loads(utf8(json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
