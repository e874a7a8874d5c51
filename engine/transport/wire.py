"""How messages and events cross between the server's process and the engine's: frames on a socket pair.

    frame   length of the rest (4 bytes, big endian) | kind (1 byte) | MessagePack

A socket pair, because its end tells of the other side's death at once, whatever killed it, in both directions.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from hamburger.engine.types.config import EngineArgs
from hamburger.engine.types.errors import HamburgerError
from hamburger.engine.types.events import EngineReady, StepReport, StepStarted, Stop
from hamburger.engine.types.messages import AbortRequest, LoadLora, LoraLoaded, SubmitRequest, UnloadLora
from hamburger.model.parallel.step_shape import StepShape

LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 2**30  # far above any; a length beyond it was never written by the other side


@dataclass(frozen=True, slots=True)
class Progress:
    """Engine -> server: one line for people while the model loads."""

    line: str


@dataclass(frozen=True, slots=True)
class Failed:
    """Engine -> server: what building (kinds config and checkpoint) or a step raised. The engine then ends."""

    kind: Literal["config", "checkpoint", "error"]
    message: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Engine -> server: it was asked to stop, and has."""


@dataclass(frozen=True, slots=True)
class RankArgs:
    """Rank 0 -> rank `rank`: what to build a part of."""

    args: EngineArgs
    rank: int


@dataclass(frozen=True, slots=True)
class RankLoaded:
    """Rank -> rank 0: it has its weights."""


@dataclass(frozen=True, slots=True)
class RankMeet:
    """Rank 0 -> each rank: the port of 127.0.0.1 where they all meet, and how many steps they measure then."""

    port: int
    num_measured: int


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Rank -> rank 0: bytes that it has for its part of the KV pool, beside its weights and what steps take."""

    pool_bytes: int


@dataclass(frozen=True, slots=True)
class RankPool:
    """Rank 0 -> each rank: blocks of the KV pool. Then come the steps."""

    num_blocks: int


# A frame's kind is its place here: only ever append.
_KINDS: tuple[type, ...] = (
    EngineArgs,
    SubmitRequest,
    AbortRequest,
    Stop,
    Progress,
    EngineReady,
    StepStarted,
    StepReport,
    Failed,
    Ended,
    RankArgs,
    RankLoaded,
    RankPool,
    StepShape,
    RankMeet,
    RankMemory,
    LoadLora,
    UnloadLora,
    LoraLoaded,
)
_KIND_BYTES = {kind: bytes([i]) for i, kind in enumerate(_KINDS)}


class Encoder:
    """Values -> frames. One thread's own."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()

    def frame(self, value: object) -> bytes:
        body = self._encoder.encode(value)
        return LENGTH.pack(1 + len(body)) + _KIND_BYTES[type(value)] + body


class WireError(ValueError):
    """What came is no frame of this version."""


class Decoder:
    """The rest of a frame, after its length -> the value."""

    def __init__(self) -> None:
        self._decoders: list[msgspec.msgpack.Decoder[Any]] = [msgspec.msgpack.Decoder(kind) for kind in _KINDS]

    def value(self, rest: bytes) -> Any:
        """Raises WireError."""
        try:
            return self._decoders[rest[0]].decode(memoryview(rest)[1:])
        except (IndexError, ValueError, msgspec.DecodeError, HamburgerError) as error:  # values check themselves
            raise WireError(f"a frame of {len(rest)} bytes cannot be read: {error}") from error


class FrameBuffer:
    """Bytes as they come -> whole frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def frames(self, part: bytes | memoryview) -> Iterator[bytes]:
        """The rest of each frame, after its length, that `part` ends. Raises WireError."""
        self._bytes += part
        at = 0
        while len(self._bytes) >= at + LENGTH.size:
            end = at + LENGTH.size + frame_size(self._bytes[at : at + LENGTH.size])
            if len(self._bytes) < end:
                break
            yield bytes(self._bytes[at + LENGTH.size : end])
            at = end
        del self._bytes[:at]


def frame_size(head: bytes | bytearray) -> int:
    """How many bytes follow a frame's length. Raises WireError."""
    size: int = LENGTH.unpack(head)[0]
    if size > MAX_FRAME_BYTES:
        raise WireError(f"a frame says that it has {size} bytes, more than any")
    return size


def frames(connection: socket.socket) -> Iterator[Any]:
    """The values that come over a blocking socket, until the other side has gone. Raises WireError."""
    decoder = Decoder()
    with connection.makefile("rb") as stream:
        while len(head := stream.read(LENGTH.size)) == LENGTH.size:
            size = frame_size(head)
            rest = stream.read(size)
            if len(rest) < size:
                return
            yield decoder.value(rest)
