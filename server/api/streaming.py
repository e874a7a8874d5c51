"""From the engine's request streams to one HTTP answer: choices merged, clients watched, events framed.

    submit -> Generation (choices merged) -> first group -> EventStream: the reply's events of each group, and its end

Nothing is sent before the first group is there, unless it takes so long that proxies would cut the connection: until
then every error is an ordinary HTTP error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi.responses import Response, StreamingResponse
from sse_starlette import EventSourceResponse
from starlette.types import Message, Receive, Scope, Send

from hamburger.engine.request import RequestUpdate
from hamburger.engine.types.errors import HamburgerError
from hamburger.server.api.errors import ApiError, to_api_error
from hamburger.server.api.generation import Generation
from hamburger.server.api.reply import Reply
from hamburger.server.operation.direct_body import DirectBody, direct_body_of
from hamburger.server.operation.request_log import CLIENT_LEFT, RequestEntry, entry_of

logger = logging.getLogger(__name__)
T = TypeVar("T")
_LARGE = 2**20  # bytes of an answer
_MANY_SCORES = 200  # of a prompt: a few ms of writing them
_KEEP_ALIVE = b": keep-alive\n\n"  # a comment (HTML standard, 9.2.6)


async def unless_client_leaves(receive: Receive, work: Awaitable[T]) -> T:
    """What `work` gives; when the client goes away first, `work` is cancelled and ApiError 499 raised (to nobody).

    receive: of the request, whose body has been read.
    """
    task = asyncio.current_task()
    assert task is not None
    asked_before, has_left = task.cancelling(), False

    async def watch() -> None:
        nonlocal has_left
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
        except Exception:  # nobody would end the work of a client of whom nothing can be heard
            logger.exception("A client can no longer be watched: its request is given up.")
        has_left = True
        task.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if not has_left or task.uncancel() > asked_before:
            raise
        raise ApiError(CLIENT_LEFT, "The client closed the connection.") from None
    finally:
        watching.cancel()
        await asyncio.wait([watching])


async def collect(generation: Generation, reply: Reply) -> dict[str, Any]:
    """The whole answer, once every choice has ended."""

    def add(index: int, update: RequestUpdate) -> bool:
        if _takes_long(update):
            return False
        reply.add(index, update)
        return True

    generation.offer(add)
    async for index, update in generation:
        await _beside_others(update, partial(reply.add, index, update))
    return reply.whole()


async def _beside_others(update: RequestUpdate, work: Callable[[], T]) -> T:
    """A long prompt's log-probabilities take a while: other streams go on meanwhile."""
    return await asyncio.to_thread(work) if _takes_long(update) else work()


def _takes_long(update: RequestUpdate) -> bool:
    return update.prompt_logprobs is not None and len(update.prompt_logprobs) > _MANY_SCORES


async def whole_response(whole: dict[str, Any]) -> Response:
    """A whole answer, written choice by choice: the log-probabilities of many take a second, in which others' streams
    want their turn, and much memory, so what is large is sent as it is written."""
    written, pieces = bytearray(), _pieces(whole)
    for piece in pieces:
        written += piece
        if len(written) > _LARGE:
            return StreamingResponse(_in_turns(bytes(written), pieces), media_type="application/json")
        await asyncio.sleep(0)
    return Response(bytes(written), media_type="application/json")


def _pieces(whole: dict[str, Any]) -> Iterator[bytes]:
    if "choices" not in whole:
        yield msgspec.json.encode(whole)
        return
    empty = b'"choices":[]'  # no text holds it: quotes are escaped there
    before, _, after = msgspec.json.encode(whole | {"choices": []}).partition(empty)
    yield before + empty[:-1]
    for number, choice in enumerate(whole["choices"]):
        yield (b"," if number else b"") + msgspec.json.encode(choice)
    yield empty[-1:] + after


async def _in_turns(first: bytes, rest: Iterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    for piece in rest:
        yield piece


class EventStream(EventSourceResponse):
    """The streamed answer. However it ends (done, failed, client gone, never begun), its requests are aborted.

    An event leaves in the callback that brings its group, where the connection takes it at once (direct_body.py); else,
    and at first and last, by the application's `send`. Pings are only sent in a long silence, as naive clients take a
    comment for data, or for the first token. Not by the library's tasks for them and for a shutdown, in which the
    engine ends its streams itself.
    """

    def __init__(
        self,
        first: tuple[int, RequestUpdate] | None,
        generation: Generation,
        reply: Reply,
        *,
        on_failure: Callable[[ApiError], None],
        keep_alive: float | None,
    ) -> None:
        """first: None where it has not come, and a client is told that the connection lives. keep_alive: longest
        silence, in seconds."""
        self._generation, self._reply = generation, reply
        events = _events(first, generation, reply, on_failure, keep_alive)
        super().__init__(events, sep="\n", ping=0, headers={"Cache-Control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (body := direct_body_of(scope)) is not None:
            self._generation.offer(partial(self._write_at_once, body, entry_of(scope)))
        try:
            await unless_client_leaves(receive, self._stream_response(send))
        except ApiError as error:
            if error.status != CLIENT_LEFT:
                raise
        finally:
            self._generation.abort()

    def _write_at_once(self, body: DirectBody, entry: RequestEntry, index: int, update: RequestUpdate) -> bool:
        if not body.is_ready or _takes_long(update):
            return False
        if events := self._reply.events(index, update):
            self._generation.has_sent()
            entry.bytes += len(events)
            body.write(events)
        return True

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        """Without the library's cancel scope an event: no timeout is set here, and it costs more than the event."""
        await send(message)


async def _events(
    first: tuple[int, RequestUpdate] | None,
    generation: Generation,
    reply: Reply,
    on_failure: Callable[[ApiError], None],
    keep_alive: float | None,
) -> AsyncGenerator[bytes]:
    yield _KEEP_ALIVE if first is None else await _beside_others(first[1], partial(reply.events, *first))
    try:
        async with contextlib.aclosing(generation.or_silence(keep_alive)) as arriving:
            async for arrived in arriving:
                if arrived is None:
                    yield _KEEP_ALIVE
                elif events := await _beside_others(arrived[1], partial(reply.events, *arrived)):
                    generation.has_sent()
                    yield events
    except HamburgerError as error:
        failure = to_api_error(error)
        on_failure(failure)
        yield reply.failure(failure)
    else:
        yield reply.end()
