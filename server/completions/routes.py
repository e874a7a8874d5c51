"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from fastapi import APIRouter, Request
from fastapi.responses import Response

from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.server.api.answering import Answering, check_number, sampling_params
from hamburger.server.api.openapi import REFUSED, STREAM, body_of
from hamburger.server.api.prompts import encode_text
from hamburger.server.api.request_body import read_body
from hamburger.server.bodies.chat import ChatBody
from hamburger.server.bodies.completion import DEFAULT_TOKENS, CompletionBody
from hamburger.server.completions.echo import Echo
from hamburger.server.completions.replies import ChatReply, CompletionReply


def completion_routes(answering: Answering) -> APIRouter:
    """OpenAI's two older endpoints that generate."""
    router = APIRouter(tags=["generation"], responses=REFUSED | STREAM)
    settings = answering.models.first.settings

    @router.post("/v1/chat/completions", openapi_extra=body_of(ChatBody))
    async def chat_completions(request: Request) -> Response:
        """An answer to a conversation, as JSON or as server-sent events."""
        body = await read_body(request, ChatBody, settings)
        context = answering.choose(request, body)
        work = await answering.chat(request, context, body)
        reply = ChatReply(body, context.served, context.tokenizer, [work.prompt], (), work.tools, work.reasoning)
        return await answering.answer(context, request, body, work.answers, reply)

    @router.post("/v1/completions", openapi_extra=body_of(CompletionBody))
    async def completions(request: Request) -> Response:
        """The continuation of one or more prompts. Choice index = prompt index x n + choice."""
        body = await read_body(request, CompletionBody, settings)
        context = answering.choose(request, body)
        check_number(context, body, len(body.prompt))
        params = await sampling_params(context, request, body)
        add_special_tokens = body.add_special_tokens is not False
        most = context.engine.info.max_model_len
        prompts: list[list[int]] = []
        for prompt in body.prompt:
            if isinstance(prompt, str):
                prompts.append(
                    await encode_text(
                        context,
                        request.receive,
                        prompt,
                        add_special_tokens=add_special_tokens,
                        param="prompt",
                        max_tokens=most,
                        is_cut=body.truncate_prompt_tokens is not None,
                    )
                )
                if len(body.prompt) > 1:
                    await asyncio.sleep(0)  # others want their turn between many
            else:
                prompts.append(prompt)  # ids are taken as they are: no BOS is added
        whole, prompts = prompts, [body.cut(prompt, most) for prompt in prompts]
        answers = [(prompt, choice) for prompt in prompts for choice in params]
        echoes: list[Echo] = []
        for ids, uncut, written in zip(prompts, whole, body.prompt, strict=True) if body.echo else ():
            text = written if isinstance(written, str) and ids is uncut else None
            echoes += [Echo(context.tokenizer, ids, text)] * len(params)
        reply = CompletionReply(body, context.served, context.tokenizer, prompts, echoes)
        if body.leaves_limit:
            answers = [(prompt, _limited(choice, len(prompt), most)) for prompt, choice in answers]
        return await answering.answer(context, request, body, answers, reply)

    return router


def _limited(params: SamplingParams, num_prompt_tokens: int, max_model_len: int) -> SamplingParams:
    """16 tokens, or what the context leaves: a default is no reason to refuse a long prompt."""
    return replace(params, max_tokens=max(1, min(DEFAULT_TOKENS, max_model_len - num_prompt_tokens)))
