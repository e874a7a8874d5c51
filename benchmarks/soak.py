"""Soak: a real server at twice its capacity for half an hour, with clients that leave; its memory must stay flat.

    python benchmarks/soak.py --minutes 30 --out docs/results/soak

Starts `hamburger serve` with a KV pool that is short of what its seats could use (so sequences are preempted), keeps
twice as many requests open as it has seats, streamed and whole, at all confidences and priorities, and has some of the
clients disconnect at a random time. Every five seconds it notes the resident memory of both processes. Writes OUT.json
and OUT.png (matplotlib, of the train extra); exits 1 unless
- each answer was whole, or the client itself had left;
- resident memory grew by less than 2 % from the third fifth of the run to the last (the first two are for warming up:
  kernels for each number of rows, pages of the pool that are touched for the first time);
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

from machine import free_port
from served import engine_pid, metric, resident_mib

WORDS = ["the", "a", "of", "river", "stone", "light", "under", "seven", "nine", "carries", "question", "city", "green"]
SAMPLE_SECONDS = 5.0
MAX_GROWTH = 1.02


@dataclass
class Soak:
    url: str
    model: str
    draw: random.Random
    samples: list[dict[str, float]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    async def client(self, http: httpx.AsyncClient, deadline: float) -> None:
        """One request after the other, until the time is over."""
        while time.monotonic() < deadline:
            body, leaves_after = self.body(), self.draw.expovariate(0.3) if self.draw.random() < 0.3 else None
            try:
                async with asyncio.timeout(leaves_after):
                    await self.ask(http, body)
            except TimeoutError:
                self.counts["left"] += 1
            except Exception as error:
                self.problems.append(f"{type(error).__name__}: {error}")

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
            "confidence": draw.choice([0.3, 0.6, 0.8, 1.0]),
            "priority": draw.choice([0, 0, 0, 1]),
            "n": draw.choice([1, 1, 1, 2]),
            "logprobs": draw.random() < 0.2,
            "stream": draw.random() < 0.7,
        }

    async def ask(self, http: httpx.AsyncClient, body: dict[str, Any]) -> None:
        if not body["stream"]:
            response = await http.post("/v1/chat/completions", json=body)
            response.raise_for_status()
            self.counts["tokens"] += response.json()["usage"]["completion_tokens"]
            self.counts["whole answers"] += 1
            return
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            lines = [line async for line in response.aiter_lines() if line]
        if lines[-1] != "data: [DONE]" or any('"error"' in line for line in lines[-2:]):
            self.problems.append(f"a stream ended with {lines[-2:]}")
        self.counts["streams"] += 1
        self.counts["events"] += len(lines)

    async def watch(self, http: httpx.AsyncClient, pids: dict[str, int], deadline: float) -> None:
        start = time.monotonic()
        while time.monotonic() < deadline:
            await asyncio.sleep(SAMPLE_SECONDS)
            sample = {"seconds": time.monotonic() - start}
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
        soak = Soak(url, model, random.Random(args.seed))
        pids = {"server": server.pid, "engine": engine_pid(server.pid)}
        deadline = time.monotonic() + 60 * args.minutes
        clients = [soak.client(http, deadline) for _ in range(2 * args.seats)]
        await asyncio.gather(soak.watch(http, pids, deadline), *clients)
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
        soak.problems += ["the engine's process is left"] * is_alive(pids["engine"])
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
    parser.add_argument("--minutes", type=float, default=30.0)
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
    options += ["--kv-cache-memory", args.kv_cache_memory]
    with subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, env=os.environ) as server:
        try:
            soak = asyncio.run(run(args, server, f"http://127.0.0.1:{port}"))
        finally:
            server.kill()
    grown = {name: growth(soak.samples, name) for name in ("server", "engine")}
    soak.problems += [f"the {name}'s memory grew by {g - 1:.1%}" for name, g in grown.items() if g > MAX_GROWTH]
    result = {"minutes": args.minutes, "seats": args.seats, "counts": soak.counts, "growth": grown}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(
        json.dumps({**result, "problems": soak.problems, "samples": soak.samples}, indent=1)
    )
    plot(soak, args.out.with_suffix(".png"))
    print(json.dumps({**result, "problems": soak.problems[:20]}, indent=1))
    return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main())
