"""The engine's process: `python -m hamburger.engine.worker FD BUILDER LOG_LEVEL LOG_FORMAT`, started by ProcessHost.

FD is its end of a socket pair, BUILDER names `module:function`, EngineArgs and a progress callback -> core and info.
It ends with the server, however that ends: the socket's end tells it, and on Linux the kernel kills it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import queue
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, cast

from hamburger.engine.core.core import EngineCore
from hamburger.engine.grammar.matching import Grammars
from hamburger.engine.hosts.engine_loop import LORA_THREAD, Inbox, run_loop
from hamburger.engine.logs import BackgroundHandler, LogFormat, configure_logging, secrets_of_environment
from hamburger.engine.process_usage import keep_giving_back
from hamburger.engine.ranks.ranks import OnLost
from hamburger.engine.transport.engine_process import FAILED, failed_message, set_up_process
from hamburger.engine.transport.wire import Encoder, Ended, Failed, Progress, frames
from hamburger.engine.types.config import EngineArgs
from hamburger.engine.types.events import EngineReady, Message
from hamburger.engine.types.messages import AbortRequest, EngineInfo, SubmitRequest, UnloadLora

Builder = Callable[[EngineArgs, Callable[[str], None], OnLost], tuple[EngineCore, EngineInfo]]

_UNUSED_SECONDS = 60.0  # after which a compiled grammar is forgotten


def main(argv: list[str]) -> int:
    connection = set_up_process(int(argv[1]))
    secrets = secrets_of_environment(os.environ)
    log = BackgroundHandler()
    configure_logging(argv[3], cast(LogFormat, argv[4]), log, secrets)
    incoming = frames(connection)
    outbox = Outbox(connection, log.close)
    inbox: Inbox = queue.SimpleQueue()
    final_message: Ended | Failed
    try:
        build = _builder(argv[2])  # what it imports takes seconds: the server may still be finding the model
        args: EngineArgs | None = next(incoming, None)
        if args is None:  # the server has gone already
            return FAILED
        reader = Reader(incoming, inbox, outbox)
        core, info = build(args, lambda line: outbox.put(Progress(line)), outbox.send_and_exit)
        reader.compile_with(core.grammars)
        keep_giving_back()
        gc.freeze()  # what was loaded stays; looking through it again and again took 2 % of the steps' time
        outbox.put(EngineReady(info, core.config))
        run_loop(core, inbox, outbox.put)
        final_message = Ended()
    except BaseException as error:  # whatever it is, who waits must hear of it
        final_message = failed_message(error)
    outbox.end_with(final_message)
    return 0 if isinstance(final_message, Ended) else FAILED


class Outbox:
    """Sends what it is given, in order and at once, so that the server works while the loop plans its next step. What
    the socket has no room for a thread of its own sends: the loop never waits for the server to read."""

    def __init__(self, connection: socket.socket, close_log: Callable[[], None] = lambda: None) -> None:
        """close_log: writes what was logged, before a final message: who hears of the end may end this process at
        once."""
        self._connection, self._encoder, self._close_log = connection, Encoder(), close_log
        self._lock = threading.Lock()
        self._late: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._num_late = 0  # frames that wait for the thread, the one that it sends included
        self._thread = threading.Thread(target=self._send_late, name="hamburger-outbox", daemon=True)
        self._thread.start()

    def put(self, value: object) -> None:
        with self._lock:
            try:
                frame = self._encoder.frame(value)
            except Exception as error:  # whoever waits for this value would wait for ever
                self._close_log()
                self._send(self._encoder.frame(Failed("error", f"{type(value).__name__} cannot be sent: {error}")))
            else:
                self._send(frame)
                return
        self.close()
        os._exit(FAILED)

    def _send(self, frame: bytes) -> None:
        with contextlib.suppress(OSError):  # no room, or the server has gone, and so will this process
            if not self._num_late:
                frame = frame[self._connection.send(frame, socket.MSG_DONTWAIT) :]
        if frame:
            self._num_late += 1
            self._late.put(frame)

    def close(self) -> None:
        """Wait until all was sent."""
        self._late.put(None)
        self._thread.join()

    def end_with(self, final_message: Ended | Failed) -> None:
        """Send it as the last one, and wait until all was sent."""
        self._close_log()
        self.put(final_message)
        self.close()

    def send_and_exit(self, failed: Failed) -> None:
        """Send one final message and end this process, whatever its other threads are doing. From any thread."""
        self.end_with(failed)
        os._exit(FAILED)

    def _send_late(self) -> None:
        with contextlib.suppress(OSError):  # the server has gone; so will this process
            while (frame := self._late.get()) is not None:
                self._connection.sendall(frame)
                with self._lock:
                    self._num_late -= 1


class Reader:
    """Messages into the inbox, from a thread of its own, until the server has gone: then nobody waits for an answer."""

    def __init__(self, incoming: Iterator[Any], inbox: Inbox, outbox: Outbox) -> None:
        self._compiler: GrammarCompiler | None = None
        self._incoming, self._inbox, self._outbox = incoming, inbox, outbox
        threading.Thread(target=self._read, name="hamburger-inbox", daemon=True).start()

    def compile_with(self, grammars: Grammars | None) -> None:
        """From now on, compile a request's grammar before the core sees the request, so that no step waits for it."""
        if grammars is not None:
            self._compiler = GrammarCompiler(grammars, self._inbox)

    def _read(self) -> None:
        try:
            for message in self._incoming:
                if self._compiler is None or not self._compiler.take_if_it_waits(message):
                    self._inbox.put(message)
        except OSError:
            pass
        except Exception as error:  # who sent it would wait for ever
            self._outbox.end_with(Failed("error", f"its process was sent what cannot be read: {error}"))
        finally:
            os._exit(FAILED)


_Waiting = SubmitRequest | AbortRequest | UnloadLora


def _named(message: _Waiting) -> list[str | int]:
    """What it comes after: the request that it is about, by its id, or an adapter, by its number. Behind that what
    else comes after it."""
    if isinstance(message, UnloadLora):
        return [message.number]
    return [message.request_id, *([message.lora] if isinstance(message, SubmitRequest) and message.lora else [])]


class GrammarCompiler:
    """Compiles requests' grammars in a thread of its own, then puts them into the inbox. Others overtake them."""

    def __init__(self, grammars: Grammars, inbox: Inbox) -> None:
        self._grammars, self._inbox = grammars, inbox
        self._waiting: queue.SimpleQueue[_Waiting] = queue.SimpleQueue()
        # Of what waits, by request id: its abort must not overtake a request, nor another of its id what came before.
        # By LoRA adapter: nor may the end of its adapter.
        self._num_waiting: Counter[str | int] = Counter()
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="hamburger-grammars", daemon=True).start()

    def take_if_it_waits(self, message: Message) -> bool:
        """Take a request with a grammar, or what is about one that still waits here; returns whether it was that."""
        if not isinstance(message, SubmitRequest | AbortRequest | UnloadLora):
            return False
        has_grammar = isinstance(message, SubmitRequest) and message.params.grammar is not None
        with self._lock:
            if not has_grammar and not self._num_waiting[_named(message)[0]]:
                return False
            self._num_waiting.update(_named(message))
        self._waiting.put(message)
        return True

    def _run(self) -> None:
        while True:
            try:
                message = self._waiting.get(timeout=_UNUSED_SECONDS)
            except queue.Empty:
                self._grammars.forget_unused(_UNUSED_SECONDS)
                continue
            if isinstance(message, SubmitRequest) and message.params.grammar is not None:
                with contextlib.suppress(Exception):  # the core compiles it again, and reports the error
                    self._grammars.compile(message.params.grammar)
            self._inbox.put(message)
            with self._lock:
                self._num_waiting.subtract(_named(message))
                for name in _named(message):
                    if not self._num_waiting[name]:
                        del self._num_waiting[name]


def _builder(name: str) -> Builder:
    module, _, function = name.partition(":")
    builder: Builder = getattr(importlib.import_module(module), function)
    return builder


if __name__ == "__main__":
    code = main(sys.argv)
    if any(thread.name == LORA_THREAD for thread in threading.enumerate()):
        os._exit(code)  # all was sent, and what it reads is for nobody; it must not wake in an interpreter that ends
    sys.exit(code)
