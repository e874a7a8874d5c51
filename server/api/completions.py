"""POST /v1/chat/completions and /v1/completions: body -> prompt ids -> submit -> one JSON answer or a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from hamburger.engine.request import GenerationRequest
from hamburger.engine.types.errors import InvalidRequest
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.server.api.auth import key_of
from hamburger.server.api.echo import Echo
from hamburger.server.api.errors import ApiError
from hamburger.server.api.model_context import ModelContext, choose_confidence
from hamburger.server.api.openapi import REFUSED, STREAM, body_of
from hamburger.server.api.prompts import encode_text, render_chat
from hamburger.server.api.request_body import read_body
from hamburger.server.api.responses import ChatReply, CompletionReply, Reply
from hamburger.server.api.served_models import ServedModels
from hamburger.server.api.streaming import EventStream, Generation, collect, unless_client_leaves, whole_response
from hamburger.server.bodies.answer_format import compile_grammar, grammar_of
from hamburger.server.bodies.chat import ChatBody
from hamburger.server.bodies.completion import CompletionBody
from hamburger.server.bodies.generation import GenerationBody, named_as_written
from hamburger.server.operation.key_limits import KeyLimits
from hamburger.server.operation.request_log import entry_of
from hamburger.server.tools.tool_use import ToolStream, ToolUse

MAX_STOP_CHARACTERS = 20_000  # of all stop strings together
MAX_COPIED = 200_000  # token ids of logit_bias and stop_token_ids, of all answers together: each is told its own
Answers = list[tuple[list[int], SamplingParams]]  # each with its prompt's tokens
_DEFAULT_TOKENS = 16  # what the OpenAI API says of completions


def completion_routes(models: ServedModels, limits: KeyLimits) -> APIRouter:
    """The two endpoints that generate. limits: of each API key, for all models together."""
    router = APIRouter(tags=["generation"], responses=REFUSED | STREAM)

    @router.post("/v1/chat/completions", openapi_extra=body_of(ChatBody))
    async def chat_completions(request: Request) -> Response:
        """An answer to a conversation, as JSON or as server-sent events."""
        body = await read_body(request, ChatBody, models.first.settings)
        entry_of(request.scope).asked_for(body.model or models.first.served.name, bool(body.stream))
        context = models.choose(request, body.model)
        _check_number(context, body, 1)
        tools, predicted_text = body.tool_use(context.tool_family), body.predicted_text()
        params = await _sampling_params(context, request, body, tools)
        most = context.engine.info.max_model_len
        text = await render_chat(context.tokenizer, body.messages, body, tools)
        prompt = await encode_text(
            context.tokenizer, text, add_special_tokens=False, param="messages", max_tokens=body.longest_prompt(most)
        )
        prompt = body.cut(prompt, most)
        if predicted_text:
            prediction = await encode_text(
                context.tokenizer,
                predicted_text,
                add_special_tokens=False,
                param="prediction",
                max_tokens=most,
                noun="prediction",
            )
            params = [replace(choice, prediction_ids=tuple(prediction)) for choice in params]
        streams = None if tools is None else _tool_streams(context, tools, params)
        reply = ChatReply(body, context.served, context.tokenizer, [prompt], tools=streams)
        return await answer(context, request, body, [(prompt, choice) for choice in params], reply)

    @router.post("/v1/completions", openapi_extra=body_of(CompletionBody))
    async def completions(request: Request) -> Response:
        """The continuation of one or more prompts. Choice index = prompt index x n + choice."""
        body = await read_body(request, CompletionBody, models.first.settings)
        entry_of(request.scope).asked_for(body.model or models.first.served.name, bool(body.stream))
        context = models.choose(request, body.model)
        tokenizer = context.tokenizer
        _check_number(context, body, len(body.prompt))
        params = await _sampling_params(context, request, body)
        add_special_tokens = body.add_special_tokens is not False
        most = context.engine.info.max_model_len
        longest = body.longest_prompt(most)
        prompts: list[list[int]] = []
        for prompt in body.prompt:
            if isinstance(prompt, str):
                prompts.append(
                    await encode_text(
                        tokenizer, prompt, add_special_tokens=add_special_tokens, param="prompt", max_tokens=longest
                    )
                )
                await asyncio.sleep(0)  # others want their turn between many
            else:
                prompts.append(prompt)  # ids are taken as they are: no BOS is added
        whole, prompts = prompts, [body.cut(prompt, most) for prompt in prompts]
        answers = [(prompt, choice) for prompt in prompts for choice in params]
        echoes: list[Echo] = []
        for ids, uncut, written in zip(prompts, whole, body.prompt, strict=True) if body.echo else ():
            text = written if isinstance(written, str) and ids is uncut else None
            echoes += [Echo(tokenizer, ids, text)] * len(params)
        reply = CompletionReply(body, context.served, tokenizer, prompts, echoes)
        if not body.model_fields_set & {"max_tokens", "max_completion_tokens"}:
            answers = [(prompt, _limited(choice, len(prompt), most)) for prompt, choice in answers]
        return await answer(context, request, body, answers, reply)

    async def answer(
        context: ModelContext, request: Request, body: GenerationBody, answers: Answers, reply: Reply
    ) -> Response:
        key = key_of(request)
        limits.check(key, len(answers), context.engine, (model.engine for model in models))
        return await _answer(context, request, body, answers, reply, key, partial(limits.spend, key))

    return router


def _check_number(context: ModelContext, body: GenerationBody, num_prompts: int) -> None:
    """Raise InvalidRequest for more answers than are ever admitted: 429 would have the client try for ever."""
    number, most = num_prompts * body.num_samples, context.engine.max_queue + context.engine.info.max_num_seqs
    if number > most:
        field = "n" if num_prompts == 1 else "prompt"
        raise InvalidRequest(f"The request asks for {number} answers, but at most {most} are admitted.", field)
    ids = {"logit_bias": body.logit_bias or (), "stop_token_ids": body.stop_token_ids or ()}
    field = max(ids, key=lambda name: len(ids[name]))
    if (copied := number * sum(map(len, ids.values()))) > MAX_COPIED:
        message = f"{field} has {len(ids[field]):,} tokens for each of {number} answers, {copied:,} together, but at "
        raise InvalidRequest(f"{message}most {MAX_COPIED:,} are allowed: ask for fewer answers at once.", field)


async def _sampling_params(
    context: ModelContext, request: Request, body: GenerationBody, tools: ToolUse | None = None
) -> list[SamplingParams]:
    alias = context.served.confidence_of(body.model)
    confidence = choose_confidence(body.confidence, alias, request.headers)
    most = context.settings.max_stop_strings
    if body.stop is not None and len(body.stop) > most:
        raise InvalidRequest(f"stop holds {len(body.stop)} strings, but at most {most} are allowed.", "stop")
    if (number := sum(map(len, body.stop or ()))) > MAX_STOP_CHARACTERS:
        message = f"stop holds {number:,} characters together, but at most {MAX_STOP_CHARACTERS:,} are allowed."
        raise InvalidRequest(message, "stop")
    forced = None if tools is None else tools.grammar
    grammars = context.grammars
    compiled = grammar_of(grammars, body) if forced is None else compile_grammar(grammars, forced, "tools")
    grammar: str | None = await unless_client_leaves(request, compiled)
    params = body.sampling_params(confidence, grammar)
    if tools is not None and body.skip_special_tokens is None and tools.shows_special_tokens(context.tokenizer):
        params = [replace(choice, skip_special_tokens=False) for choice in params]
    return params


def _tool_streams(context: ModelContext, tools: ToolUse, params: list[SamplingParams]) -> list[ToolStream]:
    """One for each choice."""
    end_texts = [
        context.tokenizer.decode([token_id], skip_special_tokens=False)
        for token_id in context.engine.info.eos_token_ids
    ]
    return [tools.stream(() if choice.skip_special_tokens else end_texts) for choice in params]


def _limited(params: SamplingParams, num_prompt_tokens: int, max_model_len: int) -> SamplingParams:
    """16 tokens, or what the context leaves: a default is no reason to refuse a long prompt."""
    return replace(params, max_tokens=max(1, min(_DEFAULT_TOKENS, max_model_len - num_prompt_tokens)))


async def _answer(
    context: ModelContext,
    request: Request,
    body: GenerationBody,
    answers: Answers,
    reply: Reply,
    key: str,
    spend: Callable[[int], None],
) -> Response:
    """spend: is told of the tokens of the prompts and of the answers."""
    priority, salt = body.priority or 0, body.cache_salt or ""
    if priority and not context.settings.allow_priority:
        raise InvalidRequest("This server lets no request go before others (allow_priority).", "priority")
    requests = [GenerationRequest(f"{reply.id}-{i}", *of, priority, salt, key) for i, of in enumerate(answers)]
    try:
        streams = context.engine.submit(requests)
    except InvalidRequest as error:
        raise named_as_written(error, body.token_limit()[0], body.prompt_name) from error
    spend(reply.prompt_tokens)
    generation = Generation(streams, spend)
    if context.engine.dial is not None:
        reply.confidence = streams[0].request.params.confidence  # that of all choices: they were submitted together
    answered, entry = False, entry_of(request.scope)
    entry.counts += [reply.counts, generation.times]

    def on_failure(error: ApiError) -> None:
        entry.failed(error)
        context.metrics.on_failure(error.status)

    try:
        if not body.stream:
            whole: dict[str, Any] = await unless_client_leaves(request, collect(generation, reply))
            return await whole_response(whole)
        first = await unless_client_leaves(request, generation.first())
        answered = True
        return EventStream(first, generation, reply, wants_usage=body.wants_usage, on_failure=on_failure)
    finally:
        if not answered:
            generation.abort()  # nothing to free after a whole answer; everything after an error
