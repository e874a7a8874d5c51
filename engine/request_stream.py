"""RequestStream: one answer on its way to whoever asked for it; OpenStreams: all that are unfinished."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from hamburger.engine.dial.confidence_dial import DialRow, DialStep
from hamburger.engine.request import AnswerBuilder, RequestUpdate
from hamburger.engine.types.errors import EngineDead, HamburgerError
from hamburger.engine.types.events import StepReport
from hamburger.engine.types.messages import StepStats, SubmitRequest, TokenLogprobs

T = TypeVar("T")
StreamItem = RequestUpdate | HamburgerError | None  # None: the end


class Mailbox(Generic[T]):
    """What has come for one reader, in order. Unbounded, so that a slow reader never holds up the others; an answer's
    max_tokens bounds it. Unlike asyncio.Queue it knows whether its reader has read all and waits."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_awaited(self) -> bool:
        """Whether the reader waits for the next item, with nothing before it."""
        return self._waiter is not None and not self._waiter.done()

    def put(self, item: T) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> T:
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()


class PromptScores:
    """The log-probabilities of a prompt, which is scored once for several answers: the first one's request asks for
    them, and the others wait for what it gets."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.known: asyncio.Future[list[TokenLogprobs | None]] = loop.create_future()

    def tell(self, scores: list[TokenLogprobs | None]) -> None:
        if not self.known.done():
            self.known.set_result(scores)

    def give_up(self, error: HamburgerError | None) -> None:
        """The first request ends. error: of what, if not of its client's own will. What was told before, holds."""
        if not self.known.done():
            self.known.set_exception(error or EngineDead("The prompt was not scored: its request was given up."))
            self.known.exception()  # nobody may wait for it


class RequestStream:
    """One answer's updates as they come; ends after the update that carries a finish_reason, or after abort().

    Iterating raises EngineDead, EngineDraining, QueueTimeout or OutOfMemory when the engine gives the request up.
    Leaving the iteration early (break, an exception, cancellation, aclose) aborts the request. One consumer iterates a
    stream, or is told by `tell`; one that nobody reads runs to its end unless abort() is called.
    """

    def __init__(
        self,
        request: SubmitRequest,
        answer: AnswerBuilder,
        on_abort: Callable[[RequestStream], None],
        chosen_by_dial: bool,
        scores: PromptScores | None,
        lora: str | None,
    ) -> None:
        """chosen_by_dial: whether the dial chose its confidence. scores: of its prompt, if several answers share them;
        its request asks for them, or it waits for another's. lora: the name of its adapter."""
        self.scores, self.lora = scores, lora
        self._on_abort = on_abort
        self.is_received = False  # by the core: until then what is told of its id is another's, which has ended
        self.request = request
        self.answer = answer
        self.chosen_by_dial = chosen_by_dial
        self._updates: Mailbox[StreamItem] = Mailbox()
        self._take: Callable[[StreamItem], None] = self._updates.put
        # Until another's scores of the prompt are known.
        self._held: list[StreamItem] | None = [] if scores is not None and not request.scores_prompt else None
        self.scheduled: float | None = None
        self.first_token: float | None = None
        self.last_group: float | None = None
        self.last_step: float | None = None  # the end of the step that emitted its newest group, by the engine's clock

    async def __aiter__(self) -> AsyncGenerator[RequestUpdate, None]:
        try:
            while isinstance(update := await self._updates.get(), RequestUpdate):
                yield update
            self._updates.put(update)  # the end stays the end for whoever asks again
            if update is not None:
                raise update
        finally:
            self.abort()

    def tell(self, take: Callable[[StreamItem], None]) -> None:
        """Instead of iterating: `take` gets each update, and at last the error or None, in the callback of the event
        loop that brings it. Before anything has come."""
        self._take = take

    def put(self, item: StreamItem) -> None:
        """What has come from the engine; after None or an error, nothing."""
        if self._held is None:
            self._take(item)
        else:
            if self.scores is not None and not self._held:
                self.scores.known.add_done_callback(self._release)
            self._held.append(item)

    def _release(self, scores: asyncio.Future[list[TokenLogprobs | None]]) -> None:
        held, self._held = self._held or [], None
        if isinstance(error := scores.exception(), HamburgerError):
            self._take(error)
            self._take = lambda item: None
            self.abort()
            return
        if isinstance(first := held[0], RequestUpdate):
            held[0] = first._replace(prompt_logprobs=scores.result())
        for item in held:
            self._take(item)

    def abort(self) -> None:
        """Free the request's slots within a step. Idempotent; a finished request is left alone."""
        self._on_abort(self)


def scored_once(
    request: SubmitRequest, shared: dict[tuple[object, ...], PromptScores]
) -> tuple[SubmitRequest, PromptScores | None]:
    """The request, and the scores of its prompt where it wants them; it asks for them unless one in `shared` does."""
    number = request.params.prompt_logprobs
    if number is None:
        return request, None
    key = tuple(request.prompt_ids), number, request.cache_salt, request.lora
    if key not in shared:
        shared[key] = PromptScores()
        return request, shared[key]
    return replace(request, scores_prompt=False), shared[key]


class OpenStreams:
    """The unfinished requests of one engine, in the order in which they came."""

    def __init__(self) -> None:
        self._streams: dict[str, RequestStream] = {}
        self._num_open: Counter[str] = Counter()  # by client
        self._idle = asyncio.Event()
        self._idle.set()

    def __iter__(self) -> Iterator[RequestStream]:
        """Those of now: each of them may be removed meanwhile."""
        return iter(list(self._streams.values()))

    def __contains__(self, stream: RequestStream) -> bool:
        return self._streams.get(stream.request.request_id) is stream

    def check_ids(self, request_ids: Iterable[str]) -> None:
        """Raise ValueError unless none of these ids is among them, nor twice here."""
        ids = list(request_ids)
        if len(set(ids)) < len(ids) or not self._streams.keys().isdisjoint(ids):
            raise ValueError("request ids must be unique among unfinished requests.")

    def add(self, stream: RequestStream) -> None:
        self._streams[stream.request.request_id] = stream
        self._num_open[stream.request.client] += 1
        self._idle.clear()

    def remove(self, stream: RequestStream) -> None:
        del self._streams[stream.request.request_id]
        self._num_open[stream.request.client] -= 1
        if not self._streams:
            self._idle.set()

    def num_open(self, client: str) -> int:
        return self._num_open[client]

    def num_without_token(self, client: str) -> int:
        """Requests of a client that have got nothing of their answers yet."""
        return sum(s.first_token is None and s.request.client == client for s in self._streams.values())

    def receive(self, numbers: Sequence[int]) -> None:
        """The core has been given the requests with these numbers."""
        if numbers:
            received = set(numbers)
            for stream in self._streams.values():
                stream.is_received |= stream.request.number in received

    def find(self, request_id: str) -> RequestStream | None:
        """The request that a report means; not one that took the id of an ended one after the step."""
        stream = self._streams.get(request_id)
        return stream if stream is not None and stream.is_received else None

    def oldest_arrival(self) -> float | None:
        """When the oldest request came; in seconds of the clock."""
        return next((stream.request.arrival_time for stream in self._streams.values()), None)

    def oldest_arrival_at_core(self) -> float | None:
        """The same of those that wait for the core, and not for their grammar to be compiled before."""
        arrivals = (s.request.arrival_time for s in self if s.is_received or s.request.params.grammar is None)
        return next(arrivals, None)

    async def wait_until_idle(self) -> None:
        await self._idle.wait()


def dial_step(report: StepReport, stats: StepStats, find: Callable[[str], RequestStream | None]) -> DialStep:
    """What the dial observes of a step. find: the unfinished request of an id; its last_step is brought up to date."""
    rows: list[DialRow] = []
    for output in report.outputs.outputs:
        stream = find(output.request_id)
        if stream is None or not stream.chosen_by_dial or not output.token_ids:
            continue
        if (confidence := stream.request.params.confidence) is not None:
            gap = None if stream.last_step is None else report.time - stream.last_step
            rows.append(DialRow(confidence, gap, len(output.token_ids)))
        stream.last_step = report.time
    num_tokens = sum(stats.group_sizes)
    return DialStep(report.time, stats.seconds, stats.prompt_slots, stats.decoded_sequences, num_tokens, rows)
