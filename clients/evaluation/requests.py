"""Asks a server the items of a task: chat for written answers, echoed log-probabilities for choices.

Speaks HTTP only. Decides nothing about scores (items.py) or files (answers.py).
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from hamburger.clients.connection import Clients, check_answer, patient_post
from hamburger.clients.evaluation.answers import Answer, AnswerStore, question_key
from hamburger.clients.evaluation.items import Item, Question, Task
from hamburger.clients.wire import RequestError, error_message, token_count

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True, slots=True)
class Server:
    """One side of a comparison. confidence None: the server's default."""

    url: str
    model: str
    confidence: float | None

    def body(self, **asked: Any) -> dict[str, Any]:
        """The JSON of a greedy request."""
        sure = {} if self.confidence is None else {"confidence": self.confidence}
        return {"model": self.model, **asked, "temperature": 0, **sure}

    @property
    def label(self) -> str:
        sure = "default" if self.confidence is None else f"{self.confidence:g}"
        return f"{self.model} at {self.url}, confidence {sure}"


async def ask_all(
    clients: Clients,
    server: Server,
    task: Task,
    items: Sequence[Item],
    max_tokens: int,
    store: AnswerStore,
    concurrency: int,
    on_end: Callable[[], object],
) -> list[Answer]:
    """The answers to `items` in their order: those in the store, and the others from the server, `concurrency` at once.

    max_tokens: of a written answer. After a first failure nothing new is sent; what is in flight is still stored.
    Raises RequestError that names the item.
    """
    keys = [question_key(_asked(server, item, max_tokens)) for item in items]
    missing = [(key, item) for key, item in zip(keys, items, strict=True) if store.get(key) is None]
    for _ in range(len(items) - len(missing)):
        on_end()
    waiting = iter(missing)
    failures: list[RequestError] = []
    async with clients.one() as client:
        by_ids = bool(missing) and isinstance(missing[0][1], Question) and await _has_tokenize(client, server)

    async def worker() -> None:
        async with clients.one() as client:
            await work(client)

    async def work(client: httpx.AsyncClient) -> None:
        for key, item in waiting:
            if failures:
                return
            sent, clock = time.time(), time.perf_counter()
            try:
                if isinstance(item, Question):
                    got = await _choose(client, server, item, by_ids)
                else:
                    got = await _write(client, server, item.prompt, max_tokens)
            except RequestError as error:
                failures.append(RequestError(f"{task.name}, {item.id}: {error}", status=error.status))
                return
            store.add(
                Answer(
                    key=key,
                    task=task.name,
                    id=item.id,
                    url=server.url,
                    model=server.model,
                    confidence=server.confidence,
                    sent=sent,
                    seconds=time.perf_counter() - clock,
                    **got,
                )
            )
            on_end()

    await asyncio.gather(*(worker() for _ in range(min(concurrency, len(missing)))))
    if failures:
        raise failures[0]
    found = [store.get(key) for key in keys]
    return [answer for answer in found if answer is not None]


def _asked(server: Server, item: Item, max_tokens: int) -> dict[str, Any]:
    """All that the answer to an item depends on, as far as a client knows."""
    if isinstance(item, Question):
        return {"url": server.url, **server.body(context=item.context, choices=item.choices)}
    return {"url": server.url, **server.body(prompt=item.prompt, max_tokens=max_tokens)}


async def _write(client: httpx.AsyncClient, server: Server, prompt: str, max_tokens: int) -> dict[str, Any]:
    """The fields of the Answer that a chat gives."""
    messages = [{"role": "user", "content": prompt}]
    body = await post(client, CHAT, server.body(messages=messages, max_tokens=max_tokens))
    try:
        choice = body["choices"][0]
        text = choice["message"]["content"] or ""
        if not isinstance(text, str):
            raise TypeError
        finish_reason = choice.get("finish_reason")
    except (LookupError, TypeError, AttributeError):
        raise RequestError(f"{CHAT} answered without choices[0].message.content") from None
    # Half of a surrogate pair, which JSON can hold, is no text that a file can.
    return {"text": text.encode(errors="replace").decode(), "finish_reason": finish_reason, **_usage(body)}


async def _choose(client: httpx.AsyncClient, server: Server, item: Question, by_ids: bool) -> dict[str, Any]:
    """The fields of the Answer that scoring all choices in one request gives.

    A choice's tokens are those of context and choice together, after as many as the context has alone, as in lm_eval.
    by_ids: prompts are token ids from /tokenize; else texts, and the context is scored too, to learn its length.
    """
    texts = [f"{item.context} {choice}" for choice in item.choices]
    if by_ids:
        prompts = [await _tokenize(client, server, text) for text in (item.context, *texts)]
        context_length = len(prompts[0])
        body = await _echo(client, server, prompts[1:])
        rows = _token_logprobs(body, len(texts))
        if any(len(row) != len(prompt) for row, prompt in zip(rows, prompts[1:], strict=True)):
            raise RequestError("echo gave another number of token_logprobs than prompt tokens and one more")
    else:
        body = await _echo(client, server, [item.context, *texts])
        context, *rows = _token_logprobs(body, len(texts) + 1)
        context_length = len(context)
    sums = []
    for row in rows:
        values = row[context_length:]
        if not values or not all(isinstance(v, int | float) and math.isfinite(v) for v in values):
            raise RequestError("echo gave no finite log-probability for every token of a choice")
        sums.append(math.fsum(values))
    return {"loglikelihoods": sums, **_usage(body)}


async def _echo(client: httpx.AsyncClient, server: Server, prompts: Sequence[Any]) -> dict[str, Any]:
    # One new token, though none is wanted: not every server takes max_tokens 0.
    return await post(client, COMPLETIONS, server.body(prompt=prompts, max_tokens=1, echo=True, logprobs=1))


def _token_logprobs(body: dict[str, Any], number: int) -> list[list[float]]:
    """The log-probabilities of each prompt's tokens, in the prompts' order, without the new token's."""
    try:
        choices = sorted(body["choices"], key=lambda choice: choice["index"])
        rows = [choice["logprobs"]["token_logprobs"][:-1] for choice in choices]
        firsts = [row[0] for row in rows]
    except (LookupError, TypeError):
        raise RequestError(
            f"{COMPLETIONS} answered without log-probabilities of the prompt",
            "arc_easy and piqa need a server that supports echo with logprobs: leave them out of --tasks.",
        ) from None
    if len(rows) != number or any(first is not None for first in firsts):
        raise RequestError(f"{COMPLETIONS} did not echo each prompt whole, its first log-probability null")
    return rows


async def _has_tokenize(client: httpx.AsyncClient, server: Server) -> bool:
    try:
        return bool(await _tokenize(client, server, "Question"))
    except RequestError as error:
        if error.status in (None, 401, 429, 503):  # not answers of a server that lacks the endpoint
            raise
        return False


async def _tokenize(client: httpx.AsyncClient, server: Server, text: str) -> list[int]:
    body = await post(client, "/tokenize", {"model": server.model, "prompt": text})
    tokens = body.get("tokens")
    if not isinstance(tokens, list):
        raise RequestError("/tokenize answered without tokens", status=200)
    return tokens


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The JSON object that the server answers. Waits and tries again while it is full. Raises RequestError."""
    response = await patient_post(client, path, json.dumps(body).encode())
    check_answer(response)
    try:
        answer = response.json()
    except (ValueError, RecursionError):
        answer = None
    if isinstance(answer, dict) and (fault := answer.get("error")):  # gateways tell of errors so, too
        raise RequestError(f"HTTP {response.status_code}: {error_message(fault)}", status=response.status_code)
    if not isinstance(answer, dict):
        raise RequestError(f"{path} did not answer with a JSON object", "Is it an OpenAI-compatible server?")
    return answer


def _usage(body: dict[str, Any]) -> dict[str, Any]:
    usage = body.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    try:
        return {name: token_count(counts.get(name)) for name in ("prompt_tokens", "completion_tokens", "kv_slots")}
    except TypeError:
        raise RequestError("the server's usage holds a count that is no whole number") from None
