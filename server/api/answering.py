"""Answering: what every endpoint that generates does between its body and its answer.

body -> sampling parameters, grammar, prompt ids -> submit -> one JSON answer or a stream
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from fastapi import Request
from fastapi.responses import Response

from hamburger.engine.grammar.source import GrammarSource
from hamburger.engine.request import GenerationRequest
from hamburger.engine.types.errors import InvalidRequest, QueueFull, QueueTimeout, shown
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.server.api.auth import owner_of
from hamburger.server.api.errors import ApiError
from hamburger.server.api.generation import Generation
from hamburger.server.api.model_context import ModelContext, choose_confidence
from hamburger.server.api.prompts import bad_word_ids, encode_text, render_chat
from hamburger.server.api.reply import Reply
from hamburger.server.api.served_models import ServedModels
from hamburger.server.api.streaming import EventStream, collect, unless_client_leaves, whole_response
from hamburger.server.bodies.answer_format import compile_grammar, grammar_of
from hamburger.server.bodies.chat import ChatBody
from hamburger.server.bodies.generation import GenerationBody, named_as_written
from hamburger.server.operation.key_limits import KeyLimits
from hamburger.server.operation.request_log import entry_of
from hamburger.server.tools.reasoning import Markers, Reasoning, marker_ids, thinking_budget, unwritten
from hamburger.server.tools.tool_stream import ToolStream
from hamburger.server.tools.tool_use import ToolUse

MAX_STOP_CHARACTERS = 20_000  # of all stop strings together
MAX_COPIED = 200_000  # token ids of logit_bias and stop_token_ids, of all answers together: each is told its own
_BLAMING_SECONDS = 2.0  # to find out which of many tools is at fault
Answers = list[tuple[list[int], SamplingParams]]  # each with its prompt's tokens


class ChatWork(NamedTuple):
    """What a chat asks of the engine. tools, reasoning: for each answer, what finds the calls in its text, and what the
    model writes for itself; None where there is nothing to find."""

    prompt: list[int]
    params: list[SamplingParams]
    tools: list[ToolStream] | None
    reasoning: list[Reasoning] | None

    @property
    def answers(self) -> Answers:
        return [(self.prompt, choice) for choice in self.params]


class Answering:
    """models: those that are served. limits: of each API key, for all models together."""

    def __init__(self, models: ServedModels, limits: KeyLimits) -> None:
        self.models, self._limits = models, limits

    def choose(self, request: Request, body: GenerationBody) -> ModelContext:
        """The model that a body names, which the log learns. Raises ApiError 404."""
        entry_of(request.scope).asked_for(body.model or self.models.first.served.name, bool(body.stream))
        return self.models.choose(request, body.model)

    async def chat(self, request: Request, context: ModelContext, body: ChatBody) -> ChatWork:
        """Raises InvalidRequest that names the field."""
        check_number(context, body, 1)
        tools, predicted_text = body.tool_use(context.tool_family), body.predicted_text()
        most = context.engine.info.max_model_len
        text = await render_chat(context.tokenizer, body.messages, body, tools)
        markers = None if body.separate_reasoning is False else context.markers
        thought = None if markers is None else unwritten(markers, text)
        params = await sampling_params(context, request, body, tools, thought)
        prompt = await encode_text(
            context,
            request.receive,
            text,
            add_special_tokens=False,
            param="messages",
            max_tokens=most,
            is_cut=body.truncate_prompt_tokens is not None,
        )
        prompt = body.cut(prompt, most)
        if predicted_text:
            prediction = await encode_text(
                context,
                request.receive,
                predicted_text,
                add_special_tokens=False,
                param="prediction",
                max_tokens=most,
                noun="prediction",
            )
            params = [replace(choice, prediction_ids=tuple(prediction)) for choice in params]
        reasoning: list[Reasoning] | None = None
        # No grammar of the whole answer lets a model think.
        if params[0].grammar is None or (tools is not None and tools.lets_think(thought)):
            if (budget := body.thinking_token_budget) is not None and budget >= 0:
                thinking = thinking_budget(context.tokenizer, context.markers, text, budget)
                params = [replace(choice, thinking=thinking) for choice in params]
            if markers is not None:
                ids = marker_ids(context.tokenizer, markers)
                reasoning = [Reasoning(markers, text, ids) for _ in params]
        streams = None if tools is None else _tool_streams(context, tools, params)
        return ChatWork(prompt, params, streams, reasoning)

    def submit(
        self, context: ModelContext, body: GenerationBody, answers: Answers, reply: Reply, key: str
    ) -> Generation:
        """Raises InvalidRequest that names the field as the client wrote it, or what the engine refuses with."""
        asked = asking_field(body, len(answers) // body.num_samples)
        self._limits.check(key, len(answers), asked, context.engine, (model.engine for model in self.models))
        priority, salt = body.priority or 0, body.cache_salt or ""
        if priority and not context.settings.allow_priority:
            raise InvalidRequest("This server lets no request go before others (allow_priority).", "priority")
        lora = context.lora
        requests = [
            GenerationRequest(f"{reply.id}-{i}", *of, priority, salt, key, lora, body.goes_on)
            for i, of in enumerate(answers)
        ]
        try:
            streams = context.engine.submit(requests)
        except InvalidRequest as error:
            raise named_as_written(error, body.token_limit()[0], body.prompt_name) from error
        spend: Callable[[int], None] = partial(self._limits.spend, key)
        spend(reply.prompt_tokens)
        if context.engine.dial is not None:
            reply.confidence = streams[0].request.params.confidence  # that of all: they were submitted together
        return Generation(streams, spend, context.metrics.on_completed)

    async def answer(
        self, context: ModelContext, request: Request, body: GenerationBody, answers: Answers, reply: Reply
    ) -> Response:
        """Whole or streamed, as the body says. A client that leaves ends it."""
        key = owner_of(request)
        generation = self.submit(context, body, answers, reply, key)
        answered, entry = False, entry_of(request.scope)
        entry.counts += [reply.counts, generation.times]
        entry.moments = generation.moments

        def on_failure(error: ApiError) -> None:
            entry.failed(error)
            context.metrics.on_failure(error.status, error.code)

        try:
            if not body.stream:
                whole: dict[str, Any] = await unless_client_leaves(request.receive, collect(generation, reply))
                response = await whole_response(whole)
                response.headers.update(self._limits.headers(key))
                return response
            keep_alive = context.settings.sse_keep_alive_seconds or None
            first = await unless_client_leaves(request.receive, generation.first(keep_alive))
            answered = True
            events = EventStream(first, generation, reply, on_failure=on_failure, keep_alive=keep_alive)
            events.headers.update(self._limits.headers(key))
            return events
        finally:
            if not answered:
                generation.abort()  # nothing to free after a whole answer; everything after an error


def check_number(context: ModelContext, body: GenerationBody, num_prompts: int) -> None:
    """Raise InvalidRequest for more answers than are ever admitted: 429 would have the client try for ever."""
    number, most = num_prompts * body.num_samples, context.engine.max_queue + context.engine.info.max_num_seqs
    if number > most:
        message = f"The request asks for {number} answers, but at most {most} are admitted."
        raise InvalidRequest(message, asking_field(body, num_prompts))
    ids = {name: getattr(body, name) or () for name in ("logit_bias", "stop_token_ids", "allowed_token_ids")}
    field = max(ids, key=lambda name: len(ids[name]))
    if (copied := number * sum(map(len, ids.values()))) > MAX_COPIED:
        message = f"{field} has {len(ids[field]):,} tokens for each of {number} answers, {copied:,} together, but at "
        raise InvalidRequest(f"{message}most {MAX_COPIED:,} are allowed: ask for fewer answers at once.", field)


def asking_field(body: GenerationBody, num_prompts: int) -> str:
    """Which field asks for so many answers."""
    if num_prompts > 1:
        return body.prompt_name
    return "best_of" if body.num_samples > body.num_choices else "n"


async def sampling_params(
    context: ModelContext,
    request: Request,
    body: GenerationBody,
    tools: ToolUse | None = None,
    thought: Markers | None = None,
) -> list[SamplingParams]:
    alias = context.served.confidence_of(body.model)
    confidence = choose_confidence(body.confidence, alias, request.headers)
    most = context.settings.max_stop_strings
    if body.stop is not None and len(body.stop) > most:
        raise InvalidRequest(f"stop holds {len(body.stop)} strings, but at most {most} are allowed.", "stop")
    if (number := sum(map(len, body.stop or ()))) > MAX_STOP_CHARACTERS:
        message = f"stop holds {number:,} characters together, but at most {MAX_STOP_CHARACTERS:,} are allowed."
        raise InvalidRequest(message, "stop")
    grammar: str | None = None
    if tools is not None or body.source() is not None:
        grammar = await unless_client_leaves(request.receive, _grammar(context, body, tools, thought))
    params = body.sampling_params(confidence, grammar, context.sampling_defaults)
    if body.bad_words:
        bad_words = await asyncio.to_thread(bad_word_ids, context.tokenizer, body.bad_words)
        params = [replace(choice, bad_words=bad_words) for choice in params]
    if tools is not None and tools.shows_special_tokens(context.tokenizer):
        params = [replace(choice, skip_special_tokens=False) for choice in params]
    return params


async def _grammar(
    context: ModelContext, body: GenerationBody, tools: ToolUse | None, thought: Markers | None
) -> str | None:
    """What holds the answer; None where nothing does. Raises InvalidRequest that names the field."""
    if tools is None:
        return await grammar_of(context.grammars, body)
    try:
        source = tools.grammar or tools.open_grammar(context.tokenizer, thought)
        return None if source is None else await compile_grammar(context.grammars, source, "tools")
    except InvalidRequest as error:
        if tools.form is not None:
            await grammar_of(context.grammars, body)  # the fault may be the format's
        if (own := await _fault_of_one(context, tools)) is not None:
            raise own from error
        raise


async def _fault_of_one(context: ModelContext, tools: ToolUse) -> InvalidRequest | None:
    """Of several tools the first one whose own schema is refused, if that is soon found."""
    schemas = tools.schemas()
    with contextlib.suppress(TimeoutError, QueueFull, QueueTimeout):
        async with asyncio.timeout(_BLAMING_SECONDS):
            for name, schema in schemas.items() if len(schemas) > 1 else ():
                try:
                    await compile_grammar(context.grammars, GrammarSource("json", schema), "tools")
                except InvalidRequest as own:
                    return InvalidRequest(f"The tool {shown(name)}: {own}", "tools")
    return None


def _tool_streams(context: ModelContext, tools: ToolUse, params: Sequence[SamplingParams]) -> list[ToolStream]:
    """One for each choice."""
    end_texts = [
        context.tokenizer.decode([token_id], skip_special_tokens=False)
        for token_id in context.engine.info.eos_token_ids
    ]
    return [tools.stream(() if choice.skip_special_tokens else end_texts) for choice in params]
