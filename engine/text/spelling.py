"""Spelling: how a token is written in a vocabulary, and the bytes that it stands for."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Literal

import tokenizers


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: every byte as one printable character; those that are not printable follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class Spelling:
    """What the decoder of a tokenizer does, token by token.

    space: the symbol written for a space (sentencepiece's U+2581). byte_fallback: "<0x0A>" is one byte.
    at_start: what happens to a first token: nothing, one leading space is cut, or all its space symbols are dropped.
    """

    byte_level: bool = False
    space: str | None = None
    byte_fallback: bool = False
    at_start: Literal["keep", "cut", "drop"] = "keep"

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> Spelling | None:
        """None for a decoder that is not one of the two families (byte-level, sentencepiece)."""
        if backend.decoder is None:
            return None
        described = json.loads(backend.decoder.__getstate__())
        steps = described["decoders"] if described["type"] == "Sequence" else [described]
        if [step["type"] for step in steps] == ["ByteLevel"]:
            return cls(byte_level=True)
        space: str | None = None
        byte_fallback = fused = False
        at_start: Literal["keep", "cut", "drop"] = "keep"
        for step in steps:
            match step:
                case {"type": "Replace", "pattern": {"String": str(symbol)}, "content": " "} if step is steps[0]:
                    space = symbol
                case {"type": "Metaspace", "replacement": str(symbol), "prepend_scheme": scheme} if not space:
                    space, at_start = symbol, "keep" if scheme == "never" else "drop"
                case {"type": "ByteFallback"}:
                    byte_fallback = True
                case {"type": "Fuse"}:
                    fused = True
                case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0} if fused:
                    at_start = "cut" if start else at_start
                case _:
                    return None
        return cls(space=space, byte_fallback=byte_fallback, at_start=at_start)

    def to_bytes(self, token: str, first: bool) -> bytes:
        if self.byte_level:
            # A token with any other character (an added one) is written as it is.
            return bytes(_BYTE_OF[c] for c in token) if all(c in _BYTE_OF for c in token) else token.encode()
        if self.space:
            token = token.replace(self.space, "" if first and self.at_start == "drop" else " ")
        is_byte = self.byte_fallback and re.fullmatch("<0x[0-9A-Fa-f]{2}>", token)
        data = bytes([int(token[3:5], 16)]) if is_byte else token.encode()
        return data.removeprefix(b" ") if first and self.at_start == "cut" else data
