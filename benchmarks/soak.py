"""Soak: a real server at twice its capacity for an hour, with clients that leave, abuse and dying engines.

    python benchmarks/soak.py --minutes 60 --abuse 2 --kills 3 --out docs/results/soak

Starts `hamburger serve` with a KV pool that is short of what its seats could use (so sequences are preempted), asks
each of some hundred requests alone, and then keeps twice as many of them open as it has seats, streamed and whole, at
all confidences and priorities. Some of the clients disconnect at a random time, --abuse others send what abuse.py
sends, and the engine is killed --kills times, all in the first two fifths. Every five seconds it notes the resident
memory of both processes. Writes OUT.json and OUT.png (matplotlib, of the train extra); exits 1 unless
- each answer that ended is, to the letter, the one that the same request got alone; else its client had left, or the
  engine had just been killed;
- abuse.py would find nothing;
- resident memory grew by less than 2 %, with --abuse 10 %, from the third fifth of the run to the last (the first two
  are for warming up: kernels for each number of rows, pages of the pool that are touched for the first time; the
  grammars of the abuse come and go, up to 64 MiB of them);
- at the end nothing runs, waits or holds a slot, and the server exits 0 on SIGTERM without leaving a process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from abusing.attack import OF_KILLS, Findings, send
from abusing.bodies import Bodies
from host.machine import free_port, processor
from host.served import engine_pid, kill_engine, metric, resident_mib

WORDS = ["the", "a", "of", "river", "stone", "light", "under", "seven", "nine", "carries", "question", "city", "green"]
SAMPLE_SECONDS = 5.0
MAX_GROWTH, MAX_GROWTH_OF_ABUSE = 1.02, 1.1


Answer = dict[int, tuple[str, str]]  # of each choice its text and why it ended


class Died(Exception):
    """The engine was killed."""


@dataclass
class Soak:
    model: str
    draw: random.Random
    requests: list[dict[str, Any]] = field(default_factory=list)
    alone: list[Answer] = field(default_factory=list)  # to each of the requests
    may_die: bool = False
    samples: list[dict[str, float]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    async def client(self, http: httpx.AsyncClient, deadline: float) -> None:
        """One request after the other, until the time is over."""
        while time.monotonic() < deadline:
            number = self.draw.randrange(len(self.requests))
            leaves_after = self.draw.expovariate(0.3) if self.draw.random() < 0.3 else None
            try:
                async with asyncio.timeout(leaves_after):
                    answer = await self.ask(http, self.requests[number])
            except TimeoutError:
                self.counts["left"] += 1
                continue
            except Died:
                self.counts["died"] += 1
                await asyncio.sleep(0.5)
                continue
            except Exception as error:
                self.problems.append(f"{type(error).__name__}: {error}")
                continue
            self.counts["answers"] += 1
            if answer != self.alone[number]:
                self.problems.append(f"{self.requests[number]} got {answer}, alone {self.alone[number]}")

    async def abuse(self, http: httpx.AsyncClient, bodies: Bodies, findings: Findings, deadline: float) -> None:
        while time.monotonic() < deadline:
            self.counts["abuses"] += 1
            await send(http, bodies.draw(self.counts["abuses"]), findings)

    def body(self) -> dict[str, Any]:
        draw = self.draw
        # Half of the prompts begin alike, for the prefix cache.
        beginning = ["You are a careful assistant.", ""][draw.randrange(2)] * draw.choice([1, 8])
        text = beginning + " ".join(draw.choices(WORDS, k=draw.choice([3, 20, 150])))
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": draw.choice([1, 16, 64, 200]),
            "temperature": draw.choice([0, 0.8]),
            "seed": draw.randrange(2**31),
            "confidence": draw.choice([0.3, 0.6, 0.8, 1.0]),
            "priority": draw.choice([0, 0, 0, 1]),
            "n": draw.choice([1, 1, 1, 2]),
            "logprobs": draw.random() < 0.2,
            "stream": draw.random() < 0.7,
        }

    async def ask(self, http: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
        """Raises Died where the engine was killed."""
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code == 503 and self.may_die:
                raise Died
            response.raise_for_status()
            lines = [line async for line in response.aiter_lines() if line and not line.startswith(":")]  # comments
        if not body["stream"]:
            choices = json.loads("".join(lines))["choices"]
            return {choice["index"]: (choice["message"]["content"], choice["finish_reason"]) for choice in choices}
        if lines.pop() != "data: [DONE]":
            raise ValueError("a stream without an end")
        reasons: dict[int, str] = {}
        written: dict[int, list[str]] = {}
        for line in lines:
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                if self.may_die and event["error"]["code"] in OF_KILLS:
                    raise Died
                raise ValueError(f"a stream ended with {event}")
            for choice in event["choices"]:
                written.setdefault(choice["index"], []).append(choice["delta"].get("content") or "")
                if choice["finish_reason"] is not None:
                    reasons[choice["index"]] = choice["finish_reason"]
        return {index: ("".join(texts), reasons[index]) for index, texts in written.items()}

    async def watch(self, http: httpx.AsyncClient, server: int, kills: int, deadline: float) -> None:
        start = time.monotonic()
        left = [start + (deadline - start) * 2 / 5 * (i + 1) / (kills + 1) for i in range(kills)]
        while time.monotonic() < deadline:
            await asyncio.sleep(SAMPLE_SECONDS)
            if left and time.monotonic() > left[0]:
                left.pop(0)
                self.counts["kills"] += 1
                await kill_engine(http, server)
            sample = {"seconds": time.monotonic() - start}
            pids = {"server": server, "engine": engine_pid(server)}
            sample |= {f"{name}_mib": resident_mib(pid) for name, pid in pids.items()}
            text = (await http.get("/metrics")).text
            for name in (
                "num_requests_running",
                "num_requests_waiting",
                "kv_cache_usage_perc",
                "num_preemptions_total",
            ):
                sample[name] = metric(text, name)
            self.samples.append(sample)


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def growth(samples: list[dict[str, float]], name: str) -> float:
    """Median resident memory of the last fifth over that of the third."""
    fifth = len(samples) // 5
    parts = (samples[2 * fifth : 3 * fifth], samples[-fifth:])
    early, late = (statistics.median(sample[f"{name}_mib"] for sample in part) for part in parts)
    return late / early


async def healthy(http: httpx.AsyncClient, server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        try:
            if (await http.get("/health")).status_code == 200:
                return
        except httpx.TransportError:
            await asyncio.sleep(0.2)
    sys.exit("The server did not start.")


async def run(args: argparse.Namespace, server: subprocess.Popen[bytes], url: str) -> Soak:
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as http:
        await healthy(http, server)
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        soak = Soak(model, random.Random(args.seed))
        soak.requests = [soak.body() for _ in range(args.requests)]
        soak.alone = [await soak.ask(http, body) for body in soak.requests]
        soak.may_die = args.kills > 0
        # Who gives way to all may wait longer here than abuse.py allows.
        bodies = Bodies((await http.get("/openapi.json")).json(), args.seed, without={"priority"})
        findings = Findings()
        findings.allowed |= OF_KILLS if args.kills else set()
        deadline = time.monotonic() + 60 * args.minutes
        clients = [soak.client(http, deadline) for _ in range(2 * args.seats)]
        clients += [soak.abuse(http, bodies, findings, deadline) for _ in range(args.abuse)]
        await asyncio.gather(soak.watch(http, server.pid, args.kills, deadline), *clients)
        soak.problems += findings.faults
        engine = engine_pid(server.pid)
        for _ in range(100):  # what was left behind is given up within a step
            text = (await http.get("/metrics")).text
            if not metric(text, "num_requests_running") + metric(text, "num_requests_waiting"):
                break
            await asyncio.sleep(0.1)
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            if metric(text, name):
                soak.problems.append(f"{name} is {metric(text, name)} at the end")
        soak.counts["preemptions"] = int(metric(text, "num_preemptions_total"))
        soak.counts["prefix cache hits"] = int(metric(text, "prefix_cache_hits_total"))
        server.send_signal(signal.SIGTERM)
        if (code := await asyncio.to_thread(server.wait, 60)) != 0:
            soak.problems.append(f"the server's exit code is {code}")
        soak.problems += ["the engine's process is left"] * is_alive(engine)
    return soak


def plot(soak: Soak, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    minutes = [sample["seconds"] / 60 for sample in soak.samples]
    figure, axes = pyplot.subplots(2, 1, figsize=(8, 5), sharex=True, layout="constrained")
    for name in ("engine", "server"):
        axes[0].plot(minutes, [sample[f"{name}_mib"] for sample in soak.samples], label=f"{name} process")
    axes[0].set(ylabel="resident memory, MiB", ylim=(0, None))
    axes[0].legend()
    axes[1].plot(minutes, [sample["num_requests_running"] for sample in soak.samples], label="running")
    axes[1].plot(minutes, [sample["num_requests_waiting"] for sample in soak.samples], label="waiting")
    axes[1].set(xlabel="minutes", ylabel="requests", ylim=(0, None))
    axes[1].legend()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--requests", type=int, default=300, help="that are asked alone first")
    parser.add_argument("--abuse", type=int, default=0, help="clients that send what abuse.py sends")
    parser.add_argument("--kills", type=int, default=0, help="of the engine, which --engine-restarts start again")
    parser.add_argument("--seats", type=int, default=16, help="max_num_seqs; twice as many requests are open")
    parser.add_argument("--max-model-len", default="1024")
    parser.add_argument("--kv-cache-memory", default="48MiB")
    parser.add_argument("--model", default=None, help="what `hamburger serve` takes (default: the embedded model)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="writes OUT.json and OUT.png")
    args = parser.parse_args()
    port = str(free_port())
    command = [str(Path(sys.executable).parent / "hamburger"), "serve", *([args.model] if args.model else [])]
    options = ["--port", port, "--max-num-seqs", str(args.seats), "--max-model-len", args.max_model_len]
    options += ["--kv-cache-memory", args.kv_cache_memory, "--engine-restarts", str(args.kills)]
    options += ["--access-log", "false"]
    with subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, env=os.environ) as server:
        try:
            soak = asyncio.run(run(args, server, f"http://127.0.0.1:{port}"))
        finally:
            server.kill()
    grown = {name: growth(soak.samples, name) for name in ("server", "engine")}
    most = MAX_GROWTH_OF_ABUSE if args.abuse else MAX_GROWTH
    soak.problems += [f"the {name}'s memory grew by {g - 1:.1%}" for name, g in grown.items() if g > most]
    result = {"processor": processor(), "minutes": args.minutes, "seats": args.seats}
    result |= {"counts": soak.counts, "growth": grown}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(
        json.dumps({**result, "problems": soak.problems, "samples": soak.samples}, indent=1)
    )
    plot(soak, args.out.with_suffix(".png"))
    print(json.dumps({**result, "problems": soak.problems[:20]}, indent=1))
    return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main())
