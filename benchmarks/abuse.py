"""Abuse: a real server under bodies of every kind, raw sockets, bombs and clients that leave; it must stay whole.

    python benchmarks/abuse.py --bodies 100000 --kills 5 --out docs/results/abuse.json

Starts `hamburger serve` (options after `--` are its), draws bodies from its own OpenAPI document, and sends them by
--clients at once, with a raw socket for every fiftieth. Beside them one stream and a poll of /health are timed. Writes
a report, and exits 1 where there is a finding: an answer of 5xx that is not for load, one that is not of the documented
shape or shows the server's insides, one that takes more than a minute, a traceback in the log, a /health that is not
200, something that runs, waits or holds a slot at the end, a server that does not end by SIGTERM, or resident memory
that is more than 20 % above that before, a minute and a half later. With --kills the engine is killed so often on the
way; it has to come back each time. A finding names its number: --only N sends it again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Set
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import httpx

from abusing.attack import OF_KILLS, Findings, poll_health, send, send_raw, shares, watch_stream
from abusing.bodies import Bodies
from host.machine import free_port, processor
from host.served import engine_pid, kill_engine, metric, resident_mib

RAW_EVERY = 50
WARM_UP = 200  # bodies that come before memory is measured
POOL = ("--kv-cache-memory", "200MiB")  # small: it counts as resident once it was written
SETTLE_SECONDS = 90.0  # what is unused for a minute is given back


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bodies", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=0, help="of the engine, which --engine-restarts start again")
    parser.add_argument("--only", type=int, help="send the body of this number alone, and show its answer")
    parser.add_argument("--settle-seconds", type=float, default=SETTLE_SECONDS, help="before memory is measured again")
    parser.add_argument("--growth", type=float, default=1.2, help="of resident memory that is no finding (1.2)")
    parser.add_argument("--out", type=Path, help="file for the report, as JSON")
    parser.add_argument("options", nargs="*", help="of `hamburger serve`")
    args = parser.parse_args()
    with (
        tempfile.TemporaryFile("w+") as log,
        serving([*POOL, "--engine-restarts", str(args.kills), *args.options], log) as (server, url),
    ):
        report = asyncio.run(run(args, server, url))
        server.send_signal(signal.SIGTERM)
        try:
            if (code := server.wait(30)) != 0:
                report["faults"].append(f"the server ended with exit code {code}")
        except subprocess.TimeoutExpired:
            report["faults"].append("the server did not end by SIGTERM in 30 s")
        log.seek(0)
        text = log.read()
        if "Traceback (most recent call last)" in text:
            report["faults"].append("a traceback is in the log: " + text.partition("Traceback (most recent")[2][-2000:])
    told = {"date": datetime.now(UTC).date().isoformat(), "processor": processor(), "seed": args.seed}
    shown = json.dumps({**told, **report}, indent=1)
    print(shown)
    if args.out:
        args.out.write_text(shown + "\n")
    return 1 if report["faults"] else 0


@contextlib.contextmanager
def serving(options: list[str], log: IO[str]) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    port = free_port()
    command = [str(Path(sys.executable).parent / "hamburger"), "serve", "--port", str(port), "--access-log", "false"]
    server = subprocess.Popen([*command, *options], stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the server did not start")
            time.sleep(0.1)
        yield server, url
    finally:
        server.kill()
        server.wait()


async def run(args: argparse.Namespace, server: subprocess.Popen[bytes], url: str) -> dict[str, Any]:
    # Without a bound: a client that leaves may take its place in the pool along.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=args.clients + 4)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as http:
        bodies = Bodies((await http.get("/openapi.json")).json(), args.seed)
        findings = Findings()
        if args.only is not None:
            attack = bodies.draw(args.only)
            print(attack.path, attack.headers, attack.data[:2000])
            answer = await http.post(attack.path, content=attack.data, headers=attack.headers)
            print(answer.status_code, answer.text[:2000])
        else:
            await fill_pool(http)
            await attack_all(http, url, bodies, range(-WARM_UP, 0), args.clients, Findings())
            before = resident(server.pid)
            if args.kills:
                findings.allowed |= OF_KILLS
            kills = {number * args.bodies // (args.kills + 1) for number in range(1, args.kills + 1)}
            beside = [asyncio.create_task(work(http, findings)) for work in (watch_stream, poll_health)]
            await attack_all(http, url, bodies, range(args.bodies), args.clients, findings, kills, server)
            for task in beside:
                task.cancel()
            for found in await asyncio.gather(*beside, return_exceptions=True):
                if isinstance(found, Exception):
                    findings.fault(None, f"what went on beside them ended: {found!r}")
            await asyncio.sleep(args.settle_seconds)
            after = resident(server.pid)
            for name, value in after.items():
                if value > args.growth * before.get(name, value):
                    findings.fault(None, f"resident memory of {name}: {before[name]:.0f} to {value:.0f} MiB")
            for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
                if value := metric((await http.get("/metrics")).text, gauge):
                    findings.fault(None, f"{gauge} is {value} at the end")
            findings.counts["bodies"] = args.bodies
            return told(findings) | {"resident_mib": {"before": before, "after": after}}
    return told(findings)


async def attack_all(
    http: httpx.AsyncClient,
    url: str,
    bodies: Bodies,
    numbers: range,
    clients: int,
    findings: Findings,
    kills: Set[int] = frozenset(),
    server: subprocess.Popen[bytes] | None = None,
) -> None:
    """So many clients, each with the next number. kills: before these the server's engine is killed, and all wait until
    there is another."""
    waiting = iter(numbers)
    host, _, port = url.removeprefix("http://").partition(":")
    is_ready = asyncio.Event()
    is_ready.set()

    async def client() -> None:
        for number in waiting:
            await is_ready.wait()
            if server is not None and number in kills:
                is_ready.clear()
                await kill_engine(http, server.pid)
                findings.counts["kills"] += 1
                is_ready.set()
            await send(http, bodies.draw(number), findings)
            if number % RAW_EVERY == 0:
                await send_raw(host, int(port), random.Random(number), findings)

    await asyncio.gather(*(client() for _ in range(clients)))


async def fill_pool(http: httpx.AsyncClient) -> None:
    """Write every block of it once: two prompts as long as the context, which share nothing."""
    most = (await http.get("/v1/models")).json()["data"][0]["max_model_len"] - 8
    for token_id in (100, 101):
        await http.post("/v1/completions", json={"prompt": [token_id] * most, "max_tokens": 1})


def told(findings: Findings) -> dict[str, Any]:
    return {
        "faults": findings.faults[:50],
        "num_faults": len(findings.faults),
        "counts": dict(sorted(findings.counts.items())),
        "slowest": findings.slowest,
        "stream_gap_seconds": dict(shares(findings.gaps)),
        "health_seconds": dict(shares(findings.polls)),
    }


def resident(server: int) -> dict[str, float]:
    """MiB of the server's process, and of its engine's."""
    return {name: round(resident_mib(pid), 1) for name, pid in (("server", server), ("engine", engine_pid(server)))}


if __name__ == "__main__":
    sys.exit(main())
