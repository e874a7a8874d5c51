"""What the engine's process tells goes at once, in order, and never holds its loop up."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from hamburger.engine.transport.wire import Failed, Progress, frames
from hamburger.engine.worker import Outbox

SECONDS = 10.0


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        far.settimeout(SECONDS)
        yield near, far


def test_what_is_put_is_there_when_put_returns(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    outbox = Outbox(near)
    for line in "abc":
        outbox.put(Progress(line))
        assert len(far.recv(2**16, socket.MSG_DONTWAIT)) > 0
    outbox.close()


def test_nobody_reads_for_a_while(pair: tuple[socket.socket, socket.socket]) -> None:
    """Megabytes are taken at once, far more than a socket holds, and come whole and in order once somebody reads."""
    near, far = pair
    outbox = Outbox(near)
    lines = [f"{i} " + "x" * 5_000 for i in range(1_000)]
    for line in lines:
        outbox.put(Progress(line))
    found: list[str] = []

    def read() -> None:
        for value in frames(far):
            found.append(value.line)
            if len(found) == len(lines) + 1:
                return

    reading = threading.Thread(target=read)
    reading.start()
    outbox.put(Progress("the end"))  # overtakes nothing
    reading.join(SECONDS)
    assert found == [*lines, "the end"]
    outbox.put(Progress("once more"))
    assert next(frames(far)).line == "once more"
    outbox.close()


def test_several_threads_tell_something(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    outbox = Outbox(near)
    number, each = 4, 500

    def tell(thread: int) -> None:
        for i in range(each):
            outbox.put(Progress(f"{thread} {i} " + "y" * 300))

    threads = [threading.Thread(target=tell, args=(i,)) for i in range(number)]
    for thread in threads:
        thread.start()
    heard: dict[str, list[int]] = {}
    values = frames(far)
    for _ in range(number * each):
        thread_name, place, _ = next(values).line.split()
        heard.setdefault(thread_name, []).append(int(place))
    assert heard == {str(i): list(range(each)) for i in range(number)}
    outbox.close()


def test_the_server_has_gone() -> None:
    near, far = socket.socketpair()
    outbox = Outbox(near)
    far.close()
    for _ in range(3):
        outbox.put(Progress("to nobody"))
    outbox.close()
    near.close()


@pytest.mark.parametrize("last", [Failed("error", "a rank has gone"), object()])
def test_what_was_logged_is_written_before_the_end_is_told(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch, last: Any
) -> None:
    """Who hears of it may end the process."""
    near, far = pair
    order: list[str] = []

    def close_log() -> None:
        assert select.select([far], [], [], 0) == ([], [], [])
        order.append("log")

    def leave(code: int) -> NoReturn:
        order.append("exit")
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    outbox = Outbox(near, close_log)
    with pytest.raises(SystemExit):
        outbox.send_and_exit(last) if isinstance(last, Failed) else outbox.put(last)
    assert order == ["log", "exit"]
    assert isinstance(next(frames(far)), Failed)
