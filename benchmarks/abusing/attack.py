"""Sends attacks to a server, many at once, and says what of an answer is not as it should be."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import Any

import httpx

from abusing.bodies import Attack

SECONDS = 60.0  # which no answer may take
OF_LOAD = {"queue_full", "queue_timeout", "out_of_memory"}  # codes of 429 and 503 that are no fault
OF_KILLS = {"engine_unavailable"}  # nor these, where engines are killed
INSIDES = ("Traceback (most recent", 'File "/', "object at 0x", "SIGKILL", "site-packages")
# Types of the last events of typed streams.
LAST = {"message_stop", "response.completed", "response.incomplete", "response.failed", "error"}
# Sent as they are: what is no HTTP, or two kinds of it.
RAW: list[bytes] = [
    b"", b"\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET / HTTP/3\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: " + b"a" * 70_000 + b"\r\n\r\n",
    b"GET http://x/health HTTP/1.1\r\nHost: x\r\n\r\n", b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /" + b"%ff" * 3000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 20,
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
    b"Content-Length: 2\r\n\r\n{}",
    b"GET /health HTTP/1.0\r\n\r\n", b"BREW /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n",
]  # fmt: skip


@dataclass
class Findings:
    """counts: by kind and by status. slowest: (seconds, number, kind). gaps and polls: seconds beside the attacks.

    allowed: codes of 5xx that are no fault.
    """

    allowed: set[str] = field(default_factory=lambda: set(OF_LOAD))
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest: list[tuple[float, int, str]] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    polls: list[float] = field(default_factory=list)

    def fault(self, attack: Attack | None, what: str) -> None:
        where = "" if attack is None else f"number {attack.number} ({attack.kind}, {attack.path}): "
        self.faults.append(where + what)

    def took(self, attack: Attack, seconds: float) -> None:
        self.slowest = sorted([*self.slowest, (round(seconds, 2), attack.number, attack.kind)], reverse=True)[:10]


def why_wrong(status: int, text: str, allowed: Set[str] = OF_LOAD) -> str | None:
    """What of an answer is not as documented; None if all is. allowed: codes of 5xx that are no fault."""
    for inside in INSIDES:
        if inside in text:
            return f"{status} shows the server's insides: {inside}"
    if status >= 400:
        try:
            error = json.loads(text)["error"]
            code = error["code"]
            wrong = error.keys() != {"message", "type", "param", "code"} or not error["message"]
        except (ValueError, KeyError, TypeError):
            return f"{status} without the error's shape: {text[:200]!r}"
        if wrong:
            return f"{status} without the error's shape: {text[:200]!r}"
        if status >= 500 and code not in allowed:
            return f"{status}: {error['message'][:200]}"
        if len(text) > 4000:
            return f"{status} with an error of {len(text)} characters"
        return None
    text = text.replace(": keep-alive\n\n", "")
    if text.startswith("data: ") and not text.endswith("data: [DONE]\n\n"):
        return "a stream without an end"
    if text.startswith("event: ") and text.rstrip().rpartition("event: ")[2].partition("\n")[0] not in LAST:
        return "a stream without an end"
    return None


async def send(http: httpx.AsyncClient, attack: Attack, findings: Findings) -> None:
    began = time.monotonic()
    findings.counts[attack.kind] += 1
    try:
        async with asyncio.timeout(attack.leaves or SECONDS):
            response = await http.post(attack.path, content=attack.data, headers=attack.headers)
            findings.counts[f"status {response.status_code}"] += 1
            if (wrong := why_wrong(response.status_code, response.text, findings.allowed)) is not None:
                findings.fault(attack, wrong)
    except TimeoutError:
        if attack.leaves is None:
            findings.fault(attack, f"no answer in {SECONDS:g} s")
        else:
            findings.counts["left"] += 1
    except httpx.HTTPError as error:
        findings.fault(attack, f"{type(error).__name__}: {error}")
    findings.took(attack, time.monotonic() - began)


async def send_raw(host: str, port: int, draw: random.Random, findings: Findings) -> None:
    """One of RAW; the server has to answer or to close, whatever it is."""
    data = draw.choice(RAW)
    findings.counts["raw"] += 1
    try:
        async with asyncio.timeout(SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(data)
            writer.write_eof()
            answer = await reader.read()
            writer.close()
    except TimeoutError:
        findings.fault(None, f"{data[:60]!r} has neither an answer nor an end in {SECONDS:g} s")
        return
    except ConnectionError:
        return  # it was closed on what was still being sent
    if answer and not answer.startswith(b"HTTP/1.1 "):
        findings.fault(None, f"{data[:60]!r} is answered {answer[:60]!r}")
    if any(inside.encode() in answer for inside in INSIDES) or b"HTTP/1.1 500" in answer:
        findings.fault(None, f"{data[:60]!r} is answered {answer[:300]!r}")


async def watch_stream(http: httpx.AsyncClient, findings: Findings) -> None:
    """A well-behaved client, one stream after another, and the time between its events."""
    body: dict[str, Any] = {"prompt": "Once", "max_tokens": 200, "stream": True, "ignore_eos": True, "priority": -1}
    while True:
        last: float | None = None
        async with http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code == 503 and findings.allowed >= OF_KILLS:
                await asyncio.sleep(0.5)
                continue
            if response.status_code != 200:
                findings.fault(None, f"the stream beside them got {response.status_code}")
                return
            async for line in response.aiter_lines():
                if line:
                    now = time.monotonic()
                    if last is not None:
                        findings.gaps.append(now - last)
                    last = now


async def poll_health(http: httpx.AsyncClient, findings: Findings) -> None:
    while True:
        began = time.monotonic()
        response = await http.get("/health")
        findings.polls.append(time.monotonic() - began)
        if response.status_code != 200:
            findings.fault(None, f"/health was {response.status_code}: {response.text[:200]}")
        await asyncio.sleep(0.1)


def shares(values: list[float]) -> Iterator[tuple[str, float]]:
    """The median, the 99th percentile and the largest."""
    found = sorted(values) or [0.0]
    for name, share in (("median", 0.5), ("p99", 0.99), ("max", 1.0)):
        yield name, round(found[min(int(share * len(found)), len(found) - 1)], 4)
