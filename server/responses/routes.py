"""POST /v1/responses and /v1/responses/input_tokens. What can be done with a stored one is in stored_routes.py."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from hamburger.engine.types.errors import HamburgerError, InvalidRequest
from hamburger.server.api.answering import Answering, Answers
from hamburger.server.api.auth import owner_of
from hamburger.server.api.errors import ApiError, to_api_error
from hamburger.server.api.generation import Generation
from hamburger.server.api.model_context import ModelContext
from hamburger.server.api.openapi import REFUSED, TYPED_STREAM, body_of
from hamburger.server.api.prompts import count_chat
from hamburger.server.api.request_body import naming, read_body, validated
from hamburger.server.bodies.chat import ChatBody
from hamburger.server.completions.logprobs import TextOffsets
from hamburger.server.completions.replies import ChatReply
from hamburger.server.operation.request_log import entry_of
from hamburger.server.responses.body import NAMES, ResponsesBody
from hamburger.server.responses.items import call_of_chat, turns_of, with_ids
from hamburger.server.responses.reply import ResponsesReply
from hamburger.server.responses.store import ResponseStore, Stored
from hamburger.server.responses.stored_routes import stored_routes

logger = logging.getLogger(__name__)


def response_routes(answering: Answering, store: ResponseStore) -> APIRouter:
    """OpenAI's newer endpoint that generates."""
    router = APIRouter(tags=["generation"], responses=REFUSED)
    settings = answering.models.first.settings
    running: dict[str, asyncio.Task[None]] = {}  # in the background

    @router.post("/v1/responses", openapi_extra=body_of(ResponsesBody), responses=TYPED_STREAM)
    async def create(request: Request) -> Response:
        """An answer to an input, and to what it goes on with, as JSON or as typed server-sent events."""
        body = await read_body(request, ResponsesBody, settings)
        if body.is_stored and not store.keeps:
            if body.background:
                message = "background is true, but this server stores no responses (response_store): leave it out."
                raise InvalidRequest(message, "background")
            body = body.model_copy(update={"store": False})
        body.check()
        owner = owner_of(request)
        turns, items = await conversation(body, owner)

        def keep(response: dict[str, Any]) -> None:
            # One in the background may have been deleted meanwhile.
            if body.is_stored and (not body.background or response["id"] in store):
                store.put(Stored(response, items, turns + _turns_of(response), owner))
                response["store"] = response["id"] in store  # a disk may be full

        with naming(NAMES):
            chat = await asyncio.to_thread(lambda: validated(ChatBody, body.chat(turns)))
            context = answering.choose(request, chat)
            work = await answering.chat(request, context, chat)
            inner = ChatReply(chat, context.served, context.tokenizer, [work.prompt], (), work.tools, work.reasoning)
            [params] = work.params
            offsets = TextOffsets(context.tokenizer, skip_special_tokens=params.skip_special_tokens)
            name = body.model or context.served.name
            reply = ResponsesReply(inner, store.new_id(), body, params, name, keep, offsets)
            if not body.background:
                return await answering.answer(context, request, chat, work.answers, reply)
            generation = submit(context, request, chat, work.answers, reply)
        response = reply.response()
        store.put(Stored(response, items, turns, owner, cancel=generation.abort))
        if reply.id not in store:
            generation.abort()
            message = "The response cannot be stored now, as one in the background must be: leave background out."
            raise ApiError(503, message, param="background")
        running[reply.id] = task = asyncio.create_task(_finish(context, generation, reply))
        task.add_done_callback(lambda _: running.pop(reply.id))
        entry_of(request.scope).goes_on = task
        return JSONResponse(response)

    @router.post("/v1/responses/input_tokens", openapi_extra=body_of(ResponsesBody))
    async def input_tokens(request: Request) -> dict[str, Any]:
        """How many tokens the prompt has that a response's fields make."""
        body = await read_body(request, ResponsesBody, settings)
        turns, _ = await conversation(body, owner_of(request))
        with naming(NAMES):
            chat = await asyncio.to_thread(lambda: validated(ChatBody, body.chat(turns)))
            return {
                "object": "response.input_tokens",
                "input_tokens": await count_chat(answering.choose(request, chat), request.receive, chat),
            }

    async def conversation(body: ResponsesBody, owner: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The turns so far, and the items of this one's input."""
        # Long ones take a while: others have their turn between the steps of a thread.
        turns, items = await asyncio.to_thread(
            lambda: (turns_of(body.input), with_ids(body.input) if body.is_stored else [])
        )
        if body.previous_response_id is not None:
            previous = store.get(body.previous_response_id, owner, "previous_response_id")
            if previous.cancel is not None:
                message = "The response that it goes on with is still being written: wait for it."
                raise InvalidRequest(message, "previous_response_id")
            turns = previous.turns + turns
        return turns, items

    def submit(
        context: ModelContext, request: Request, chat: ChatBody, answers: Answers, reply: ResponsesReply
    ) -> Generation:
        generation = answering.submit(context, chat, answers, reply, owner_of(request))
        entry_of(request.scope).counts += [reply.counts, generation.times]
        return generation

    router.include_router(stored_routes(store, running))
    return router


async def _finish(context: ModelContext, generation: Generation, reply: ResponsesReply) -> None:
    """Have a response of the background come to its end, which its store then has."""
    try:
        async for index, update in generation:
            reply.add(index, update)
        if reply.is_whole:
            reply.whole()
        else:
            reply.take_partial()
            reply.cancelled()
    except Exception as error:  # nobody else would tell its client
        if isinstance(error, HamburgerError):
            reply.take_partial()
        else:
            logger.exception("A response in the background failed.")
        failure = to_api_error(error)
        context.metrics.on_failure(failure.status, failure.code)
        reply.failed(failure)
    finally:
        generation.abort()


def _turns_of(response: dict[str, Any]) -> list[dict[str, Any]]:
    """What a response adds to its chat."""
    if not response["output"]:
        return []
    turn: dict[str, Any] = {"role": "assistant", "content": ""}
    for item in response["output"]:
        if item["type"] == "reasoning":
            turn["reasoning_content"] = item["content"][0]["text"]
        elif item["type"] == "message":
            turn["content"] += "".join(part["text"] for part in item["content"])
        else:
            turn.setdefault("tool_calls", []).append(call_of_chat(item["call_id"], item["name"], item["arguments"]))
    return [turn]
