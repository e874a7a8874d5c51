"""The life of one server process: bind, load, listen, drain, exit. No option parsing, no routes.

The port is taken first (so that a used one is told before minutes of loading) and listened on last: who can connect can
be served. SIGINT and SIGTERM drain; a second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shlex
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from hamburger.engine.client import AsyncEngine
from hamburger.engine.config import EngineArgs
from hamburger.engine.dial import AutoConfidence
from hamburger.engine.tokenizer import Tokenizer
from hamburger.model.sources import resolve_source
from hamburger.server.app import create_app
from hamburger.server.config import ServeSettings, SettingsError
from hamburger.server.metrics import ServerMetrics
from hamburger.server.middleware import access_logger
from hamburger.server.supervisor import Supervisor

_INTERRUPTED, _DIED = 130, 1
_CLOSE_SECONDS = 3  # for clients that do not read the end of their answer


def serve(settings: ServeSettings) -> int:
    """Serve until a signal; returns the exit code.

    Raises SettingsError, ConfigError, CheckpointError or TokenizerError, whose messages are fit for the user.
    """
    args = settings.engine_args()
    settings.api_keys()
    auto = settings.auto_confidence()
    _check_tls(settings)
    logging.basicConfig(level=settings.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    if settings.access_log:
        _log_accesses()
    with _bind(settings.host, settings.port) as listener:
        progress = _progress()
        progress("finding the model")
        source = resolve_source(args.model, args.base)
        tokenizer = Tokenizer.load(source.tokenizer_path)
        model_name = settings.served_model_name or source.name
        try:
            return asyncio.run(_run(settings, args, auto, listener, tokenizer, model_name, progress))
        except KeyboardInterrupt:  # while loading; _stop_on_signals takes over then
            _say("Stopped while loading.")
            return _INTERRUPTED


async def _run(
    settings: ServeSettings,
    args: EngineArgs,
    auto: AutoConfidence | None,
    listener: socket.socket,
    tokenizer: Tokenizer,
    model_name: str,
    progress: Callable[[str], None],
) -> int:
    metrics = ServerMetrics(model_name)
    supervisor = Supervisor(args, progress, settings.engine_restarts, settings.log_level)
    engine = await AsyncEngine.launch(supervisor.host, tokenizer, metrics, auto=auto)
    stopping = _stop_on_signals()
    keeping = asyncio.create_task(supervisor.keep(engine))
    watching = asyncio.create_task(supervisor.watch(engine))
    try:
        app = create_app(engine, tokenizer, metrics, settings, model_name)
        greeting = _greeting(settings, engine, _url(settings, listener), model_name, tokenizer)
        server = _Server(_uvicorn_config(app, settings), lambda: progress(greeting))
        return await _listen(server, listener, engine, settings.drain_seconds, stopping, keeping)
    finally:
        watching.cancel()
        keeping.cancel()
        await engine.shutdown(0)


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
    listener: socket.socket,
    engine: AsyncEngine,
    drain_seconds: float,
    stopping: asyncio.Event,
    keeping: asyncio.Task[None],
) -> int:
    """Serve until a signal or until the engine is dead for good; returns the exit code."""
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopped = asyncio.create_task(stopping.wait())
    await asyncio.wait({serving, stopped, keeping}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if keeping.done():
        server.should_exit = True  # whoever waited has been told
    elif not serving.done():
        _say(f"Stopping: running answers have {drain_seconds:g} s. A second signal stops at once.")
        await engine.shutdown(drain_seconds)  # new requests are answered 503 meanwhile
        # What is cut off below is cut off on purpose; uvicorn would log a traceback for each.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        server.should_exit = True
    await serving
    return _DIED if keeping.done() else 0


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which would close streams before they are drained."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._on_listening()


def _uvicorn_config(app: FastAPI, settings: ServeSettings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=65,  # longer than the pools of common clients and proxies
        timeout_graceful_shutdown=_CLOSE_SECONDS,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
    )


def _check_tls(settings: ServeSettings) -> None:
    """Raises SettingsError when the certificate cannot be used."""
    if settings.ssl_certfile is None:
        if settings.ssl_keyfile is not None:
            raise SettingsError("ssl_keyfile is given without ssl_certfile.")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(f"ssl_certfile {settings.ssl_certfile} cannot be used: {error}.") from error


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Raises SettingsError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise SettingsError(f"host is {host!r}: {error.strerror or error}.") from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise SettingsError(f"cannot listen on {host} port {port}: {reason}. Choose another --port.") from error
    return listener


def _url(settings: ServeSettings, listener: socket.socket) -> str:
    """Where a client on this machine finds the server."""
    host, scheme = settings.host, "https" if settings.ssl_certfile else "http"
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{scheme}://{name}:{listener.getsockname()[1]}"


def _log_accesses() -> None:
    """Lines of JSON and nothing else, whatever the level of the other logs."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    access_logger.addHandler(handler)
    access_logger.setLevel(logging.INFO)
    access_logger.propagate = False


def _progress() -> Callable[[str], None]:
    start = time.monotonic()
    return lambda line: _say(f"[{time.monotonic() - start:5.1f} s] {line}")


def _greeting(settings: ServeSettings, engine: AsyncEngine, url: str, model_name: str, tokenizer: Tokenizer) -> str:
    info = engine.info
    indent = "\n          "
    if info.is_plain_base:
        kind = "plain base model: 1.0 tokens per KV, every group has one token"
    else:
        kind = f"HAMburger model: groups of up to {info.max_group} tokens, "
        if engine.dial is None:
            kind += f"default confidence {info.default_confidence:g}"
        else:
            high, *_, low = engine.dial.levels
            kind += f"confidence {high:g}, under load down to {low:g} to hold {settings.target_tpot_ms:g} ms a token"
    lines = [
        f"ready: {model_name} on {info.device} in {info.dtype}, context {info.max_model_len:,} tokens",
        kind,
        f"KV pool: {info.total_slots:,} slots, about {info.expected_tokens:,} tokens; "
        f"{info.max_num_seqs} answers at once",
    ]
    body: dict[str, object] = {"model": model_name}
    if tokenizer.chat_template is None:
        path = "/v1/completions"
        body |= {"prompt": "Once upon a time", "max_tokens": 64}
    else:
        path = "/v1/chat/completions"
        body |= {"messages": [{"role": "user", "content": "Hello!"}], "stream": True}
    key = " -H 'Authorization: Bearer YOUR_KEY'" if settings.api_key or settings.api_key_file else ""
    curl = f"curl -N {url}{path}{key} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    return (
        f"{indent.join(lines)}\n\nHAMburger serves on {url} (API pages: {url}/docs). Ctrl-C stops it. Try:\n\n{curl}\n"
    )


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads any more: no reason to stop serving, or to stop without draining
        print(text, flush=True)
