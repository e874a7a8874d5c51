"""Real request traces: reading, and scaling to a context and to a load. Lengths, times and block hashes; no text.

Rows are JSON Lines (`.gz` or plain) with the names of the origin: Azure's have `t` (seconds), `prompt_tokens` and
`output_tokens`; Mooncake's `timestamp` (milliseconds), `input_length`, `output_length` and `hash_ids`, one a block of
512 prompt tokens.
"""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

SAMPLES = Path(__file__).parents[1] / "traces"
HASHED_TOKENS = 512  # prompt tokens of one of Mooncake's hashes
TOKEN_IDS = range(100, 40_000)  # ordinary tokens of the embedded model's vocabulary


class TraceError(ValueError):
    """A trace that cannot be read or replayed; the message names file and line."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request. arrival: seconds since the trace began. hash_ids: keys of its prompt's blocks; empty if unknown."""

    request_id: str
    arrival: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """name: of the file. hash_tokens: prompt tokens that one hash stands for, after scaling."""

    name: str
    rows: list[TraceRow]
    hash_tokens: int = HASHED_TOKENS
    num_shortened: int = 0

    @property
    def seconds(self) -> float:
        return self.rows[-1].arrival - self.rows[0].arrival

    def prompt_ids(self, row: TraceRow) -> list[int]:
        """Token ids that are alike where the hashes are alike, and unlike anything else's where there are none."""
        if not row.hash_ids:
            return random.Random(f"{self.name} {row.request_id}").choices(TOKEN_IDS, k=row.prompt_tokens)
        ids: list[int] = []
        for hash_id in row.hash_ids:
            ids += random.Random(f"{self.name} block {hash_id}").choices(TOKEN_IDS, k=self.hash_tokens)
        return ids[: row.prompt_tokens]

    def at_rate(self, per_second: float) -> Trace:
        """The same requests with their times stretched to this many a second on average."""
        stretch = (len(self.rows) - 1) / per_second / self.seconds if self.seconds > 0 else 0.0
        first = self.rows[0].arrival
        return replace(self, rows=[replace(row, arrival=(row.arrival - first) * stretch) for row in self.rows])


def read_trace(path: Path, limit: int | None = None) -> Trace:
    """The first `limit` rows of a file, in order of arrival. Raises TraceError."""
    rows = []
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for number, line in enumerate(lines, start=1):
            if limit is not None and number > limit:
                break
            try:
                rows.append(_row(str(number), json.loads(line)))
            except (ValueError, LookupError, TypeError) as error:
                raise TraceError(
                    f"{path}, line {number}: {error!r}: expected a row of an Azure or Mooncake trace."
                ) from None
    if not rows:
        raise TraceError(f"{path} holds no rows.")
    rows.sort(key=lambda row: row.arrival)
    return Trace(path.name.split(".")[0], rows)


def _row(request_id: str, row: dict[str, Any]) -> TraceRow:
    if "hash_ids" not in row:
        return TraceRow(request_id, float(row["t"]), int(row["prompt_tokens"]), max(1, int(row["output_tokens"])))
    hash_ids = tuple(map(int, row["hash_ids"]))
    length = int(row["input_length"])
    if len(hash_ids) != -(-length // HASHED_TOKENS):
        raise ValueError(f"{len(hash_ids)} hashes for {length} prompt tokens")
    return TraceRow(request_id, row["timestamp"] / 1000, length, max(1, int(row["output_length"])), hash_ids)


def scale(trace: Trace, prompts: Fraction, outputs: Fraction, max_model_len: int) -> Trace:
    """Lengths times these factors, in tokens, then cut where a row does not fit: its answer to half of the context at
    most, and its prompt to what the answer leaves. Raises TraceError where a hash would not be whole tokens."""
    hash_tokens = trace.hash_tokens * prompts
    if hash_tokens.denominator != 1 and any(row.hash_ids for row in trace.rows):
        raise TraceError(f"prompts cannot be scaled by {prompts}: a hash stands for {trace.hash_tokens} tokens.")
    rows, num_shortened = [], 0
    for row in trace.rows:
        asked = max(1, round(row.output_tokens * outputs))
        wanted = max(1, -(-row.prompt_tokens * prompts.numerator // prompts.denominator))
        output = min(asked, max_model_len // 2)
        prompt = min(wanted, max_model_len - output)
        num_shortened += (prompt, output) != (wanted, asked)
        kept = row.hash_ids[: -(-prompt // int(hash_tokens))] if row.hash_ids else ()
        rows.append(TraceRow(row.request_id, row.arrival, prompt, output, kept))
    return Trace(trace.name, rows, max(1, int(hash_tokens)), num_shortened)


def known_prefix_tokens(trace: Trace) -> list[int]:
    """Of each row, the prompt tokens in whole hashed blocks that an earlier row began with: what a prefix cache that
    forgets nothing could spare it. At least the last token is always computed."""
    known: set[tuple[int, ...]] = set()
    found = []
    for row in trace.rows:
        whole = row.prompt_tokens // trace.hash_tokens
        usable = (row.prompt_tokens - 1) // trace.hash_tokens
        shared = next((n for n in range(usable) if row.hash_ids[: n + 1] not in known), usable)
        found.append(shared * trace.hash_tokens if row.hash_ids else 0)
        known.update(row.hash_ids[: n + 1] for n in range(whole if row.hash_ids else 0))
    return found
