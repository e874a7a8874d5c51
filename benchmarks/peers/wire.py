"""What compare.py and its workers say to each other: one JSON object a line, over the worker's stdin and stdout.

    worker:  {"ready": {...}}, once it has loaded; else {"missing": "why"} or {"error": "why"}
    driver:  {"streams": 4, "requests": [[[ids], output_tokens, group], ...]}
    worker:  {"answers": [{"started": s, "ended": s, "prompt_tokens": n, "arrivals": [[s, tokens], ...]}, ...]}

Times are of time.perf_counter(), which all processes of a Linux machine share. A worker ends when its stdin does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

EXIT_MISSING = 3  # a package that the worker needs is not installed


class Ask(NamedTuple):
    """One request: token ids, and how many tokens to generate whatever they are. group: at most so many at once, of
    those that make groups; the same for all of a message."""

    prompt_ids: list[int]
    output_tokens: int
    group: int | None = None


@dataclass(slots=True)
class Timing:
    """One answer. arrivals: (time, tokens) of everything that was generated at once; seconds of perf_counter."""

    prompt_tokens: int
    started: float = field(default_factory=time.perf_counter)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    ended: float = 0.0

    def add(self, tokens: int, now: float) -> None:
        self.arrivals.append((now, tokens))
        self.ended = now

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.arrivals)


Measure = Callable[[Sequence[Ask], int], list[Timing]]


def serve(load: Callable[[dict[str, Any]], tuple[Measure, dict[str, Any]]]) -> None:
    """Run a worker: `load` gets the options of the command line (JSON) and gives what answers requests, `streams` at a
    time, and facts about itself for the report."""
    # Libraries print as they like: only this file writes to what was stdout.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    @contextmanager
    def telling() -> Iterator[None]:
        """The process's one boundary: whatever a peer raises ends this worker, and the driver says why and goes on."""
        try:
            yield
        except ImportError as error:
            say({"missing": str(error)})
            sys.exit(EXIT_MISSING)
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})
            raise

    with telling():
        measure, facts = load(json.loads(sys.argv[1]))
    say({"ready": facts})
    for line in sys.stdin:
        message = json.loads(line)
        requests = [Ask(*request) for request in message["requests"]]
        with telling():
            say({"answers": [asdict(timing) for timing in measure(requests, message["streams"])]})
