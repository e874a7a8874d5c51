"""The life of one server process: bind, load, listen, drain, exit. No option parsing, no routes.

The port is taken first, so that a port in use is reported before minutes of loading, and listened on last: who can
connect can be served. SIGINT and SIGTERM drain; a second signal ends the process at once. SIGHUP has keys and
certificates read anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import shlex
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from hamburger.engine.hosts.process_host import Worker
from hamburger.engine.logs import BackgroundHandler, configure_logging, formatter_of
from hamburger.engine.process_usage import keep_giving_back
from hamburger.engine.sampling_defaults import SamplingDefaults
from hamburger.server.api.auth import ApiKeys
from hamburger.server.api.model_context import ModelContext
from hamburger.server.app import create_app_of
from hamburger.server.config import ServeSettings
from hamburger.server.exits import DIED, INTERRUPTED, Hangup, Terminated
from hamburger.server.launch import FoundModel, RunningModel, engine_arguments, find_models, running_models
from hamburger.server.operation.connections import bounded_protocol
from hamburger.server.operation.console import announce_settings, announcer, secrets_of
from hamburger.server.operation.listeners import bound
from hamburger.server.operation.open_files import ACCEPTED_AT_ONCE, allow_open_files, tells_of_no_room
from hamburger.server.operation.request_log import request_logger
from hamburger.server.operation.rotation import Certificate, RotatedFiles, certificate_of, rotate
from hamburger.server.operation.tls import tls_protocol
from hamburger.server.operation.tracing import RequestTraces, open_traces
from hamburger.server.responses.store import ResponseStore

_INDENT = "\n          "
_WAITING_CONNECTIONS = 2048  # for the event loop to accept them; the system may allow fewer
_CLOSE_SECONDS = 3  # for clients that do not read the end of their answer


def serve(settings: ServeSettings, worker: Worker | None = None, hangup: Hangup | None = None) -> int:
    """Serve until a signal; returns the exit code.

    worker: the first engine's process, where it was started before. hangup: made as the process started.

    Raises SettingsError, ConfigError, CheckpointError or TokenizerError, whose messages are fit for the user.
    """
    arguments = engine_arguments(settings)
    keys, certificate = ApiKeys(settings.api_keys()), certificate_of(settings)
    stored = ResponseStore(settings.response_store, settings.response_file)
    collector = settings.otlp_traces_endpoint
    with (
        contextlib.closing(stored),
        _logging(settings) as handler,
        contextlib.closing(open_traces(collector)) if collector is not None else contextlib.nullcontext() as traces,
        bound(settings.host, settings.port) as listeners,
    ):
        room = allow_open_files(settings.max_connections, len(listeners))
        progress = announcer(settings.log_format)
        announce_settings(settings, progress)
        progress("finding the model" if len(arguments) == 1 else f"finding {len(arguments)} models")
        models = find_models(arguments)
        rotated = _rotated_files(settings, keys, certificate, handler)
        entrance = _Entrance(keys, certificate, rotated, hangup or Hangup())
        settings = settings.model_copy(update={"max_connections": room})
        try:
            return asyncio.run(_run(settings, models, listeners, progress, worker, stored, traces, entrance))
        except (KeyboardInterrupt, asyncio.CancelledError) as stop:  # while loading; _stop_on_signals takes over then
            progress("stopped while loading")
            return INTERRUPTED if isinstance(stop, KeyboardInterrupt) and not isinstance(stop, Terminated) else 0


class _Entrance(NamedTuple):
    """What decides who is let in, and what is read anew for it."""

    keys: ApiKeys
    certificate: Certificate | None
    rotated: Sequence[RotatedFiles]
    hangup: Hangup


async def _run(
    settings: ServeSettings,
    models: list[FoundModel],
    listeners: list[socket.socket],
    progress: Callable[[str], None],
    worker: Worker | None,
    responses: ResponseStore,
    traces: RequestTraces | None,
    entrance: _Entrance,
) -> int:
    loop, hangup = asyncio.get_running_loop(), entrance.hangup
    loop.set_exception_handler(tells_of_no_room())
    if (task := asyncio.current_task()) is not None:
        cancel = task.cancel
        loop.add_signal_handler(signal.SIGTERM, cancel)
        loop.add_signal_handler(signal.SIGHUP, lambda: cancel() if hangup.is_an_end() else None)
    async with running_models(models, progress, worker) as found:
        stopping = _stop_on_signals()
        anew = asyncio.Event()
        loop.add_signal_handler(signal.SIGHUP, lambda: (stopping if hangup.is_an_end() else anew).set())
        contexts = [model.context for model in found]
        app = create_app_of(contexts, settings, responses, traces, entrance.keys)
        greeting = _greeting(settings, contexts, _url(settings, listeners[0].getsockname()[1]))
        config = uvicorn_config(app, settings, app.state.count_refusal, entrance.certificate)
        server = _Server(config, lambda: progress(greeting))
        keep_giving_back()
        gc.freeze()  # all of this stays: whoever is served later need not wait while it is looked through
        rotation = asyncio.create_task(rotate(entrance.rotated, anew, progress))
        try:
            return await _listen(server, listeners, found, settings.drain_seconds, stopping, progress)
        finally:
            rotation.cancel()


def _stop_on_signals() -> asyncio.Event:
    """Set by the first SIGINT or SIGTERM; the second ends the process."""
    stopping = asyncio.Event()

    def on_signal(number: int) -> None:
        if stopping.is_set():
            os._exit(128 + number)  # the engine's process ends with this one
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    return stopping


async def _listen(
    server: _Server,
    listeners: list[socket.socket],
    models: list[RunningModel],
    drain_seconds: float,
    stopping: asyncio.Event,
    progress: Callable[[str], None],
) -> int:
    """Serve until a signal or until an engine is dead for good; returns the exit code."""
    serving = asyncio.create_task(server.serve(sockets=listeners))
    stopped = asyncio.create_task(stopping.wait())
    supervisions = [model.supervision for model in models]
    await asyncio.wait({serving, stopped, *supervisions}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    has_died = any(task.done() for task in supervisions)
    if not serving.done():
        if not has_died:
            progress(f"stopping: running answers have {drain_seconds:g} s. A second signal stops at once.")
        elif len(models) > 1:
            progress(f"stopping, for an engine is dead: running answers of the others have {drain_seconds:g} s.")
        server.keep_no_connection()
        # Whoever waited for a dead engine has its error already. New requests are answered 503 meanwhile.
        await asyncio.gather(*(model.context.engine.shutdown(drain_seconds) for model in models))
        if not has_died:
            # What is cut off below is cut off on purpose; uvicorn would log a traceback for each.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        server.should_exit = True
    await serving
    return DIED if has_died else 0


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which would close streams before they are drained."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def keep_no_connection(self) -> None:
        """Close those that wait for a further request, the others once they have answered: who asks next is to find
        another server."""
        for connection in list(self.server_state.connections):
            if isinstance(connection, H11Protocol) and connection.cycle is not None:
                connection.shutdown()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        for listener in sockets or []:  # uvicorn has one number for this and for what is accepted at once
            listener.listen(_WAITING_CONNECTIONS)
        self._on_listening()


def uvicorn_config(
    app: FastAPI,
    settings: ServeSettings,
    on_refusal: Callable[[int, str | None], None],
    certificate: Certificate | None = None,
) -> uvicorn.Config:
    """How the application is served: uvicorn logs no requests itself. on_refusal: as of bounded_protocol. certificate:
    None where TLS is not spoken."""
    limits = (settings.max_connections, settings.client_seconds, on_refusal)
    protocol = bounded_protocol(*limits)
    return uvicorn.Config(
        app,
        loop="asyncio",
        http=protocol if certificate is None else tls_protocol(protocol, lambda: certificate.context, *limits),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # else whoever connects from this machine could say to be any client
        backlog=ACCEPTED_AT_ONCE,
        timeout_keep_alive=65,  # longer than the pools of common clients and proxies
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )


def _url(settings: ServeSettings, port: int) -> str:
    """Where a client on this machine finds the server."""
    host, scheme = settings.host, "https" if settings.ssl_certfile else "http"
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{scheme}://{name}:{port}"


def _rotated_files(
    settings: ServeSettings, keys: ApiKeys, certificate: Certificate | None, handler: logging.Handler
) -> list[RotatedFiles]:
    """handler: of the log, which masks all keys that ever were."""
    rotated, masked = [], dict.fromkeys(secrets_of(settings))

    def read_keys() -> None:
        found = settings.api_keys()
        masked.update(dict.fromkeys(found))
        handler.setFormatter(formatter_of(settings.log_format, [*masked]))
        keys.replace(found)

    if certificate is not None:
        rotated.append(RotatedFiles("the certificate", certificate.paths, certificate.read))
    if settings.api_key_file is not None:
        rotated.append(RotatedFiles("the file of API keys", [settings.api_key_file], read_keys))
    return rotated


@contextlib.contextmanager
def _logging(settings: ServeSettings) -> Iterator[logging.Handler]:
    """Log lines to stderr, from a thread, until it ends."""
    handler = BackgroundHandler()
    configure_logging(settings.log_level, settings.log_format, handler, secrets_of(settings))
    # Requests are logged whatever the level of the other lines; at debug, probes and scrapes too.
    request_logger.setLevel(logging.DEBUG if settings.log_level == "debug" else logging.INFO)
    try:
        yield handler
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


def _greeting(settings: ServeSettings, models: list[ModelContext], url: str) -> str:
    first = models[0]
    body: dict[str, object] = {"model": first.served.name}
    if first.tokenizer.chat_template is None:
        path = "/v1/completions"
        body |= {"prompt": "Once upon a time", "max_tokens": 64}
    else:
        path = "/v1/chat/completions"
        body |= {"messages": [{"role": "user", "content": "Hello!"}], "stream": True}
    key = " -H 'Authorization: Bearer YOUR_KEY'" if settings.api_key or settings.api_key_file else ""
    curl = f"curl -N {url}{path}{key} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    lines = [line for model in models for line in _description(model)]
    return (
        f"{_INDENT.join(lines)}\n\nHAMburger serves on {url} (API pages: {url}/docs). Ctrl-C stops it. Try:\n\n{curl}\n"
    )


def _description(model: ModelContext) -> list[str]:
    info = model.engine.info
    kind = "plain base model" if info.is_plain_base else "HAMburger model"
    if info.groups == "verified":
        text = "its own text" + ", but for old slots that settle" * info.settles
        kind += f": {text}, groups of up to {info.max_group} verified tokens, {_drafts(info.default_confidence)}"
    else:
        kind += f": groups of up to {info.max_group} tokens, {_confidence(model)}"
    return [
        f"ready: {model.served.name} on {info.device} in {info.dtype}, context {info.max_model_len:,} tokens",
        kind,
        f"KV pool: {info.total_slots:,} slots{'' if info.settles else f', about {info.expected_tokens:,} tokens'}; "
        f"{info.max_num_seqs} answers at once",
        *([_sampling(model.sampling_defaults)] if model.sampling_defaults else []),
        *([f"LoRA adapters: {', '.join(model.engine.loras)}"] if model.engine.loras else []),
    ]


def _sampling(defaults: SamplingDefaults) -> str:
    return "requests that do not say: " + ", ".join(f"{name} {value:g}" for name, value in defaults.items())


def _drafts(confidence: float) -> str:
    if confidence == 1:
        return "no drafts"
    return f"drafts from a chance of {confidence:g}" if confidence else "drafts where they pay"


def _confidence(model: ModelContext) -> str:
    dial = model.engine.dial
    if dial is None:
        return f"default confidence {model.engine.info.default_confidence:g}"
    high, *_, low = dial.levels
    return f"confidence {high:g}, under load down to {low:g} to hold {model.settings.target_tpot_ms:g} ms a token"
