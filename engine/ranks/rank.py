"""A rank of tensor parallelism: `python -m hamburger.engine.ranks.rank FD [LOG_LEVEL LOG_FORMAT]`, started by Ranks.

FD is its end of a socket pair. It knows no request: it holds a part of the model and of the KV cache, and takes its
part in each step that rank 0 announces; it logs as rank 0 does. It ends with rank 0, however that ends: the socket's
end tells it, also in the middle of a step, and on Linux the kernel kills it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any, cast

from hamburger.engine.logs import BackgroundHandler, LogFormat, configure_logging, secrets_of_environment
from hamburger.engine.transport.engine_process import FAILED, failed_message, set_up_process
from hamburger.engine.transport.wire import Encoder, Failed, RankArgs, RankLoaded, RankMemory, frames


def main(argv: list[str]) -> int:
    connection = set_up_process(int(argv[1]))
    log = BackgroundHandler() if argv[2:] else logging.NullHandler()
    if argv[2:]:
        configure_logging(argv[2], cast(LogFormat, argv[3]), log, secrets_of_environment(os.environ))
    incoming = frames(connection)
    rank_args: RankArgs | None = next(incoming, None)
    if rank_args is None:  # rank 0 has gone already
        return FAILED
    values: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(incoming, values), name="hamburger-inbox", daemon=True).start()
    try:
        _follow(connection, rank_args, values)
    except BaseException as error:  # whatever it is, rank 0 must hear of it
        failed = failed_message(error)
        if failed.kind == "error":
            failed = Failed("error", f"rank {rank_args.rank}: {failed.message}")
        log.close()  # who hears of the end may end this process at once
        _send(connection, failed)
    return FAILED


def _follow(connection: socket.socket, rank_args: RankArgs, values: queue.SimpleQueue[Any]) -> None:
    from hamburger.engine.ranks.build import RankBuild  # it imports torch, for seconds, in which rank 0 may die

    build = RankBuild(rank_args.args, rank_args.rank)
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
