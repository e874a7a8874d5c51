"""How long a running answer waits for its next group while LoRA adapters are loaded beside it.

    python benchmarks/lora_loads.py --ranks 16,64

The engine is in a process of its own, as under `hamburger serve`; one greedy answer without drafts runs, and every half
second an adapter with random weights on all linears is loaded and unloaded. Told are the median step, and of the
longest gaps between two groups median and maximum: of those in which a load began, ran or ended, and of as many
stretches of the same length in between, in which none did.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from hamburger.clients.arguments import count
from loras import write_adapter

if TYPE_CHECKING:
    from hamburger.engine.async_engine import AsyncEngine
    from hamburger.engine.request_stream import RequestStream

_PAUSE_SECONDS = 0.5


def longest_gap(times: list[float], start: float, end: float) -> float:
    """Milliseconds between two successive times, of which one at least is in [start, end], or that span it."""
    gaps = [after - before for before, after in pairwise(times) if before < end and after > start]
    return 1000 * max(gaps)


async def measure(engine: AsyncEngine, folder: Path, rounds: int) -> None:
    """Loads of one adapter while an answer runs; prints a row."""
    from hamburger.engine.request import GenerationRequest
    from hamburger.engine.types.sampling_params import SamplingParams

    times: list[float] = []
    first_groups = asyncio.Event()

    async def listen(stream: RequestStream) -> None:
        async for _ in stream:
            times.append(time.monotonic())
            if len(times) > 50:
                first_groups.set()

    params = SamplingParams(temperature=0, max_tokens=engine.info.max_model_len - 64, ignore_eos=True, confidence=1.0)
    [stream] = engine.submit([GenerationRequest(folder.name, [97 * i % 20_000 + 100 for i in range(64)], params)])
    listening = asyncio.create_task(listen(stream))
    await first_groups.wait()
    loads, pauses = list[tuple[float, float]](), list[tuple[float, float]]()
    for _ in range(rounds):
        start = time.monotonic()
        await engine.load_lora("x", str(folder))
        end = time.monotonic()
        loads.append((start, end))
        engine.unload_lora("x")
        await asyncio.sleep(_PAUSE_SECONDS)
        pauses.append((end + _PAUSE_SECONDS / 2, end + _PAUSE_SECONDS / 2 + end - start))
    if listening.done():
        raise SystemExit("The answer ended before all loads: fewer --rounds.")
    stream.abort()
    await listening
    times.append(time.monotonic())
    step = 1000 * statistics.median(after - before for before, after in pairwise(times))
    loading, without = ([longest_gap(times, *span) for span in spans] for spans in (loads, pauses))
    seconds = 1000 * statistics.median(end - start for start, end in loads)
    figures = [seconds, step, *(of(gaps) for gaps in (without, loading) for of in (statistics.median, max))]
    print(f"| {folder.name} | {' | '.join(f'{figure:.1f}' for figure in figures)} |")


async def run(model: str | None, ranks: list[int], rounds: int) -> None:
    from hamburger.engine.async_engine import AsyncEngine
    from hamburger.engine.hosts.process_host import ProcessHost
    from hamburger.engine.text.tokenizer import Tokenizer
    from hamburger.engine.types.config import EngineArgs
    from hamburger.model.checkpoints.config.folder import read_model_config
    from hamburger.model.checkpoints.sources import resolve_source

    args = EngineArgs(
        model=model, max_model_len=8192, kv_cache_memory=1 << 30, max_num_seqs=1, max_loras=1,
        max_lora_rank=max(ranks), groups="verified", prefix_cache=False,
    )  # fmt: skip
    source = resolve_source(model)
    trunk = read_model_config(source).trunk
    engine = await AsyncEngine.launch(ProcessHost(args), Tokenizer.load(source.tokenizer_path))
    try:
        print(f"{engine.info.model}, {engine.info.quantization}, {rounds} loads a row, all in ms")
        print("| rank | load | step | longest gap without, median | max | with a load, median | max |")
        print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
        with tempfile.TemporaryDirectory() as folder:
            for rank in ranks:
                await measure(engine, write_adapter(Path(folder) / str(rank), trunk, rank, rank), rounds)
    finally:
        await engine.shutdown(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="as after `hamburger serve`; left out, the embedded default")
    parser.add_argument("--ranks", default="16,64")
    parser.add_argument("--rounds", type=count, default=12)
    args = parser.parse_args()
    asyncio.run(run(args.model, [count(part) for part in args.ranks.split(",")], args.rounds))


if __name__ == "__main__":
    main()
