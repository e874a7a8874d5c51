"""10,000 random lives of an engine: arrivals, priorities, aborts, preemptions, cache hits, expiry, drains.

Everything is checked after every step, and every answer is the one that the script says, whatever happened meanwhile.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from fake_engines import fake_config, fake_core
from fakes import EOS, ScriptedRunner
from hamburger.engine.core.core import EngineCore
from hamburger.engine.types.config import EngineConfig
from hamburger.engine.types.messages import AbortRequest, StepOutputs, SubmitRequest
from hamburger.engine.types.sampling_params import SamplingParams
from slow_cases import slow_but
from verified import ScriptedTrunk, VerifyingRunner, drafts_of, policy_of, verified_core

CONTEXT = 48
QUEUE_SECONDS = 15.0  # a step takes one second


@dataclass
class Life:
    """One engine and the requests that it was given."""

    core: EngineCore
    answer: Callable[[SubmitRequest], list[int]]
    draw: random.Random
    now: list[float]
    beginnings: list[list[int]]
    is_verified: bool = False
    requests: dict[str, SubmitRequest] = field(default_factory=dict)
    unfinished: set[str] = field(default_factory=set)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)

    def play(self) -> None:
        num_requests = self.draw.randint(1, 8)
        arrivals = sorted(self.draw.randint(0, 12) for _ in range(num_requests))
        drains_at = self.draw.randint(1, 40) if self.draw.random() < 0.1 else None
        while arrivals or self.core.has_work:
            while arrivals and arrivals[0] <= self.now[0]:
                arrivals.pop(0)
                self.arrive()
            if self.unfinished and self.draw.random() < 0.08:
                self.abort(self.draw.choice(sorted(self.unfinished)))
            self.check(self.core.step())
            self.now[0] += 1
            if self.now[0] == drains_at:
                self.check(self.core.fail_all("draining", "closing"))
                self.seen["drains"] += 1
                assert not self.core.has_work
                break
            assert self.now[0] < 2000, "livelock"
        assert not self.unfinished
        stats = self.core.step().stats
        assert stats is not None
        assert (stats.used_slots, stats.num_running, stats.num_waiting) == (0, 0, 0)

    def arrive(self) -> None:
        name, draw = f"r{len(self.requests)}", self.draw
        prompt = draw.choice(self.beginnings) + [draw.randrange(4) for _ in range(draw.randint(1, 6))]
        params = SamplingParams(
            max_tokens=draw.randint(1, CONTEXT - len(prompt)),
            seed=draw.randrange(9),
            prompt_logprobs=draw.choice([None, None, None, 1]),
            **self.more_params() if self.is_verified else {},
        )
        request = SubmitRequest(
            name,
            prompt,
            params,
            self.now[0],
            draw.choice([0, 0, 0, -1, 3]),
            draw.choice(["", "", "salt"]),
            client=str(prompt[-1] % 3),
        )
        self.core.add(request)
        self.requests[name] = request
        self.unfinished.add(name)

    def more_params(self) -> dict[str, Any]:
        draw = self.draw
        return {
            "confidence": draw.choice([0.0, 0.0, 0.0, 0.5, 1.0]),
            "stop_token_ids": draw.choice([(), (), (2,)]),
            "min_tokens": draw.choice([0, 0, 1]),
            "ignore_eos": draw.random() < 0.5,
            "logprobs": draw.choice([None, 2]),
            "prediction_ids": tuple(draw.randrange(4) for _ in range(draw.choice([0, 0, 30]))),
        }

    def abort(self, name: str) -> None:
        self.core.abort(AbortRequest(name))
        self.unfinished.remove(name)
        self.seen["aborts"] += 1

    def check(self, step: StepOutputs) -> None:
        self.core.check_integrity()
        for output in step.outputs:
            assert output.request_id in self.unfinished, "a group after the end"
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.unfinished.remove(output.request_id)
                assert self.tokens[output.request_id] == self.answer(self.requests[output.request_id])
                self.seen["answers"] += 1
        for failure in step.failures:
            self.unfinished.remove(failure.request_id)
            self.seen[failure.kind] += 1
        assert step.stats is not None
        assert step.stats.num_running + step.stats.num_waiting == len(self.unfinished)
        self.seen["preemptions"] += step.stats.num_preemptions
        self.seen["cache hits"] += step.stats.cache_hits


def life(scenario: int, *, overlap: bool) -> Life:
    draw = random.Random(scenario)
    config = random_config(draw)
    now = [0.0]
    runner = ScriptedRunner(seed=scenario, eos_chance=0.01)

    def answer(request: SubmitRequest) -> list[int]:
        """What the script says, cut at the end token or at max_tokens."""
        flat = [token for group in runner.emitted[request.request_id] for token in group]
        end = flat.index(EOS) + 1 if EOS in flat else len(flat)
        return flat[: min(end, request.params.max_tokens or CONTEXT)]

    core = fake_core(runner, config, lambda: now[0], overlap)
    return Life(core, answer, draw, now, beginnings(draw))


def random_config(draw: random.Random) -> EngineConfig:
    block_size = draw.choice([1, 2, 4, 8])
    max_num_seqs = draw.randint(1, 6)
    return fake_config(
        max_model_len=CONTEXT,
        block_size=block_size,
        num_blocks=-(-CONTEXT // block_size) + draw.randint(0, 32 // block_size),
        max_num_seqs=max_num_seqs,
        max_num_batched_slots=max_num_seqs + draw.randint(0, 20),
        even_context=8 if max_num_seqs % 2 else None,
        max_queue_seconds=QUEUE_SECONDS,
        prefix_cache=draw.random() < 0.7,
    )


def beginnings(draw: random.Random) -> list[list[int]]:
    return [[draw.randrange(4) for _ in range(draw.randint(0, 14))] for _ in range(3)]


def verified_life(scenario: int) -> tuple[Life, VerifyingRunner]:
    """Drafts of every kind, at any costs; now and then memory does not hold a step."""
    draw = random.Random(scenario)
    config = replace(random_config(draw), groups="verified", max_group=draw.randint(2, 8))
    runs_out = draw.random() < 0.2
    trunk, now = ScriptedTrunk(scenario), [0.0]
    runner = VerifyingRunner(
        trunk, drafts_of(trunk, draw), lambda step, batch: runs_out and batch.num_rows > 1 and draw.random() < 0.05
    )
    steps = sorted(draw.choice([1.0, 1.0, 1.1, 2.0, 9.0]) for _ in range(8))
    core = verified_core(runner, config, policy_of(steps, draw.randint(0, 4)), lambda: now[0])
    life = Life(core, lambda request: trunk.answer(request, config), draw, now, beginnings(draw), is_verified=True)
    return life, runner


@pytest.mark.no_cover  # it would take thrice as long, and other tests run the same lines
@pytest.mark.parametrize("thousand", slow_but([0], range(10)))
def test_nothing_leaks_and_every_answer_is_right(thousand: int) -> None:
    """In every second life steps overlap."""
    seen: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
    for scenario in range(thousand * 1000, thousand * 1000 + 1000):
        overlap = scenario % 2 == 1
        this = life(scenario, overlap=overlap)
        this.play()
        seen[overlap] += this.seen
    # or the scenarios prove nothing about them
    for what in ("answers", "aborts", "preemptions", "cache hits", "queue_timeout", "draining", "drains"):
        assert min(seen[overlap][what] for overlap in seen) > 15, what


@pytest.mark.no_cover
@pytest.mark.parametrize("thousand", slow_but([0], range(10)))
def test_whatever_is_drafted_every_answer_is_the_one_without(thousand: int) -> None:
    seen: Counter[str] = Counter()
    for scenario in range(thousand * 1000, thousand * 1000 + 500):
        this, runner = verified_life(scenario)
        this.play()
        seen += this.seen + runner.seen
    for what in ("answers", "aborts", "preemptions", "cache hits", "queue_timeout", "drains", "accepted"):
        assert seen[what] > 15, what
    assert seen["drafted"] > 1.2 * seen["accepted"]
