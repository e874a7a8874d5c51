"""/tokenize, /detokenize and /tokenizer_info. They give an engine no work."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from hamburger.engine.types.errors import InvalidRequest
from hamburger.server.api.openapi import REFUSED, body_of
from hamburger.server.api.prompts import MAX_TOKENIZED, encode_text, render_chat
from hamburger.server.api.request_body import read_body
from hamburger.server.api.served_models import ServedModels
from hamburger.server.bodies.tokenizer import DetokenizeBody, TokenizeBody

MAX_TOKENS = 250_000  # of a list
_MANY_TOKENS = 5_000  # a few ms of spelling them out, which other streams need not wait for


def tokenizer_routes(models: ServedModels) -> APIRouter:
    """The tokenizers of the served models."""
    router = APIRouter(tags=["model"], responses=REFUSED)

    @router.post("/tokenize", openapi_extra=body_of(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """The token ids of a prompt, or of messages as the chat template writes them."""
        body = await read_body(request, TokenizeBody, models.first.settings)
        context = models.choose(request, body.model)
        context.served.confidence_of(body.model)
        tokenizer = context.tokenizer
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("Give either prompt or messages.", "prompt")
        if body.messages is not None:
            _check_size(sum(len(message.content or "") for message in body.messages), "messages")
            tools = body.tool_use(context.tool_family)
            text, param = await render_chat(tokenizer, body.messages, body, tools), "messages"
        else:
            text, param = body.prompt or "", "prompt"
        _check_size(len(text), param)
        special = param == "prompt" if body.add_special_tokens is None else body.add_special_tokens
        tokens = await encode_text(context, request.receive, text, add_special_tokens=special, param=param)

        def respond() -> Response:
            texts = [tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
            counted = {"count": len(tokens), "max_model_len": context.engine.info.max_model_len}
            return _json({**counted, "tokens": tokens, "token_strs": texts})

        return respond() if len(tokens) < _MANY_TOKENS else await asyncio.to_thread(respond)

    @router.post("/detokenize", openapi_extra=body_of(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """The text of token ids, special tokens included."""
        body = await read_body(request, DetokenizeBody, models.first.settings)
        context = models.choose(request, body.model)
        context.served.confidence_of(body.model)
        _check_size(len(body.tokens), "tokens", MAX_TOKENS)
        vocab_size = context.engine.info.vocab_size
        for token_id in (min(body.tokens, default=0), max(body.tokens, default=0)):
            if not 0 <= token_id < vocab_size:
                message = f"tokens holds the id {token_id}, but the vocabulary is 0..{vocab_size - 1}."
                raise InvalidRequest(message, "tokens")

        def respond() -> Response:
            return _json({"prompt": context.tokenizer.decode(body.tokens, skip_special_tokens=False)})

        return respond() if len(body.tokens) < _MANY_TOKENS else await asyncio.to_thread(respond)

    @router.get("/tokenizer_info")
    async def tokenizer_info(model: str | None = None) -> dict[str, Any]:
        """The special tokens and the chat template; null where the model has none. `model`: the first if not named."""
        tokenizer = models.find(model).tokenizer
        return {
            "eos_token": tokenizer.eos_token,
            "bos_token": tokenizer.bos_token,
            "pad_token": tokenizer.pad_token,
            "chat_template": tokenizer.chat_template,
        }

    return router


def _json(content: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


def _check_size(size: int, param: str, most: int = MAX_TOKENIZED) -> None:
    """Raise InvalidRequest for a text (characters) or a list (tokens) that would keep others waiting."""
    if size > most:
        raise InvalidRequest(f"{param} has the length {size}, but at most {most} is allowed here.", param)
