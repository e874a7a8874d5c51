"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from hamburger.server.api.answering import Answering
from hamburger.server.api.openapi import REFUSED, TYPED_STREAM, body_of
from hamburger.server.api.prompts import count_chat
from hamburger.server.api.request_body import naming, read_body, validated
from hamburger.server.bodies.chat import ChatBody
from hamburger.server.completions.replies import ChatReply
from hamburger.server.messages.body import NAMES, MessagesBody, PromptBody
from hamburger.server.messages.reply import MessagesReply


def message_routes(answering: Answering) -> APIRouter:
    """Anthropic's endpoints that generate, and count."""
    router = APIRouter(tags=["generation"], responses=REFUSED)
    settings = answering.models.first.settings

    @router.post("/v1/messages", openapi_extra=body_of(MessagesBody), responses=TYPED_STREAM)
    async def messages(request: Request) -> Response:
        """An answer to a conversation in Anthropic's form, as JSON or as server-sent events."""
        body = await read_body(request, MessagesBody, settings)
        with naming(NAMES):
            chat = await asyncio.to_thread(_chat, body)
            context = answering.choose(request, chat)
            work = await answering.chat(request, context, chat)
            inner = ChatReply(chat, context.served, context.tokenizer, [work.prompt], (), work.tools, work.reasoning)
            reply = MessagesReply(inner, body.model or context.served.name)
            return await answering.answer(context, request, chat, work.answers, reply)

    @router.post("/v1/messages/count_tokens", openapi_extra=body_of(PromptBody))
    async def count_tokens(request: Request) -> dict[str, Any]:
        """How many tokens the prompt has that a message's fields make."""
        body = await read_body(request, PromptBody, settings)
        with naming(NAMES):
            chat = await asyncio.to_thread(_chat, body)
            context = answering.choose(request, chat)
            return {"input_tokens": await count_chat(context, request.receive, chat)}

    return router


def _chat(body: PromptBody) -> ChatBody:
    """Long conversations take a while: others have their turn between the steps of a thread."""
    return validated(ChatBody, body.chat())
