"""What clients of the Messages API send, and the chat that it is."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from hamburger.engine.types.errors import InvalidRequest
from hamburger.server.bodies.answer_format import ResponseFormat
from hamburger.server.bodies.known_fields import REFUSED_COUNT, REFUSED_MESSAGE
from hamburger.server.bodies.refusals import Refused
from hamburger.server.schema import ListOf, Schema, one_of
from hamburger.server.tools.tool_fields import MAX_TOOLS, FunctionName, Parameters

MAX_TURNS = 10_000  # some hundredths of a second, which everybody waits for
MAX_ARGUMENTS = 500_000  # characters of one call's
# Where the chat's fields have other names there.
NAMES = {
    "max_completion_tokens": "max_tokens", "stop": "stop_sequences", "response_format": "output_config",
    "continue_final_message": "messages", "reasoning_effort": "output_config", "thinking_token_budget": "thinking",
}  # fmt: skip


class TextBlock(Schema):
    type: Literal["text"]
    text: str


class ToolUseBlock(Schema):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ThinkingBlock(Schema):
    """What the model wrote for itself; what others hid is left out."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""


def _blocks(content: Any) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise ValueError("it must be a text or a list of blocks")
    return content


_TEXT_OR_BLOCKS = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]})
Text = Annotated[ListOf[TextBlock], BeforeValidator(_blocks), _TEXT_OR_BLOCKS]


class ToolResultBlock(Schema):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Text | None = None
    is_error: bool | None = None


Block = Annotated[TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock, Field(discriminator="type")]
Blocks = Annotated[ListOf[Block], BeforeValidator(_blocks), _TEXT_OR_BLOCKS]
_AUTHORS = {"tool_use": "assistant", "thinking": "assistant", "redacted_thinking": "assistant", "tool_result": "user"}


class MessageParam(Schema):
    role: Literal["user", "assistant", "system"]
    content: Blocks

    @model_validator(mode="after")
    def _is_by_who_writes_such(self) -> Self:
        for block in self.content:
            author = _AUTHORS.get(block.type, self.role)
            if self.role != author:
                raise ValueError(f"a block of the type {block.type} is in a message of the role {author} alone")
        return self

    def turns(self) -> Iterator[dict[str, Any]]:
        """The messages of a chat that it is: results of tools are messages of their own there."""
        texts: list[str] = []
        thoughts = "".join(block.thinking for block in self.content if isinstance(block, ThinkingBlock))
        thought = {"reasoning_content": thoughts} if thoughts else {}
        calls: list[dict[str, Any]] = []
        for block in self.content:
            match block:
                case TextBlock():
                    texts.append(block.text)
                case ToolUseBlock():
                    arguments = json.dumps(block.input, ensure_ascii=False)
                    if len(arguments) > MAX_ARGUMENTS:
                        message = f"The input of a tool_use has {len(arguments):,} characters, but at most "
                        raise InvalidRequest(f"{message}{MAX_ARGUMENTS:,} are allowed.", "messages")
                    function = {"name": block.name, "arguments": arguments}
                    calls.append({"id": block.id, "type": "function", "function": function})
                case ToolResultBlock():
                    if texts:
                        yield {"role": self.role, "content": "\n".join(texts)}
                        texts = []
                    yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": text_of(block.content or ())}
        if calls:
            yield {"role": self.role, **thought, "content": "\n".join(texts), "tool_calls": calls}
        elif texts or not any(isinstance(block, ToolResultBlock) for block in self.content):
            yield {"role": self.role, **thought, "content": "\n".join(texts)}


class MessageTool(Schema):
    """A tool that the client runs; strict: its input follows the schema."""

    type: Annotated[Literal["custom"] | None, one_of('"custom": the server runs no tools')] = None
    name: FunctionName
    description: str | None = None
    input_schema: Parameters
    strict: bool | None = None
    defer_loading: Annotated[Literal[False] | None, one_of("false: the model is told of all tools")] = None
    allowed_callers: Annotated[
        ListOf[Literal["direct"]] | None, one_of('["direct"]: only the model calls tools, and the client runs them')
    ] = None


class MessageToolChoice(Schema):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _has_name(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name goes with the type tool, and no other")
        return self

    def of_chat(self) -> Any:
        if self.name is not None:
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class OutputFormat(Schema):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Schema):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class ThinkingConfig(Schema):
    """adaptive: as the model does anyway. enabled: so many tokens at most. omitted: it is not told."""

    type: Literal["disabled", "adaptive", "enabled"]
    budget_tokens: int | None = Field(None, ge=0)
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _has_budget(self) -> Self:
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise ValueError("budget_tokens goes with the type enabled, and no other")
        return self


class PromptBody(Schema):
    """POST /v1/messages/count_tokens: what makes the prompt."""

    refused: ClassVar[dict[str, Refused]] = REFUSED_COUNT

    model: str | None = None
    messages: ListOf[MessageParam] = Field(min_length=1, max_length=MAX_TURNS)
    system: Text | None = None
    tools: ListOf[MessageTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: MessageToolChoice | None = None
    output_config: OutputConfig | None = None
    thinking: ThinkingConfig | None = None

    def chat(self) -> dict[str, Any]:
        """The same as a body of /v1/chat/completions."""
        turns = [turn for message in self.messages for turn in message.turns()]
        if system := text_of(self.system or ()):
            turns.insert(0, {"role": "system", "content": system})
        chat: dict[str, Any] = {"model": self.model, "messages": turns}
        if self.messages[-1].role == "assistant":  # the answer goes on with it
            chat["continue_final_message"] = True
        if self.tools:
            chat["tools"] = [_of_chat(tool) for tool in self.tools]
        if self.tool_choice is not None:
            chat["tool_choice"] = self.tool_choice.of_chat()
            chat["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        if self.thinking is not None:
            chat["thinking_token_budget"] = self.thinking.budget_tokens
            chat["include_reasoning"] = self.thinking.display != "omitted"
        if self.thinking is not None and self.thinking.type == "disabled":
            chat["reasoning_effort"] = "none"
        elif self.output_config is not None:
            chat["reasoning_effort"] = self.output_config.effort
        if self.output_config is not None and (wanted := self.output_config.format) is not None:
            chat["response_format"] = ResponseFormat(type="json_schema", schema=wanted.schema_).model_dump()
        return chat


class MessagesBody(PromptBody):
    """POST /v1/messages."""

    refused: ClassVar[dict[str, Refused]] = REFUSED_MESSAGE

    max_tokens: int = Field(ge=1)
    stop_sequences: ListOf[str] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = None
    top_k: int | None = None
    confidence: float | None = Field(None, description="As in chat completions.")
    settle: bool | None = Field(None, description="As in chat completions.")
    seed: int | None = Field(None, description="As in chat completions.")

    def chat(self) -> dict[str, Any]:
        last = self.messages[-1]
        if any(isinstance(block, ToolUseBlock) for block in last.content):
            raise InvalidRequest("The last message has a tool_use: send its tool_result behind it.", "messages")
        is_forced = self.tool_choice is not None and self.tool_choice.type in ("any", "tool")
        has_format = self.output_config is not None and self.output_config.format is not None
        if last.role == "assistant" and (is_forced or has_format):
            what = "a forced call" if is_forced else "a format"
            message = (
                f"An answer with {what} begins anew, and does not go on with an assistant's message: leave it out."
            )
            raise InvalidRequest(message, "messages")
        same = ("stream", "temperature", "top_p", "top_k", "confidence", "settle", "seed")
        fields = {name: getattr(self, name) for name in same}
        limits = {"max_completion_tokens": self.max_tokens, "stop": self.stop_sequences}
        return {**super().chat(), **fields, **limits}


def text_of(blocks: Iterable[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks)


def _of_chat(tool: MessageTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description, "strict": tool.strict}
    function["parameters"] = tool.input_schema
    return {"type": "function", "function": function}
