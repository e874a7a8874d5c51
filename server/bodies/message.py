"""Message: one message of a chat as OpenAI clients send it, and as the chat template reads it."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from hamburger.engine.text.message_text import one_text
from hamburger.server.schema import ListOf, Schema
from hamburger.server.tools.tool_fields import MadeCall

_INSTEAD = {"function_call": "use tool_calls, and the role tool for what they gave", "audio": "leave it out"}
ROLES = ("system", "developer", "user", "assistant", "tool")  # OpenAI's

Text = Annotated[str, BeforeValidator(one_text), WithJsonSchema({"type": ["string", "array"]})]
Content = Annotated[str | None, BeforeValidator(one_text), WithJsonSchema({"type": ["string", "array", "null"]})]


class Message(Schema):
    """One chat message."""

    role: str = Field(
        min_length=1,
        max_length=64,
        description="system, developer, user, assistant, tool, or another that the model's chat template names",
    )
    content: Content = None
    refusal: str | None = None
    reasoning_content: str | None = None
    name: str | None = None
    tool_calls: ListOf[MadeCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, message: Any) -> Any:
        for name, instead in _INSTEAD.items() if isinstance(message, dict) else ():
            if message.get(name):
                raise ValueError(f"{name} is not supported by this server: {instead}")
        return message

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant makes tool_calls")
        if self.content is None and self.role == "assistant":  # servers tell an empty answer so, too
            self.content = self.refusal or ("" if "content" in self.model_fields_set else None)
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing")
        return self

    def for_template(self) -> dict[str, Any]:
        """What the chat template reads; a developer is a system."""
        message = self.model_dump(exclude_none=True, exclude={"tool_calls", "refusal"})
        if self.tool_calls:
            message |= {"content": self.content or "", "tool_calls": [call.for_template() for call in self.tool_calls]}
        return message | {"role": "system"} if self.role == "developer" else message
