"""What `--confidence auto` buys and costs: one bursty trace, replayed against a real server in three ways by turns.

    python benchmarks/adaptive.py --out docs/results/adaptive

The ways differ by one field of the request, in one server: `default` names the upper bound, `floor` the lower one, and
`auto` names none, so that the dial chooses. Quiet stretches of single requests stand between bursts. Reported for each:
time per output token and time to first token (p50, p99), tokens per KV, the confidence that answers ran with (their
usage says it), and what the text costs: its mean negative log-likelihood under the base model, in nats a token, each
answer cut at its first repeated 8-gram. Without --target-tpot-ms the target is the median of one replay at the default,
which half of the answers miss. Writes OUT.json; needs the embedded model, or --model and --base-model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from hamburger.clients.figures import percentile
from hamburger.clients.prompts import built_in_prompts
from host.machine import free_port

WAYS = ("default", "auto", "floor")
SETTLE_SECONDS = 120.0  # at most, for a dial that rests to be back at its default


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer; times in seconds. arrivals: when each group came."""

    prompt_ids: list[int]
    groups: list[list[int]]
    confidence: float
    started: float
    arrivals: list[float]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.groups))

    @property
    def tpot(self) -> float | None:
        if self.num_tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.num_tokens - 1)


def bursty_offsets(args: argparse.Namespace) -> list[float]:
    """Seconds from the start to each request: `bursts` times a quiet stretch and a crowded one, both Poisson."""
    draw, now, offsets = random.Random(args.seed), 0.0, list[float]()
    for _ in range(args.bursts):
        for rate, seconds in ((args.quiet_rate, args.quiet_seconds), (args.burst_rate, args.burst_seconds)):
            end = now + seconds
            while (now := now + draw.expovariate(rate)) < end:
                offsets.append(now)
            now = end
    return offsets


async def ask(http: httpx.AsyncClient, prompt: str, fields: dict[str, Any]) -> Answer:
    body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "stream": True, "return_groups": True}
    told = await http.post("/tokenize", json={"messages": body["messages"]})
    groups: list[list[int]] = []
    arrivals: list[float] = []
    usage: dict[str, Any] = {}
    started = time.perf_counter()
    request = body | {"stream_options": {"include_usage": True}} | fields
    async with http.stream("POST", "/v1/chat/completions", json=request) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if "group" in choice:
                    arrivals.append(time.perf_counter())
                    groups.append(choice["group"]["token_ids"])
    return Answer(told.json()["tokens"], groups, usage.get("confidence", float("nan")), started, arrivals)


async def replay(
    url: str, prompts: Sequence[str], offsets: Sequence[float], fields: dict[str, Any], settled: float | None
) -> list[Answer]:
    """Send prompt i at its offset, and read all answers. settled: where the dial rests, which is waited for; None where
    there is none."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits, trust_env=False) as http:
        if settled is not None:
            await settle(http, settled)
        start = time.perf_counter()

        async def send(prompt: str, offset: float) -> Answer:
            await asyncio.sleep(max(0.0, start + offset - time.perf_counter()))
            return await ask(http, prompt, fields)

        return list(await asyncio.gather(*(send(p, o) for p, o in zip(prompts, offsets, strict=True))))


async def settle(http: httpx.AsyncClient, confidence: float) -> None:
    """Wait until the dial is back there. Raises TimeoutError."""
    async with asyncio.timeout(SETTLE_SECONDS):
        while True:
            metrics = (await http.get("/metrics")).text
            (found,) = re.findall(r"^hamburger_confidence_in_force(?:\{.*\})? (\S+)$", metrics, re.MULTILINE)
            if float(found) == confidence:
                return
            await asyncio.sleep(1)


@contextmanager
def server(args: argparse.Namespace, *options: str) -> Iterator[str]:
    """A real server; its address. No prefix cache: each way replays the same prompts."""
    port = str(free_port())
    command = [str(Path(sys.executable).parent / "hamburger"), "serve", *([args.model] if args.model else [])]
    common = ["--port", port, "--prefix-cache", "false", "--max-num-seqs", str(args.seats), "--max-model-len", "2048"]
    common += ["--groups", "composed"]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen([*command, *common, *options], stdout=subprocess.DEVNULL, env=os.environ) as process:
        try:
            while True:
                if process.poll() is not None:
                    sys.exit("The server did not start.")
                try:
                    if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.2)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def figures(answers: Sequence[Answer], nats: Sequence[tuple[float, int]]) -> dict[str, Any]:
    """nats: negative log-likelihood and number of the tokens that were scored, of each answer."""
    tpot = sorted(1000 * t for a in answers if (t := a.tpot) is not None)
    ttft = sorted(1000 * (a.arrivals[0] - a.started) for a in answers)
    tokens, groups = sum(a.num_tokens for a in answers), sum(len(a.groups) for a in answers)
    return {
        "answers": len(answers),
        "tpot_ms": {"mean": sum(tpot) / len(tpot), "p50": percentile(tpot, 50), "p99": percentile(tpot, 99)},
        "ttft_ms": {"p50": percentile(ttft, 50), "p99": percentile(ttft, 99)},
        "tokens": tokens,
        "tokens_per_kv": tokens / groups,
        "mean_confidence": sum(a.confidence for a in answers) / len(answers),
        "lowest_confidence": min(a.confidence for a in answers),
        "nats_a_token": sum(n for n, _ in nats) / max(1, sum(k for _, k in nats)),
    }


def score(answers: Sequence[Answer], base_model: str) -> list[tuple[float, int]]:
    """Imported here: the scorer loads torch, which would take the server's cores while it is measured."""
    from hamburger.training.forward.scoring import Scorer
    from hamburger.training.quality.scores import kept_tokens

    texts = [[t for group in answer.groups for t in group] for answer in answers]
    kept = [text[: kept_tokens(text)] for text in texts]
    prompts = [answer.prompt_ids for answer in answers]
    sequences = [[*prompt, *text] for prompt, text in zip(prompts, kept, strict=True)]
    scores = Scorer.load(base_model).score(sequences, [len(prompt) for prompt in prompts])
    return [(-float(s.logprobs.sum()), len(text)) for s, text in zip(scores, kept, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="replays of each way, by turns")
    parser.add_argument("--bursts", type=int, default=2)
    parser.add_argument("--quiet-seconds", type=float, default=10)
    parser.add_argument("--quiet-rate", type=float, default=0.3, help="requests a second")
    parser.add_argument("--burst-seconds", type=float, default=25)
    parser.add_argument("--burst-rate", type=float, default=3)
    parser.add_argument("--prompt-words", type=int, default=40)
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--seats", type=int, default=32)
    parser.add_argument("--target-tpot-ms", type=float, default=None)
    parser.add_argument("--min-confidence", type=float, default=0.6)
    parser.add_argument("--max-confidence", type=float, default=0.8)
    parser.add_argument("--model", default=None, help="what `hamburger serve` takes (default: the embedded model)")
    parser.add_argument("--base-model", default="builtin", help="what scores the answers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="writes OUT.json")
    args = parser.parse_args()
    offsets = bursty_offsets(args)
    prompts = built_in_prompts(len(offsets), args.prompt_words, args.seed)
    common = {"max_tokens": args.output_tokens}
    fields: dict[str, dict[str, Any]] = {
        "default": common | {"confidence": args.max_confidence},
        "auto": common,
        "floor": common | {"confidence": args.min_confidence},
    }
    target = args.target_tpot_ms
    if target is None:
        with server(args, "--confidence", str(args.max_confidence)) as url:
            calibrated = asyncio.run(replay(url, prompts, offsets, fields["default"], None))
        target = round(1000 * percentile(sorted(t for a in calibrated if (t := a.tpot) is not None), 50), 1)
        print(f"target: {target} ms a token, the median at the default", flush=True)
    bounds = ["--min-confidence", str(args.min_confidence), "--max-confidence", str(args.max_confidence)]
    found: dict[str, list[list[Answer]]] = {way: [] for way in WAYS}
    with server(args, "--confidence", "auto", "--target-tpot-ms", str(target), *bounds) as url:
        for i in range(args.rounds):
            for way in WAYS if i % 2 == 0 else reversed(WAYS):
                found[way].append(asyncio.run(replay(url, prompts, offsets, fields[way], args.max_confidence)))
                print(f"round {i + 1}, {way}: {figures(found[way][-1], [])['tpot_ms']}", flush=True)
    result: dict[str, Any] = {
        "target_tpot_ms": target,
        # Of each round: when an answer was asked for, in seconds, and what the dial gave it.
        "dialled": [[(round(a.started - run[0].started, 2), a.confidence) for a in run] for run in found["auto"]],
        "requests_a_replay": len(offsets),
        "settings": {k: v for k, v in vars(args).items() if k != "out"},
    }
    for way in WAYS:
        answers = [answer for run in found[way] for answer in run]
        tpots = [figures(run, [])["tpot_ms"] for run in found[way]]
        held = [t for a in answers if (t := a.tpot) is not None]
        result[way] = figures(answers, score(answers, args.base_model)) | {
            "tpot_ms_of_rounds": tpots,
            "within_target": sum(1000 * t <= target for t in held) / len(held),
        }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
