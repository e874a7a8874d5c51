"""Tools of a chat: what clients send, how the model learns of them, and its calls in OpenAI's form."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from hamburger.engine.text.grammar_source import GrammarSource
from hamburger.engine.text.json_schema import with_parts
from hamburger.engine.types.errors import InvalidRequest, shown
from hamburger.server.schema import Schema, one_of
from hamburger.server.server_tokenizer import ServerTokenizer
from hamburger.server.tools.strict_calls import strict_rules
from hamburger.server.tools.tool_parsers import (
    MARKERS,
    Family,
    Parsed,
    Parser,
    arguments_parser,
    list_parser,
    parser_of,
    utf8,
)
from hamburger.server.tools.value_ends import ValueEnds

_MOST_CALLS = 16  # that a grammar lets a model make at once
_ID_CHARACTERS = string.ascii_letters + string.digits


FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class Function(Schema):
    """strict: a call that the model chooses to make follows the schema. Where a call is forced, it always does."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def arguments_schema(self) -> dict[str, Any]:
        """Arguments are an object, also where the schema does not say so."""
        return {"type": "object", **(self.parameters or {})}


class Tool(Schema):
    type: Literal["function"]
    function: Function


class NamedFunction(Schema):
    name: str


class NamedChoice(Schema):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedChoice,
    one_of('"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'),
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


class ToolUse:
    """The tools of one request. `family` is the model's way to write calls, where no grammar says another.

    grammar: what the answer must be, where a call is forced; else None (see strict_grammar).
    is_named: one function is forced, so that its call is no choice of the model (OpenAI then says `stop`).
    """

    def __init__(
        self, tools: Sequence[Tool], choice: ToolChoice | None, family: Family, *, parallel: bool = True
    ) -> None:
        """Raises InvalidRequest that names tools or tool_choice."""
        names = [tool.function.name for tool in tools]
        if len(set(names)) < len(names):
            raise InvalidRequest("tools holds two functions of one name.", "tools")
        self.for_template = [tool.model_dump(exclude_none=True) for tool in tools]
        self.grammar: GrammarSource | None = None
        self.is_named = False
        self.parser: Parser
        self.family, self.parallel = family, parallel
        self._functions = [tool.function for tool in tools]
        if isinstance(choice, NamedChoice):
            chosen = [tool for tool in tools if tool.function.name == choice.function.name]
            if not chosen:
                raise InvalidRequest(
                    f"tool_choice names {shown(choice.function.name)}, which is no tool here.", "tool_choice"
                )
            self.is_named = True
            self.grammar = GrammarSource("json", chosen[0].function.arguments_schema())
            self.parser = arguments_parser(choice.function.name)
        elif choice == "required":
            self.grammar = GrammarSource("json", _list_schema(tools, _MOST_CALLS if parallel else 1))
            self.parser = list_parser
        else:
            self.parser = parser_of(family, names)

    def strict_grammar(self, tokenizer: ServerTokenizer) -> GrammarSource | None:
        """What holds an answer to the schemas of strict functions, should it call one; None where none is strict, or a
        call is forced."""
        if self.grammar is not None or not any(function.strict for function in self._functions):
            return None
        names = [function.name for function in self._functions]
        schemas = [f.arguments_schema() if f.strict else {"type": "object"} for f in self._functions]
        rules = strict_rules(self.family, names, partial(_special_token, tokenizer))
        return GrammarSource("calls", (rules, schemas))

    def shows_special_tokens(self, tokenizer: ServerTokenizer) -> bool:
        """Whether the model writes a call with a special token, which its text must not lack then."""
        if self.grammar is not None:
            return False
        return any(_special_token(tokenizer, marker) is not None for marker in MARKERS[self.family])

    def stream(self, end_texts: Sequence[str] = ()) -> ToolStream:
        """For one choice. end_texts: what the model's end tokens look like, where special tokens are shown."""
        return ToolStream(self, end_texts)


def _special_token(tokenizer: ServerTokenizer, marker: str) -> int | None:
    """The id of a marker that is one special token."""
    ids = tokenizer.encode(marker)
    return ids[0] if len(ids) == 1 and tokenizer.is_special(ids[0]) else None


def _list_schema(tools: Sequence[Tool], most: int) -> dict[str, Any]:
    """A list of calls. Each function's schema moves to $defs, and its own references with it."""
    schemas: dict[str, Any] = {}
    calls = []
    for i, tool in enumerate(tools):
        root = f"#/$defs/tool{i}"
        schemas[f"tool{i}"] = _moved(tool.function.arguments_schema(), root)
        properties = {"name": {"const": tool.function.name}, "arguments": {"$ref": root}}
        required = ["name", "arguments"]
        calls.append({"type": "object", "properties": properties, "required": required, "additionalProperties": False})
    return {"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": calls}, "$defs": schemas}


def _moved(schema: Any, root: str) -> Any:
    """A schema whose references to its own root point to where that is now. One with an `$id` is a root anywhere."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict) or isinstance(schema.get("$id"), str):
        return schema
    moved = with_parts(schema, partial(_moved, root=root))
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):  # else it is an anchor's name
        moved["$ref"] = root + reference[1:]
    return moved


class ToolStream:
    """The calls of one choice as they come: text in, what it adds to the message out."""

    def __init__(self, use: ToolUse, end_texts: Sequence[str]) -> None:
        self._use = use
        self._end_texts = end_texts
        self._text, self._ends = "", ValueEnds()
        self._content_size = 0
        self._arguments_sizes: list[int] = []
        self._ids: list[str] = []

    def reason(self, finish_reason: str | None) -> str | None:
        """OpenAI's finish_reason: calls that the model chose to make are its reason to stop."""
        return "tool_calls" if finish_reason == "stop" and self._ids and not self._use.is_named else finish_reason

    def add(self, text: str, *, is_final: bool) -> dict[str, Any]:
        """The delta: new content, and tool_calls with what is new of each; {} where nothing is sure yet."""
        self._text += text
        parsed = self._parse(is_final)
        delta: dict[str, Any] = {}
        if content := parsed.content[self._content_size :]:
            delta["content"] = content
            self._content_size = len(parsed.content)
        pieces = []
        for index, call in enumerate(parsed.calls):
            piece: dict[str, Any] = {"index": index}
            function: dict[str, str] = {}
            if index == len(self._ids):
                self._ids.append(self._new_id())
                self._arguments_sizes.append(0)
                piece |= {"id": self._ids[index], "type": "function"}
                function["name"] = call.name
            if (new := call.arguments[self._arguments_sizes[index] :]) or "name" in function:
                function["arguments"] = new
                self._arguments_sizes[index] = len(call.arguments)
                pieces.append(piece | {"function": function})
        return delta | {"tool_calls": pieces} if pieces else delta

    def message(self, text: str) -> tuple[str | None, list[dict[str, Any]]]:
        """Content and tool_calls of a whole answer."""
        self._text, self._ends = text, ValueEnds()
        parsed = self._parse(True)
        self._ids = [self._new_id() for _ in parsed.calls]
        calls = [
            {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call_id, call in zip(self._ids, parsed.calls, strict=True)
        ]
        return parsed.content or (None if calls else ""), calls

    def _parse(self, is_final: bool) -> Parsed:
        text = self._text
        if is_final:
            for end_text in self._end_texts:
                text = text.removesuffix(end_text)
            self._ends = ValueEnds()  # the text may be shorter now
        parsed = self._use.parser(text, is_final, self._ends)
        return parsed if self._use.parallel else Parsed(parsed.content, parsed.calls[:1])

    def _new_id(self) -> str:
        if self._use.family == "mistral":  # its templates insist on nine letters and digits
            return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def messages_with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> list[dict[str, Any]]:
    """For a chat template that knows nothing of tools: they are described in the system message, calls become text."""
    rewritten = [dict(message) for message in messages]
    for message in rewritten:
        if calls := message.pop("tool_calls", None):
            text = json.dumps([call["function"] for call in calls], ensure_ascii=False)
            message["content"] = f"{message['content']}\n{text}".strip()
    if not tools:
        return rewritten
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    system = (
        "You can call these functions:\n"
        f"{functions}\n"
        'To call one, answer with nothing but JSON: {"name": "the function", "arguments": {...}}. '
        "For several calls, answer with a JSON list of these. Else answer in words."
    )
    if rewritten and rewritten[0]["role"] == "system":
        system = f"{rewritten[0]['content']}\n\n{system}"
        rewritten = rewritten[1:]
    return [{"role": "system", "content": system}, *rewritten]


def results_as_user(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For a chat template that leaves out the role `tool`: its messages come from the user, in one turn with what else
    the user says there, as such templates often want turns to alternate."""
    names = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
    rewritten: list[dict[str, Any]] = []
    follows_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            name = names.get(message.get("tool_call_id"), "the call")
            message = {"role": "user", "content": f"Result of {name}: {message['content']}"}
        if follows_result and message["role"] == "user":
            rewritten[-1]["content"] += f"\n\n{message['content']}"
        else:
            rewritten.append(dict(message))
        follows_result = is_result or (follows_result and message["role"] == "user")
    return rewritten
