"""RequestStream: one answer on its way to whoever asked for it; OpenStreams: all that are unfinished."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from hamburger.engine.dial.confidence_dial import DialRow, DialStep
from hamburger.engine.request import AnswerBuilder, RequestUpdate
from hamburger.engine.types.errors import EngineDead, HamburgerError
from hamburger.engine.types.events import StepReport
from hamburger.engine.types.messages import StepStats, SubmitRequest, TokenLogprobs


class PromptScores:
    """The log-probabilities of a prompt, which is scored once for several answers: the first one's request asks for
    them, and the others wait for what it gets."""

    def __init__(self) -> None:
        self._scores: asyncio.Future[list[TokenLogprobs | None]] = asyncio.get_running_loop().create_future()

    def tell(self, scores: list[TokenLogprobs | None]) -> None:
        if not self._scores.done():
            self._scores.set_result(scores)

    def give_up(self, error: HamburgerError | None) -> None:
        """The first request ends. error: of what, if not of its client's own will. What was told before, holds."""
        if not self._scores.done():
            self._scores.set_exception(error or EngineDead("The prompt was not scored: its request was given up."))
            self._scores.exception()  # nobody may wait for it

    async def wait(self) -> list[TokenLogprobs | None]:
        """Raises what give_up was given."""
        return await asyncio.shield(self._scores)


class RequestStream:
    """One answer's updates as they come; ends after the update that carries a finish_reason, or after abort().

    Iterating raises EngineDead, EngineDraining, QueueTimeout or OutOfMemory when the engine gives the request up.
    Leaving the iteration early (break, an exception, cancellation, aclose) aborts the request. One consumer iterates a
    stream; one that is never iterated runs to its end unless abort() is called.
    """

    def __init__(
        self,
        request: SubmitRequest,
        answer: AnswerBuilder,
        on_abort: Callable[[RequestStream], None],
        chosen_by_dial: bool = False,
        scores: PromptScores | None = None,
        lora: str | None = None,
    ) -> None:
        """chosen_by_dial: whether the dial chose its confidence. scores: of its prompt, if several answers share them;
        its request asks for them, or it waits for another's. lora: the name of its adapter."""
        self.scores, self.lora = scores, lora
        self._on_abort = on_abort
        self.is_received = False  # by the core: until then what is told of its id is another's, which has ended
        self.request = request
        self.answer = answer
        self.chosen_by_dial = chosen_by_dial
        # Unbounded, so that a slow consumer never holds up the others; max_tokens bounds it.
        self.updates: asyncio.Queue[RequestUpdate | HamburgerError | None] = asyncio.Queue()
        self.scheduled: float | None = None
        self.first_token: float | None = None
        self.last_group: float | None = None
        self.last_step: float | None = None  # the end of the step that emitted its newest group, by the engine's clock

    async def __aiter__(self) -> AsyncGenerator[RequestUpdate, None]:
        try:
            waits = self.scores is not None and not self.request.scores_prompt
            while isinstance(update := await self.updates.get(), RequestUpdate):
                if waits and self.scores is not None:
                    update, waits = replace(update, prompt_logprobs=await self.scores.wait()), False
                yield update
            self.updates.put_nowait(update)  # the end stays the end for whoever asks again
            if update is not None:
                raise update
        finally:
            self.abort()

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
