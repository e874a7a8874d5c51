"""Every endpoint that does not generate: models, tokenizer, health, metrics, version."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from hamburger.engine.health import liveness_fault
from hamburger.engine.types.errors import InvalidRequest
from hamburger.server.api.model_context import ModelContext
from hamburger.server.api.openapi import REFUSED, body_of
from hamburger.server.api.prompts import encode_chat, encode_text
from hamburger.server.api.protocol import DetokenizeBody, TokenizeBody
from hamburger.server.api.request_body import read_body
from hamburger.server.api.served_models import ServedModels
from hamburger.server.operation.metrics import CONTENT_TYPE

MAX_TOKENIZED = 1_000_000  # characters of a text, or tokens of a list: many times what contexts hold
_MANY_TOKENS = 5_000  # a few ms of spelling them out, which other streams need not wait for


def model_routes(models: ServedModels) -> APIRouter:
    """What is served, and its tokenizer."""
    router = APIRouter(tags=["model"], responses=REFUSED)

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """The served models, each with its aliases NAME@c."""
        return {"object": "list", "data": [card for context in models for card in context.served.cards()]}

    @router.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> dict[str, Any]:
        """One model; any alias NAME@c with c in [0, 1] is one."""
        served = models.find(model_id).served
        served.confidence_of(model_id)
        return served.card(model_id)

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
            tokens = await encode_chat(
                tokenizer,
                body.messages,
                add_generation_prompt=body.add_generation_prompt,
                add_special_tokens=bool(body.add_special_tokens),
            )
        else:
            special = body.add_special_tokens is not False
            _check_size(len(body.prompt or ""), "prompt")
            tokens = await encode_text(tokenizer, body.prompt or "", add_special_tokens=special, param="prompt")

        def told() -> JSONResponse:
            decode = partial(tokenizer.decode, skip_special_tokens=False)
            texts = [decode([token]) for token in tokens] if body.return_token_strs else None
            counted = {"count": len(tokens), "max_model_len": context.engine.info.max_model_len}
            return JSONResponse({**counted, "tokens": tokens, "token_strs": texts})

        return told() if len(tokens) < _MANY_TOKENS else await asyncio.to_thread(told)

    @router.post("/detokenize", openapi_extra=body_of(DetokenizeBody))
    async def detokenize(request: Request) -> dict[str, Any]:
        """The text of token ids, special tokens included."""
        body = await read_body(request, DetokenizeBody, models.first.settings)
        context = models.choose(request, body.model)
        context.served.confidence_of(body.model)
        _check_size(len(body.tokens), "tokens")
        vocab_size = context.engine.info.vocab_size
        for token_id in body.tokens:
            if not 0 <= token_id < vocab_size:
                message = f"tokens holds the id {token_id}, but the vocabulary is 0..{vocab_size - 1}."
                raise InvalidRequest(message, "tokens")
        return {"prompt": context.tokenizer.decode(body.tokens, skip_special_tokens=False)}

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


def operation_routes(models: ServedModels) -> APIRouter:
    """What operators and load balancers ask; open without a key."""
    router = APIRouter(tags=["operation"])
    unavailable: dict[int | str, dict[str, Any]] = {
        "4XX": REFUSED["4XX"],
        503: {"description": "It is not.", "content": {"application/json": {}}},
    }

    @router.get("/health", responses=unavailable)
    async def health() -> JSONResponse:
        """Liveness: 503 when an engine is dead or hangs. Draining is alive, and so is a long prefill."""
        return _status({context.served.name: liveness_fault(context.engine.health()) for context in models}, "ok")

    @router.get("/ready", responses=unavailable)
    async def ready() -> JSONResponse:
        """Readiness: 503 when new requests should go elsewhere: an engine is dead, hangs or drains, a queue is full."""
        return _status({context.served.name: _readiness_fault(context) for context in models}, "ready")

    @router.get("/metrics", response_class=PlainTextResponse, responses=REFUSED)
    async def metrics() -> Response:
        """Prometheus text."""
        return Response(models.first.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    @router.get("/version", responses=REFUSED)
    async def server_version() -> dict[str, str]:
        """The version of this server."""
        return {"version": version("hamburger-serve")}

    return router


def _check_size(size: int, param: str) -> None:
    """Raise InvalidRequest for a text (characters) or a list (tokens) that would keep others waiting."""
    if size > MAX_TOKENIZED:
        raise InvalidRequest(f"{param} has the length {size}, but at most {MAX_TOKENIZED} is allowed here.", param)


def _readiness_fault(context: ModelContext) -> str | None:
    state = context.engine.health()
    fault = liveness_fault(state)
    if fault is None and state.draining:
        fault = "draining"
    if fault is None and state.num_waiting >= context.engine.max_queue:
        fault = f"full: {state.num_waiting} requests wait"
    return fault


def _status(faults: Mapping[str, str | None], word: str) -> JSONResponse:
    """faults: of each model by its name, None for one that is well. One fault is enough for a 503."""
    models = {name: fault or word for name, fault in faults.items()}
    found = {name: fault for name, fault in faults.items() if fault is not None}
    if not found:
        return JSONResponse({"status": word, "models": models})
    reasons = [fault if len(faults) == 1 else f"{name}: {fault}" for name, fault in found.items()]
    return JSONResponse({"status": "unavailable", "reason": "; ".join(reasons), "models": models}, status_code=503)
