"""A short replay in real time: the real engine in its own process, requests at their times, as a server sends them.

It says what the simulation is worth: the same requests are simulated with the group sizes that really came.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hamburger.engine.async_engine import AsyncEngine
from hamburger.engine.hosts.process_host import ProcessHost
from hamburger.engine.request import GenerationRequest
from hamburger.engine.text.tokenizer import Tokenizer
from hamburger.engine.types.config import EngineArgs, EngineConfig
from hamburger.engine.types.messages import EngineInfo, StepStats
from hamburger.engine.types.observer import EndReason, RequestTimings
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.model.checkpoints.sources import resolve_source
from simulation.costs import CostModel
from simulation.simulator import Outcome, ScriptedSizes, replay
from simulation.summaries import latencies
from simulation.traces import Trace, TraceRow


@dataclass(slots=True)
class LiveRun:
    """outcomes: as the client saw them. busy_seconds: of all steps that computed something, in engine time."""

    outcomes: list[Outcome] = field(default_factory=list)
    busy_seconds: float = 0.0
    num_steps: int = 0

    def on_step(self, stats: StepStats) -> None:
        if stats.prompt_slots or stats.decoded_sequences:
            self.busy_seconds += stats.seconds
            self.num_steps += 1

    def on_group(self, gap_seconds: float | None, num_tokens: int) -> None:
        """Each request's own stream is timed instead."""

    def on_start(self, prompt_tokens: int, timings: RequestTimings, lora: str | None) -> None:
        """The outcomes say it."""

    def on_finish(
        self,
        reason: EndReason,
        params: SamplingParams,
        prompt_tokens: int,
        completion_tokens: int,
        timings: RequestTimings,
        lora: str | None,
    ) -> None:
        """The outcomes say it."""


def config_of(info: EngineInfo, *, prefix_cache: bool) -> EngineConfig:
    """What the engine that told this runs with; no request waits too long."""
    return EngineConfig(
        max_model_len=info.max_model_len,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_slots=info.max_num_batched_slots,
        block_size=info.block_size,
        num_blocks=info.total_slots // info.block_size,
        eos_token_ids=tuple(info.eos_token_ids),
        max_group=info.max_group,
        max_queue_seconds=float("inf"),
        prefix_cache=prefix_cache,
    )


def run_live(
    args: EngineArgs, trace: Trace, confidence: float | None, say: Callable[[str], None]
) -> tuple[LiveRun, EngineInfo]:
    """Start the engine, send the trace at its own times, greedy, and wait for all answers.

    confidence: None takes the model's own.
    """
    return asyncio.run(_run(args, trace, confidence, say))


async def _run(
    args: EngineArgs, trace: Trace, confidence: float | None, say: Callable[[str], None]
) -> tuple[LiveRun, EngineInfo]:
    run = LiveRun()
    tokenizer = Tokenizer.load(resolve_source(args.model, args.base).tokenizer_path)
    engine = await AsyncEngine.launch(ProcessHost(args, say), tokenizer, run)
    try:
        say(f"{len(trace.rows)} requests in real time, {trace.seconds:.0f} s")
        prompts = {row.request_id: trace.prompt_ids(row) for row in trace.rows}
        start = time.monotonic()
        tasks = [_ask(engine, row, prompts[row.request_id], confidence, start) for row in trace.rows]
        run.outcomes = await asyncio.gather(*tasks)
    finally:
        await engine.shutdown(0.0)
    return run, engine.info


async def _ask(
    engine: AsyncEngine, row: TraceRow, prompt_ids: list[int], confidence: float | None, start: float
) -> Outcome:
    await asyncio.sleep(max(0.0, start + row.arrival - time.monotonic()))
    outcome = Outcome(row, time.monotonic() - start)
    params = SamplingParams(temperature=0, max_tokens=row.output_tokens, ignore_eos=True, confidence=confidence)
    [stream] = engine.submit([GenerationRequest(row.request_id, prompt_ids, params)])
    async for update in stream:
        now = time.monotonic() - start
        if not outcome.tokens:
            outcome.first_token, outcome.cached_slots = now, update.cached_tokens
        else:
            outcome.longest_gap = max(outcome.longest_gap, now - outcome.last_group)
        outcome.tokens += len(update.token_ids)
        outcome.group_sizes.append(len(update.token_ids))
        outcome.last_group = outcome.finished = now
    return outcome


def compare(run: LiveRun, info: EngineInfo, trace: Trace, costs: CostModel) -> dict[str, Any]:
    """What the simulation says about a live run, given the times at which its requests came and the groups they had.

    slowdown: the live steps' time over what the costs say of such steps. The simulation is given twice, as it is and
    with all costs times the slowdown: the rest of the error is the simulation's own, not the machine's.
    """
    came = {outcome.row.request_id: outcome for outcome in run.outcomes}
    sent = replace(trace, rows=[replace(row, arrival=came[row.request_id].arrival) for row in trace.rows])
    sizes = ScriptedSizes({request_id: outcome.group_sizes for request_id, outcome in came.items()})
    config = config_of(info, prefix_cache=True)
    simulated = replay(sent, config, costs, sizes)
    slowdown = run.busy_seconds / simulated.busy_seconds
    for _ in range(3):  # a slower machine makes larger batches, and so other steps
        adjusted = replay(sent, config, costs.times(slowdown), sizes)
        slowdown *= run.busy_seconds / adjusted.busy_seconds
    live = latencies(run.outcomes)
    tokens = sum(outcome.tokens for outcome in run.outcomes)
    found = {"simulated": latencies(simulated.outcomes), "adjusted": latencies(adjusted.outcomes)}
    return {
        "requests": len(run.outcomes),
        "seconds": max(o.finished for o in run.outcomes) - min(o.arrival for o in run.outcomes),
        "tokens_per_kv": tokens / sum(len(outcome.group_sizes) for outcome in run.outcomes),
        "steps": run.num_steps,
        "busy_seconds": run.busy_seconds,
        "slowdown": slowdown,
        "live": live,
        **found,
        "errors": {name: {key: f[key] / live[key] - 1 for key in live if live[key]} for name, f in found.items()},
    }
