"""What clients of the Responses API send, and the chat that it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from hamburger.engine.types.errors import InvalidRequest
from hamburger.server.bodies.known_fields import REFUSED_RESPONSE
from hamburger.server.bodies.refusals import Refused
from hamburger.server.responses.items import Items
from hamburger.server.schema import ListOf, Schema, one_of
from hamburger.server.tools.reasoning import EFFORTS
from hamburger.server.tools.tool_fields import MAX_TOOLS, FunctionName, Parameters

# Where the chat's fields have other names there.
NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text",
         "logprobs": "top_logprobs", "reasoning_effort": "reasoning", "continue_final_message": "input"}  # fmt: skip


class ResponseTool(Schema):
    """A function; strict: a call of it follows its parameters."""

    type: Annotated[Literal["function"], one_of('"function": the server runs no tools')]
    name: FunctionName
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class NamedTool(Schema):
    type: Literal["function"]
    name: str


class AllowedTools(Schema):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: ListOf[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS)


ChosenTool = Annotated[
    Literal["none", "auto", "required"] | NamedTool | AllowedTools,
    one_of(
        '"none", "auto", "required", {"type": "function", "name": ...} or {"type": "allowed_tools", '
        '"mode": "auto" or "required", "tools": [{"type": "function", "name": ...}]}'
    ),
]


class TextFormat(Schema):
    model_config = ConfigDict(serialize_by_alias=True)

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if self.schema_ is not None and self.type != "json_schema":
            raise ValueError("schema goes with the type json_schema, and no other")
        if self.schema_ is None and self.type == "json_schema":
            raise ValueError("the type json_schema needs schema")
        return self

    def of_chat(self) -> dict[str, Any]:
        return {"type": self.type} if self.schema_ is None else {"type": self.type, "schema": self.schema_}


class TextConfig(Schema):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


_NO_SUMMARY = one_of("null: no summary is made, as all that the model writes for itself is told")


class ReasoningConfig(Schema):
    summary: Annotated[None, _NO_SUMMARY] = None
    generate_summary: Annotated[None, _NO_SUMMARY] = None
    effort: Literal[EFFORTS] | None = None  # type: ignore[valid-type]


def _as_in_chat() -> Any:
    return Field(None, description="As in chat completions.")


class FieldsOfChat(Schema):
    """What OpenAI's form lacks and other servers' clients send; the chat's body checks them."""

    confidence: Any = _as_in_chat()
    settle: Any = _as_in_chat()
    seed: Any = _as_in_chat()
    top_k: Any = _as_in_chat()
    min_p: Any = _as_in_chat()
    min_tokens: Any = _as_in_chat()
    stop: Any = _as_in_chat()
    stop_token_ids: Any = _as_in_chat()
    include_stop_str_in_output: Any = _as_in_chat()
    no_stop_trim: Any = _as_in_chat()
    ignore_eos: Any = _as_in_chat()
    presence_penalty: Any = _as_in_chat()
    frequency_penalty: Any = _as_in_chat()
    repetition_penalty: Any = _as_in_chat()
    logit_bias: Any = _as_in_chat()
    allowed_token_ids: Any = _as_in_chat()
    bad_words: Any = _as_in_chat()
    skip_special_tokens: Any = _as_in_chat()
    structured_outputs: Any = _as_in_chat()
    guided_json: Any = _as_in_chat()
    guided_regex: Any = _as_in_chat()
    guided_choice: Any = _as_in_chat()
    guided_grammar: Any = _as_in_chat()
    json_schema: Any = _as_in_chat()
    regex: Any = _as_in_chat()
    ebnf: Any = _as_in_chat()
    grammar: Any = _as_in_chat()
    enable_thinking: Any = _as_in_chat()
    thinking_token_budget: Any = _as_in_chat()
    truncate_prompt_tokens: Any = _as_in_chat()
    truncation_side: Any = _as_in_chat()
    priority: Any = _as_in_chat()
    cache_salt: Any = _as_in_chat()
    chat_template_kwargs: Any = _as_in_chat()


class ResponsesBody(FieldsOfChat):
    """POST /v1/responses."""

    refused: ClassVar[Mapping[str, Refused]] = REFUSED_RESPONSE

    model: str | None = None
    input: Items
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    metadata: dict[str, str] | None = Field(None, max_length=16)
    previous_response_id: str | None = None
    store: bool | None = Field(None, description="Whether it can be asked for, and gone on with, later: yes.")
    background: bool | None = Field(None, description="Answer at once; the response is to be asked for.")
    stream: bool | None = None
    include: ListOf[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: ListOf[ResponseTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    user: str | None = None

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    def check(self) -> None:
        """Raise InvalidRequest for fields that do not go together."""
        if self.background and not self.is_stored:
            raise InvalidRequest("background is true, but store is false: nobody could ask for it.", "background")
        if self.background and self.stream:
            raise InvalidRequest("A response in the background is not streamed: leave one of them out.", "stream")

    def chat(self, turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A body of /v1/chat/completions. turns: what was said before, and the input's."""
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        same = ("model", "stream", "temperature", "top_p", "parallel_tool_calls", *FieldsOfChat.model_fields)
        chat: dict[str, Any] = {name: getattr(self, name) for name in same}
        chat |= {"messages": [*instructions, *turns], "max_completion_tokens": self.max_output_tokens}
        if self.top_logprobs is not None or "message.output_text.logprobs" in (self.include or ()):
            chat |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if self.reasoning is not None:
            chat["reasoning_effort"] = self.reasoning.effort
        if self.text is not None and self.text.format is not None:
            chat["response_format"] = self.text.format.of_chat()
        if self.tools:
            fields = {"name", "description", "parameters", "strict"}
            chat["tools"] = [{"type": "function", "function": tool.model_dump(include=fields)} for tool in self.tools]
        match self.tool_choice:
            case NamedTool(name=name):
                chat["tool_choice"] = _chosen(name)
            case AllowedTools(mode=mode, tools=tools):
                allowed = {"mode": mode, "tools": [_chosen(tool.name) for tool in tools]}
                chat["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
            case choice:
                chat["tool_choice"] = choice
        return chat


def _chosen(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}
