"""Something breaks at each message between the two processes: whoever waits hears of it, and nothing is left behind."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time

import pytest

from async_engine import collect
from engine_builders import break_frames
from fakes import ByteTokenizer
from hamburger.engine.async_engine import AsyncEngine
from hamburger.engine.hosts.process_host import EngineProcessError, Outgoing, ProcessHost
from hamburger.engine.request import GenerationRequest
from hamburger.engine.transport.wire import Encoder, Failed, Progress
from hamburger.engine.types.errors import EngineDead
from hamburger.engine.types.events import EngineStopped
from hamburger.engine.types.messages import AbortRequest
from hamburger.engine.types.sampling_params import SamplingParams
from processes import gone, host_of, let_workers_find_builders
from slow_cases import slow_but

UNREADABLE = ("no MessagePack", "another type", "unknown kind", "huge")
SUDDEN = ("not encodable", "cut", "exit before")
TOLD = {
    "not encodable": "cannot be sent: Integer value out of range",
    "cut": "ended with code 9|cannot be read",  # what follows may come before the end
    "exit before": "ended with code 9",
}


@pytest.fixture(autouse=True)
def builders(monkeypatch: pytest.MonkeyPatch) -> None:
    let_workers_find_builders(monkeypatch)
    monkeypatch.setattr(Encoder, "frame", Encoder.frame)  # put back whatever break_frames does


async def life(host: ProcessHost) -> None:
    """Launch, three answers, an abort, and the end. Raises what the first of them raises."""
    engine = await AsyncEngine.launch(host, ByteTokenizer())
    try:
        params = SamplingParams(max_tokens=30, seed=0, ignore_eos=True)
        streams = engine.submit([GenerationRequest(str(i), [1, 2, 3], params) for i in range(3)])
        streams[2].abort()
        for result in await asyncio.gather(*map(collect, streams[:2]), return_exceptions=True):
            if isinstance(result, BaseException):
                assert isinstance(result, EngineDead)
                assert not engine.health().alive
                raise result
    finally:
        await engine.shutdown(0)


@pytest.mark.parametrize("fault", slow_but(["no MessagePack", "cut", "exit before"], [*UNREADABLE, *SUDDEN]))
@pytest.mark.parametrize("kind", ["Progress", "EngineReady", "StepStarted", "StepReport"])
async def test_a_frame_of_the_engine(kind: str, fault: str) -> None:
    host = host_of(f"frames {kind} {fault}")
    began = time.monotonic()
    async with asyncio.timeout(30):
        with pytest.raises((EngineDead, EngineProcessError), match=TOLD.get(fault, "sent what cannot be read")):
            await life(host)
        await gone(host.pid)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("fault", slow_but(["huge", "not encodable"], [*UNREADABLE, *SUDDEN]))
async def test_the_last_frame_of_the_engine(fault: str) -> None:
    host = host_of(f"frames Ended {fault}")
    async with asyncio.timeout(30):
        await life(host)  # nobody waits any more
        await gone(host.pid)


async def test_a_value_that_contradicts_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is MessagePack of the right type, but SamplingParams refuses it."""
    host = host_of("slow")
    monkeypatch.setattr(SamplingParams, "__post_init__", lambda self: None)
    async with asyncio.timeout(30):
        engine = await AsyncEngine.launch(host, ByteTokenizer())
        [stream] = engine.submit([GenerationRequest("a", [1], SamplingParams(temperature=-1, seed=0))])
        with pytest.raises(EngineDead, match="temperature is -1"):
            await collect(stream)
        await engine.shutdown(0)
        await gone(host.pid)


@pytest.mark.parametrize("fault", slow_but(["another type", "unknown kind"], UNREADABLE))
@pytest.mark.parametrize("kind", ["EngineArgs", "SubmitRequest", "AbortRequest"])
async def test_a_frame_of_the_server(kind: str, fault: str) -> None:
    host = host_of("slow")
    break_frames(kind, fault)
    async with asyncio.timeout(30):
        with pytest.raises((EngineDead, EngineProcessError), match=r"cannot be read|4294967295 bytes"):
            await life(host)
        await gone(host.pid)


async def test_what_there_is_no_room_for_leaves_in_order_when_there_is() -> None:
    mine, theirs = socket.socketpair()
    outgoing, frames = Outgoing(mine), [bytes([i]) * size for i, size in enumerate((3, 2_000_000, 5, 1_000_000, 1))]
    for frame in frames:
        outgoing.send(frame)
    wanted, received = b"".join(frames), bytearray()
    async with asyncio.timeout(30):
        while len(received) < len(wanted):
            received += await asyncio.to_thread(theirs.recv, 2**20)
    assert received == wanted
    outgoing.send(b"at once")
    assert theirs.recv(100) == b"at once"
    theirs.close()
    outgoing.send(b"for nobody")
    outgoing.end()
    mine.close()
    outgoing.send(b"for nobody")


async def test_last_words_are_heard_of_an_engine_that_has_left_messages_unread() -> None:
    """The kernel then resets the connection behind what was sent, and nothing can be written any more."""
    host = host_of("slow")
    mine, theirs = socket.socketpair()
    host._process = await asyncio.to_thread(subprocess.Popen, [sys.executable, "-c", "raise SystemExit(1)"])
    host._outgoing = Outgoing(mine)
    stopped: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    host._on_event = stopped.set_result
    host.send(AbortRequest("a"))
    reading = asyncio.create_task(host._read(mine))
    await asyncio.to_thread(theirs.recv, 1, socket.MSG_PEEK)  # what was sent lies there, and stays
    theirs.sendall(b"".join(Encoder().frame(value) for value in (Progress("line"), Failed("error", "why it ends"))))
    theirs.close()
    host.send(AbortRequest("b"))  # before it knows
    await asyncio.wait_for(reading, 30)
    event = await stopped
    assert isinstance(event, EngineStopped)
    assert str(event.error) == "why it ends"
