"""A rank of tensor parallelism: `python -m hamburger.engine.ranks.rank FD`, started by Ranks (ranks.py).

FD is its end of a socket pair. It knows no request: it holds a part of the model and of the KV cache, and takes its
part in each step that rank 0 announces. It ends with rank 0, however that ends: the socket's end tells it, also in the
middle of a step, and on Linux the kernel kills it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

from hamburger.engine.transport.engine_process import FAILED, begin, failure
from hamburger.engine.transport.wire import Encoder, Failed, RankArgs, RankLoaded, RankMemory, frames


def main(argv: list[str]) -> int:
    connection = begin(int(argv[1]))
    incoming = frames(connection)
    hello: RankArgs | None = next(incoming, None)
    if hello is None:  # rank 0 has gone already
        return FAILED
    values: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(incoming, values), name="hamburger-inbox", daemon=True).start()
    try:
        _follow(connection, hello, values)
    except BaseException as error:  # whatever it is, rank 0 must hear of it
        told = failure(error)
        if told.kind == "error":
            told = Failed("error", f"rank {hello.rank}: {told.message}")
        _send(connection, told)
    return FAILED


def _follow(connection: socket.socket, hello: RankArgs, values: queue.SimpleQueue[Any]) -> None:
    from hamburger.engine.ranks.build import RankBuild  # it imports torch, for seconds, in which rank 0 may die

    build = RankBuild(hello.args, hello.rank)
    _send(connection, RankLoaded())
    _send(connection, RankMemory(build.meet(values.get(), values.get)))
    cache = build.cache(values.get())
    while True:
        build.steps.follow(values.get(), cache)


def _read(incoming: Iterator[Any], values: queue.SimpleQueue[Any]) -> None:
    """Until rank 0 has gone."""
    try:
        for value in incoming:
            values.put(value)
    finally:
        os._exit(FAILED)


def _send(connection: socket.socket, value: object) -> None:
    with contextlib.suppress(OSError):  # rank 0 has gone; so will this process
        connection.sendall(Encoder().frame(value))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
