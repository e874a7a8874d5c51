"""Delivery: what the core tells of requests, to their streams and to the observer. It starts and ends no engine."""

from __future__ import annotations

import logging
from collections.abc import Callable

from hamburger.engine.queue_room import QueueRoom
from hamburger.engine.request_stream import OpenStreams, RequestStream
from hamburger.engine.types.errors import (
    EngineDead,
    EngineDraining,
    HamburgerError,
    InvalidRequest,
    OutOfMemory,
    QueueTimeout,
    UnknownAdapter,
)
from hamburger.engine.types.messages import AbortRequest, GroupOutput, RequestFailed, StepOutputs
from hamburger.engine.types.observer import EndReason, EngineObserver, RequestTimings

logger = logging.getLogger(__name__)


class Delivery:
    """For one event loop. Every end of a request passes `finish`, once."""

    def __init__(
        self,
        streams: OpenStreams,
        queue_room: QueueRoom,
        observer: EngineObserver | None,
        clock: Callable[[], float],
        send: Callable[[AbortRequest], None],
        retry_after: Callable[[int], int],
    ) -> None:
        """send: to the core that runs now. retry_after: AsyncEngine's. clock: time.monotonic() seconds."""
        self._streams, self._queue_room = streams, queue_room
        self._observer, self._clock = observer, clock
        self._send, self._retry_after = send, retry_after

    def deliver(self, outputs: StepOutputs) -> None:
        """The groups and failures of a step; those of requests that have ended are dropped."""
        for output in outputs.outputs:
            if (stream := self._streams.find(output.request_id)) is not None:
                try:
                    self._on_group(stream, output)
                except Exception as error:  # one request's text must not take the others' along
                    logger.exception("A group of %s cannot be delivered.", output.request_id)
                    self._give_up(stream, EngineDead(f"The answer cannot be delivered: {describe(error)}"))
        for failure in outputs.failures:
            if (stream := self._streams.find(failure.request_id)) is not None:
                reason: EndReason = "timeout" if failure.kind == "queue_timeout" else "error"
                self.finish(stream, reason, self._error_of(failure))

    def abort(self, stream: RequestStream) -> None:
        """Give a request up; RequestStream.abort calls it."""
        if stream in self._streams:
            self._send(AbortRequest(stream.request.request_id))
            self.finish(stream, "abort")

    def finish(self, stream: RequestStream, reason: EndReason, error: HamburgerError | None = None) -> None:
        """End an open stream; `error` is raised to whoever reads it."""
        request, now = stream.request, self._clock()
        self._streams.remove(stream)
        if stream.scores is not None and request.scores_prompt:
            stream.scores.give_up(error)
        stream.put(error)
        self._queue_room.count_finished(now)
        timings = _timings(stream, now)
        num_prompt, num_tokens = len(request.prompt_ids), stream.answer.completion_tokens
        self.observe(lambda o: o.on_finish(reason, request.params, num_prompt, num_tokens, timings, stream.lora))

    def observe(self, notify: Callable[[EngineObserver], None]) -> None:
        """An observer that fails harms no request."""
        if self._observer is not None:
            try:
                notify(self._observer)
            except Exception:
                logger.exception("The observer failed.")

    def _on_group(self, stream: RequestStream, output: GroupOutput) -> None:
        now = self._clock()
        update = stream.answer.push(output)
        gap = None if stream.last_group is None else now - stream.last_group
        if stream.first_token is None:
            stream.first_token, stream.scheduled = now, output.scheduled_time
            num_prompt, timings = len(stream.request.prompt_ids), _timings(stream, now)
            self.observe(lambda observer: observer.on_start(num_prompt, timings, stream.lora))
        stream.last_group = now
        if stream.scores is not None and update.prompt_logprobs is not None:
            stream.scores.tell(update.prompt_logprobs)
        stream.put(update)
        self.observe(lambda observer: observer.on_group(gap, len(update.token_ids)))
        if update.finish_reason is not None:
            self.finish(stream, update.finish_reason)
            if output.finish_reason is None:  # a stop string: the core does not know
                self._send(AbortRequest(output.request_id))

    def _give_up(self, stream: RequestStream, error: HamburgerError) -> None:
        if stream in self._streams:
            self._send(AbortRequest(stream.request.request_id))
            self.finish(stream, "error", error)

    def _error_of(self, failure: RequestFailed) -> HamburgerError:
        if failure.kind in ("queue_timeout", "out_of_memory"):
            seconds = self._retry_after(1)
            return (QueueTimeout if failure.kind == "queue_timeout" else OutOfMemory)(failure.message, seconds)
        if failure.kind == "lora":
            return UnknownAdapter(failure.message, "model")
        if failure.kind == "grammar":  # a format, structured_outputs or a tool asked for it
            return InvalidRequest(failure.message)
        return EngineDraining(failure.message) if failure.kind == "draining" else EngineDead(failure.message)


def _timings(stream: RequestStream, now: float) -> RequestTimings:
    return RequestTimings(stream.request.arrival_time, stream.scheduled, stream.first_token, now)


def describe(error: BaseException | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"
