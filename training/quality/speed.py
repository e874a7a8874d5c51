"""How fast groups are decoded: one answer at a time, model and base in turns, so that both see the same machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress

from hamburger.engine.request import GenerationRequest, resolve_request
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.training.corpus.jsonl import GrowingFile, read_rows
from hamburger.training.quality.answers import Engine
from hamburger.training.quality.prompts import Prompt
from hamburger.training.quality.scores import kept_tokens

_DIGITS = 7


@dataclass(frozen=True, slots=True)
class Setting:
    """What is timed. model: a fingerprint."""

    model: str
    confidence: float


@dataclass(frozen=True, slots=True)
class Timed:
    """The decode steps of one answer until it first repeats itself: tokens of each group, and seconds of each step.

    The first group is left out: its step also computes the prompt.
    """

    sizes: list[int]
    seconds: list[float]


def time_decoding(engine: Engine, prompt_ids: list[int], confidence: float, max_tokens: int) -> Timed:
    """Decode one greedy answer alone."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, confidence=confidence)
    request = GenerationRequest("timed", prompt_ids, params)
    engine.core.add(resolve_request(request, engine.llm.info, time.monotonic()))
    groups: list[list[int]] = []
    seconds: list[float] = []
    while engine.core.has_work:
        step = engine.core.step()
        if step.outputs and step.stats is not None:
            groups += [output.token_ids for output in step.outputs]
            seconds.append(round(step.stats.seconds, _DIGITS))
    kept = kept_tokens([token_id for group in groups for token_id in group])
    begins = accumulate(map(len, groups), initial=0)
    last = sum(begin < kept for begin in begins)
    return Timed([len(group) for group in groups[1:last]], seconds[1:last])


def time_all(
    engines: Callable[[], dict[str, Engine]],
    cache: GrowingFile,
    prompts: Sequence[Prompt],
    settings: Sequence[Setting],
    max_tokens: int,
) -> dict[Setting, list[Timed]]:
    """The timing of every prompt under every setting, prompt by prompt; from the cache where it is there.

    engines: loads the models (fingerprint -> engine), and is only called when something is missing.
    """
    rows = [row.values for row in read_rows(cache.path)]
    known = {_key(row): Timed(row["sizes"], row["seconds"]) for row in rows}
    wanted = [(prompt, setting) for prompt in prompts for setting in settings]
    keys = {(p.id, s): _key(_row(p, s, max_tokens)) for p, s in wanted}
    missing = [(p, s) for p, s in wanted if keys[p.id, s] not in known]
    if missing:
        loaded = engines()
        with Progress(console=Console(stderr=True), refresh_per_second=2) as bar:
            for prompt, setting in bar.track(missing, description="Timing"):
                timed = time_decoding(loaded[setting.model], prompt.prompt_ids, setting.confidence, max_tokens)
                known[keys[prompt.id, setting]] = timed
                figures = {"sizes": timed.sizes, "seconds": timed.seconds}
                cache.append(_row(prompt, setting, max_tokens) | figures)
    return {setting: [known[keys[prompt.id, setting]] for prompt in prompts] for setting in settings}


def micro_step_cost(base: Sequence[Timed], model: Sequence[Timed]) -> float | None:
    """Seconds of one micro-step / seconds of one step of the base, by medians; None where no group had two tokens."""
    base_steps = [s for timed in base for s in timed.seconds]
    steps = [pair for timed in model for pair in zip(timed.sizes, timed.seconds, strict=True)]
    single = [seconds for size, seconds in steps if size == 1]
    several = [(size, seconds) for size, seconds in steps if size > 1]
    if not base_steps or not single or not several:
        return None
    alone = median(single)
    extra = median((seconds - alone) / (size - 1) for size, seconds in several)
    return extra / median(base_steps)


def _row(prompt: Prompt, setting: Setting, max_tokens: int) -> dict[str, Any]:
    return {
        "model": setting.model,
        "confidence": setting.confidence,
        "id": prompt.id,
        "prompt_ids": prompt.prompt_ids,
        "max_tokens": max_tokens,
    }


def _key(row: dict[str, Any]) -> tuple[object, ...]:
    return row["model"], row["confidence"], row["id"], tuple(row["prompt_ids"]), row["max_tokens"]
