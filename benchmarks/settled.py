"""What a smaller KV brings, by settled slots or in 8 bits: milliseconds a macro-step and slots held as answers grow,
and how many a pool holds.

    python benchmarks/settled.py --streams 1,16 --tokens 4096 --out docs/results/settled.json
    python benchmarks/settled.py --no-settle --kv-cache-dtype int8

Two engines lie in this process, a plain one and one whose KV is small, and take turns, `--chunk` macro-steps each, on
the same prompts; drafts are left out, so that a step is one token of every answer. Reported by answer length: the
median milliseconds of a step (prompt work left out), their ratio within a turn, and the slots of an answer. Capacity:
a pool of `--pool` is filled with answers of `--answer` tokens, all begun at once: the largest number of them that ends
without a preemption.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from hamburger.clients.prompts import built_in_prompts
from hamburger.engine.build import build_core
from hamburger.engine.core.core import EngineCore
from hamburger.engine.text.tokenizer import Tokenizer
from hamburger.engine.types.config import EngineArgs
from hamburger.engine.types.messages import AbortRequest, StepStats, SubmitRequest
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.model.checkpoints.sources import resolve_source
from hamburger.server.setting_values import parse_bytes
from host.machine import processor

WHOLE, SMALL = "whole", "small"
BUCKET = 256  # tokens of an answer
PROMPT_WORDS = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="any (default: the embedded one)")
    parser.add_argument("--base", help="its base, where the checkpoint holds only a part")
    parser.add_argument("--streams", type=lambda text: [int(n) for n in text.split(",")], default=[1, 16])
    parser.add_argument("--tokens", type=int, default=4096, help="of each answer (4096)")
    parser.add_argument("--chunk", type=int, default=64, help="macro-steps of a turn (64)")
    parser.add_argument("--settle", action=argparse.BooleanOptionalAction, default=True, help="of the small engine")
    parser.add_argument("--kv-cache-dtype", default="auto", help="of the small engine (auto)")
    parser.add_argument("--window", type=int, help="settle_window (the model's)")
    parser.add_argument("--growth", type=float, help="settle_growth (the model's)")
    parser.add_argument("--keep", type=float, help="settle_keep (the model's)")
    parser.add_argument("--limit", type=int, help="settle_limit: most slots that an answer holds (none)")
    parser.add_argument("--answer", type=int, default=1024, help="tokens of the answers that fill the pool (1024)")
    parser.add_argument("--pool", default="512MiB", help="size of the pool that is filled; 0: leave this out (512MiB)")
    parser.add_argument("--out", type=Path, help="file for all figures, as JSON")
    args = parser.parse_args()
    tokenizer = Tokenizer.load(resolve_source(args.model, args.base).tokenizer_path)
    cores = {name: core_of(args, name) for name in (WHOLE, SMALL)}
    rows = [
        row for streams in args.streams for row in grow(cores, prompts(tokenizer, streams), args.tokens, args.chunk)
    ]
    print(table(rows), flush=True)
    del cores
    held = {}
    if args.pool != "0":
        for name in (WHOLE, SMALL):
            core = core_of(args, name, args.pool, args.answer + 128)
            held[name] = answers_held(core, prompts(tokenizer, 64), args.answer)
        print(f"answers of {args.answer} tokens at once in {args.pool}: {held}")
    if args.out:
        told = {"date": datetime.now(UTC).date().isoformat(), "processor": processor(), "torch": torch.__version__}
        settings = {
            "threads": torch.get_num_threads(), "settle": args.settle, "window": args.window, "growth": args.growth,
            "keep": args.keep, "limit": args.limit,
            "kv_cache_dtype": args.kv_cache_dtype,
        }  # fmt: skip
        capacity = {"answer": args.answer, "pool": args.pool, "held": held}
        args.out.write_text(json.dumps({**told, **settings, "capacity": capacity, "rows": rows}, indent=1) + "\n")


def core_of(args: argparse.Namespace, name: str, pool: str | None = None, longest: int | None = None) -> EngineCore:
    given: dict[str, Any] = {"kv_cache_memory": parse_bytes(pool)} if pool else {}
    core, _ = build_core(
        EngineArgs(
            model=args.model,
            base=args.base,
            groups="verified",
            prefix_cache=False,
            max_model_len=longest or args.tokens + 128,
            settle=name == SMALL and args.settle,
            kv_cache_dtype=args.kv_cache_dtype if name == SMALL else "auto",
            settle_window=args.window,
            settle_growth=args.growth,
            settle_keep=args.keep,
            settle_limit=args.limit,
            **given,
        )
    )
    return core


def prompts(tokenizer: Tokenizer, number: int) -> list[list[int]]:
    found = built_in_prompts(number, PROMPT_WORDS, seed=0)
    return [tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": text}])) for text in found]


def grow(cores: dict[str, EngineCore], asked: Sequence[list[int]], tokens: int, chunk: int) -> list[dict[str, Any]]:
    """Both engines answer all prompts at once; a row for each bucket of answer tokens."""
    for core in cores.values():
        submit(core, asked, tokens)
        while len(outputs := core.step().outputs) < len(asked):  # until all have their prompt behind them
            del outputs
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    ratios: dict[int, list[float]] = defaultdict(list)
    slots: dict[tuple[str, int], int] = {}
    done = len(asked)  # at most so many tokens are ahead where prompts took several steps
    order = list(cores)
    while done + chunk + len(asked) < tokens:
        took: dict[str, float] = {}
        for name in order:
            times = []
            for _ in range(chunk):
                start = time.perf_counter()
                stats = stats_of(cores[name])
                times.append(time.perf_counter() - start)
            took[name] = sum(times)
            seconds[name, done // BUCKET] += times
            slots[name, done // BUCKET] = stats.used_slots
        ratios[done // BUCKET].append(took[SMALL] / took[WHOLE])
        order.reverse()
        done += chunk
    for core in cores.values():
        for number in range(len(asked)):
            core.abort(AbortRequest(str(number)))
        while core.has_work:
            core.step()
    return [
        {
            "streams": len(asked),
            "answer_tokens": (bucket + 1) * BUCKET,
            "whole_ms": 1000 * statistics.median(seconds[WHOLE, bucket]),
            "small_ms": 1000 * statistics.median(seconds[SMALL, bucket]),
            "ratio": statistics.median(ratios[bucket]),
            "whole_slots": slots[WHOLE, bucket] / len(asked),
            "small_slots": slots[SMALL, bucket] / len(asked),
        }
        for bucket in sorted(ratios)
    ]


def answers_held(core: EngineCore, asked: Sequence[list[int]], tokens: int) -> int:
    """How many answers of so many tokens end, all begun at once, without that any gives its blocks up for another: the
    most of them, found by halving."""
    low, high = 0, len(asked)
    while low < high:
        number = (low + high + 1) // 2
        submit(core, asked[:number], tokens)
        preemptions = 0
        while core.has_work:
            preemptions += stats_of(core).num_preemptions
            if preemptions:
                for index in range(number):
                    core.abort(AbortRequest(str(index)))
        low, high = (low, number - 1) if preemptions else (number, high)
    return low


def stats_of(core: EngineCore) -> StepStats:
    """Of its next step."""
    stats = core.step().stats
    assert stats is not None
    return stats


def submit(core: EngineCore, asked: Sequence[list[int]], tokens: int) -> None:
    for number, prompt_ids in enumerate(asked):
        params = SamplingParams(temperature=0.7, seed=number, max_tokens=tokens, ignore_eos=True, confidence=1.0)
        core.add(SubmitRequest(str(number), prompt_ids, params, time.monotonic()))


def table(rows: Sequence[dict[str, Any]]) -> str:
    heads = "| streams | answer tokens | ms a step, whole | small | ratio | slots an answer, whole | small |"
    lines = [heads, "| ---: " * 7 + "|"]
    for row in rows:
        times = f"{row['whole_ms']:.2f} | {row['small_ms']:.2f} | {row['ratio']:.2f}"
        slots = f"{row['whole_slots']:.0f} | {row['small_slots']:.0f}"
        lines.append(f"| {row['streams']} | {row['answer_tokens']} | {times} | {slots} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
