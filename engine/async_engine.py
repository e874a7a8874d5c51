"""AsyncEngine: the only face of the engine that the server knows. Text lives here; the core counts tokens and slots.

Nothing here imports torch: the core is built behind `launch`, and only the values of messages.py cross.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial

from hamburger.engine.delivery import Delivery, describe
from hamburger.engine.dial.confidence_dial import AutoConfidence, ConfidenceDial
from hamburger.engine.health import EngineHealth
from hamburger.engine.hosts.host import EngineHost, HostedEngine
from hamburger.engine.loras import EngineLoras, LoraAdapter
from hamburger.engine.queue_room import ClientLoad, QueueRoom
from hamburger.engine.request import AnswerBuilder, GenerationRequest, leaves_confidence, resolve_request
from hamburger.engine.request_stream import OpenStreams, PromptScores, RequestStream, dial_step, scored_once
from hamburger.engine.text.detokenizer import TextDecoder
from hamburger.engine.text.stop_strings import StopStrings
from hamburger.engine.types.config import EngineConfig
from hamburger.engine.types.errors import EngineDead, EngineDraining, InvalidRequest
from hamburger.engine.types.events import EngineReady, EngineStopped, Event, Message, StepReport, StepStarted, Stop
from hamburger.engine.types.messages import EngineInfo, LoraLoaded, StepStats
from hamburger.engine.types.observer import EngineObserver
from hamburger.model.config import ConfigError

_STOPS_SHARED = 8  # sets of stop strings among requests that come at once
_STOP_SECONDS = 5.0  # for an engine that was asked to stop; its step may be long


class AsyncEngine:
    """Made by `launch`, ended by `shutdown`; every method belongs to the event loop that launched it."""

    def __init__(
        self, host: EngineHost, tokenizer: TextDecoder, observer: EngineObserver | None, clock: Callable[[], float]
    ) -> None:
        """Use `launch`."""
        self.info: EngineInfo
        self._config: EngineConfig
        self._tokenizer = tokenizer
        self._clock = clock
        self._hosted = HostedEngine(host)
        self.dial: ConfidenceDial | None = None  # None: requests that name no confidence get the default
        self.starts_again = False  # by whoever restarts it, when it dies
        self._draining = False
        self.ready_at = 0.0  # Unix time
        self._step_started: float | None = None
        self._step_ended = clock()
        self._streams = OpenStreams()
        self._queue_room = QueueRoom()
        self._delivery = Delivery(self._streams, self._queue_room, observer, clock, self._send, self.retry_after)
        self._loras = EngineLoras()

    @classmethod
    async def launch(
        cls,
        host: EngineHost,
        tokenizer: TextDecoder,
        observer: EngineObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
        auto: AutoConfidence | None = None,
    ) -> AsyncEngine:
        """Start the host's engine and wait until it is ready; what building it raises is raised here.

        `clock` gives time.monotonic() seconds. auto: have a dial choose the confidence of requests that leave it;
        raises ConfigError where the model gives it nothing to choose.
        """
        engine = cls(host, tokenizer, observer, clock)
        await engine._start(engine._hosted)
        if auto is not None:
            try:
                engine.dial = auto.dial(engine.info)
            except ConfigError:
                await engine.shutdown(0)
                raise
        return engine

    async def restart(self, host: EngineHost) -> None:
        """After the engine has died: go on with another host's. Until that is ready, requests raise EngineDead.

        Raises what building it raises; it stays dead then.
        """
        hosted = HostedEngine(host)
        await self._start(hosted)
        if self._draining:  # shut down meanwhile: nobody else would end it
            host.abandon()
            await hosted.stopped
            await host.join()
            raise EngineDraining("The server is shutting down and starts no engine.")
        with suppress(EngineDead):  # dead once more, which who waits for its end sees
            await self._loras.load_again(host)
        self._queue_room.reset()
        self._hosted = hosted

    async def stopped(self) -> BaseException | None:
        """Wait until the engine has stopped: what it died of, None when it was asked to stop."""
        return (await asyncio.shield(self._hosted.stopped)).error

    async def _start(self, hosted: HostedEngine) -> None:
        hosted.host.start(partial(self._on_event, hosted))
        try:
            ready = await hosted.ready
        except BaseException:
            hosted.host.abandon()  # when cancelled while loading
            raise
        self._step_started, self._step_ended = None, self._clock()
        self.ready_at = time.time()
        self.info, self._config = ready.info, ready.config

    def confidence(self) -> float:
        """What a request that leaves it to the server would get now."""
        return self.info.default_confidence if self.dial is None else self.dial.confidence(self._dial_time())

    def _dial_time(self) -> float:
        """For the dial time stands still while a step runs: a long one is no idle time."""
        now = self._clock()
        return now if self._step_started is None else min(self._step_started, now)

    @property
    def pid(self) -> int:
        """Of the process that the engine runs in."""
        return self._hosted.host.pid

    @property
    def loras(self) -> Mapping[str, LoraAdapter]:
        """The LoRA adapters that requests may name."""
        return self._loras.adapters

    def open_by_lora(self) -> dict[str, int]:
        """Requests that have not ended, by the adapter that they named: each that is loaded is there, and "" for the
        model itself."""
        return dict.fromkeys(["", *self.loras], 0) | Counter(stream.lora or "" for stream in self._streams)

    async def load_lora(self, name: str, path: str) -> LoraAdapter:
        """Read the adapter in a folder that the engine sees. Raises InvalidRequest for one that cannot be loaded, or a
        name that is taken; EngineDraining or EngineDead."""
        self._check_available()
        return await self._loras.load(self._hosted.host, name, path)

    def unload_lora(self, name: str) -> None:
        """No request may name it from now on; those that run or wait keep it to their end. Raises InvalidRequest for a
        name that is not loaded; EngineDraining or EngineDead."""
        self._check_available()
        self._loras.unload(self._hosted.host, name)

    def submit(self, requests: Sequence[GenerationRequest]) -> list[RequestStream]:
        """Admit all or none. Raises PromptTooLong, ContextOverflow, NeverFits, InvalidRequest, QueueFull,
        EngineDraining or EngineDead before any work."""
        self._check_available()
        if any(request.params.n != 1 for request in requests):
            raise InvalidRequest("n is not 1: submit a request for each answer, each with n of 1.", "n")
        now = self._clock()
        # One value for the whole answer: the answer can name it, and a client ask for it again.
        chosen = None if self.dial is None else self.confidence()
        loras = [self._loras.number_of(request.lora) for request in requests]
        resolved = [
            replace(resolve_request(request, self.info, now, chosen), lora=lora)
            for request, lora in zip(requests, loras, strict=True)
        ]
        self._streams.check_ids(request.request_id for request in requests)
        self._queue_room.check(len(resolved), self._config, now, self._streams.oldest_arrival())
        streams: list[RequestStream] = []
        stop_strings = lru_cache(maxsize=_STOPS_SHARED)(StopStrings)
        shared: dict[tuple[object, ...], PromptScores] = {}
        try:
            for asked, request in zip(requests, resolved, strict=True):
                answer = AnswerBuilder(self._tokenizer, request.params, self.info, stop_strings, goes_on=asked.goes_on)
                numbered = replace(request, number=self._queue_room.num_sent + 1)
                request, scores = scored_once(numbered, shared)
                self._hosted.host.send(request)  # what cannot be sent was not counted
                self._queue_room.count_sent()
                chosen_by_dial = chosen is not None and leaves_confidence(asked.params)
                stream = RequestStream(request, answer, self._delivery.abort, chosen_by_dial, scores, asked.lora)
                self._streams.add(stream)
                streams.append(stream)
        except BaseException:
            for stream in streams:
                stream.abort()
            raise
        return streams

    @property
    def max_queue(self) -> int:
        """Most requests that may wait."""
        return self._config.max_queue

    def load_of(self, client: str) -> ClientLoad:
        config, streams = self._config, self._streams
        seats = self._queue_room.free_seats(config), config.max_num_seqs
        return ClientLoad(streams.num_open(client), streams.num_without_token(client), config.max_queue, *seats)

    def retry_after(self, num_requests: int) -> int:
        """Whole seconds until so many more requests should have left."""
        oldest = self._streams.oldest_arrival()
        return self._queue_room.retry_after(num_requests, self._config, self._clock(), oldest)

    def health(self) -> EngineHealth:
        now, started, stopped = self._clock(), self._step_started, self._hosted.stopped.done()
        waits_since = self._streams.oldest_arrival_at_core()
        return EngineHealth(
            alive=not stopped,
            draining=self._draining,
            num_running=self._queue_room.num_running,
            num_waiting=self._queue_room.num_waiting,
            seconds_in_step=None if started is None else max(0.0, now - started),
            seconds_without_step=0.0 if waits_since is None else max(0.0, now - max(waits_since, self._step_ended)),
            error=describe(self._hosted.stopped.result().error) if stopped else None,
            restarting=stopped and self.starts_again and not self._draining,
        )

    def drain(self) -> None:
        """Take no new requests; running and waiting ones finish. Idempotent."""
        self._draining = True

    async def shutdown(self, drain_seconds: float) -> None:
        """Drain for at most `drain_seconds`, give the rest up (EngineDraining), end the engine. Idempotent."""
        self.drain()
        try:
            async with asyncio.timeout(drain_seconds):
                await self._streams.wait_until_idle()
        except TimeoutError:
            pass
        finally:
            self._hosted.host.send(Stop())
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await asyncio.shield(self._hosted.stopped)
        except TimeoutError:  # it is in a long step, or hangs
            self._cut_short()
            self._hosted.host.abandon()
            await asyncio.shield(self._hosted.stopped)
        await self._hosted.host.join()

    def _send(self, message: Message) -> None:
        self._hosted.host.send(message)

    def _check_available(self) -> None:
        stopped = self._hosted.stopped
        if stopped.done() and (error := stopped.result().error) is not None:
            raise EngineDead(_dead_message(error))
        if self._draining:
            raise EngineDraining("The server is shutting down and takes no new requests.")

    def _on_event(self, hosted: HostedEngine, event: Event) -> None:
        match event:
            case StepStarted() | StepReport() if hosted is not self._hosted:
                pass  # of an engine that was given up
            case StepStarted():
                self._step_started = event.time
            case StepReport():
                self._step_started, self._step_ended = event.time if event.goes_on else None, event.time
                self._on_step(event)
            case LoraLoaded():
                self._loras.on_loaded(event)
            case EngineReady():
                if not hosted.ready.done():
                    hosted.ready.set_result(event)
            case EngineStopped():
                self._on_stop(hosted, event)

    def _on_stop(self, hosted: HostedEngine, event: EngineStopped) -> None:
        hosted.stopped.set_result(event)
        self._loras.on_stop()
        if not hosted.ready.done():
            hosted.ready.set_exception(event.error or EngineDead("The engine ended before it was ready."))
            return  # nothing was asked of it
        if hosted is not self._hosted or hosted.ready.cancelled():  # given up, or nobody waited for its start any more
            return
        self._queue_room.reset()
        if event.error is None:  # it was to stop: what is open it never got, as its grammar was being compiled
            self._cut_short()
            return
        self._step_started = None
        idle = StepStats(0, 0, 0, 0, self._config.total_slots, 0, 0, [], 0.0)
        self._delivery.observe(lambda observer: observer.on_step(idle))
        for stream in self._streams:
            self._delivery.finish(stream, "error", EngineDead(_dead_message(event.error)))

    def _cut_short(self) -> None:
        for stream in self._streams:
            error = EngineDraining("The server is shutting down; the answer was cut short.")
            self._delivery.finish(stream, "error", error)

    def _on_step(self, report: StepReport) -> None:
        stats = report.outputs.stats
        self._queue_room.update(len(report.received), stats)
        self._streams.receive(report.received)
        if stats is not None:
            self._delivery.observe(lambda observer: observer.on_step(stats))
            if self.dial is not None:
                self.dial.observe(dial_step(report, stats, self._streams.find))
        self._delivery.deliver(report.outputs)


def _dead_message(error: BaseException) -> str:
    return f"The engine stopped on an error: {describe(error)}"
