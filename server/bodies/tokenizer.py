"""TokenizeBody and DetokenizeBody: POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hamburger.server.bodies.chat import ChatPrompt
from hamburger.server.bodies.known_fields import REFUSED_TOKENIZE
from hamburger.server.bodies.message import Message
from hamburger.server.schema import ListOf, Schema


class TokenizeBody(ChatPrompt):
    """A prompt, or messages with all that a chat's prompt is made of."""

    refused: ClassVar = REFUSED_TOKENIZE

    model: str | None = None
    prompt: str | None = None
    messages: ListOf[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = Field(None, description="Default: true for a prompt, false for messages.")
    return_token_strs: bool | None = Field(None, description="The tokens too, as the vocabulary writes them.")


class DetokenizeBody(Schema):
    """Token ids."""

    model: str | None = None
    tokens: ListOf[int]
