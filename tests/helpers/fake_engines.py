"""Engines for tests, without torch, on a scripted runner and a byte tokenizer (fakes.py).

async with fake_engine(ScriptedRunner({"r1": [[104, 105], [257]]})) as engine:
    [stream] = engine.submit([GenerationRequest("r1", [1, 2], SamplingParams())])
    async for update in stream: ...
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fakes import EOS, VOCAB_SIZE, ByteTokenizer, ScriptedRunner
from hamburger.engine.async_engine import AsyncEngine
from hamburger.engine.core.core import EngineCore
from hamburger.engine.core.loras import CoreLoras
from hamburger.engine.core.overlap import OverlappedCore
from hamburger.engine.dial.confidence_dial import AutoConfidence
from hamburger.engine.drafting.costs import MeasuredCosts, StepCosts
from hamburger.engine.drafting.policy import DraftPolicy
from hamburger.engine.grammar.matching import Grammars
from hamburger.engine.hosts.thread_host import ThreadHost
from hamburger.engine.llm import LLM
from hamburger.engine.types.config import EngineConfig
from hamburger.engine.types.messages import EngineInfo
from hamburger.engine.types.observer import EngineObserver
from reference import CONTEXT


def fake_config(**changes: Any) -> EngineConfig:
    """A small engine; `changes` are fields of EngineConfig."""
    fields: dict[str, Any] = {
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_slots": 64,
        "block_size": 4,
        "num_blocks": 256,
        "eos_token_ids": (EOS,),
        "max_group": 4,
        "prefix_cache": False,
    }
    return EngineConfig(**(fields | changes))


def fake_info(config: EngineConfig, **changes: Any) -> EngineInfo:
    """What a HAMburger model on `config` would report; `changes` are fields of EngineInfo."""
    fields: dict[str, Any] = {
        "model": "fake",
        "is_plain_base": config.max_group == 1,
        "max_model_len": config.max_model_len,
        "max_group": config.max_group,
        "default_confidence": 0.8,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": list(config.eos_token_ids),
        "block_size": config.block_size,
        "total_slots": config.total_slots,
        "expected_tokens": config.total_slots * 2,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_slots": config.max_num_batched_slots,
        "device": "cpu",
        "dtype": "float32",
        "groups": config.groups,
    }
    return EngineInfo(**(fields | changes))


def fake_core(
    runner: ScriptedRunner,
    config: EngineConfig | None = None,
    clock: Callable[[], float] = time.monotonic,
    overlap: bool = False,
    loras: CoreLoras | None = None,
) -> EngineCore:
    config = config or fake_config()
    runner.block_size, runner.max_batched_slots = config.block_size, config.max_num_batched_slots
    runner.shares = config.prefix_cache
    core = OverlappedCore if overlap else EngineCore
    grammars = Grammars(ByteTokenizer, VOCAB_SIZE, config.eos_token_ids)
    if config.groups == "composed":
        return core(config, runner, clock, grammars, loras=loras)
    free = MeasuredCosts(rows=(1, 2), steps=(1.0, 1.0), micro_steps=(0.0, 0.0))  # whatever is drafted is checked
    policy = DraftPolicy(StepCosts(free), config.max_group - 1)
    return EngineCore(config, runner, clock, grammars, policy, loras=loras)


def make_llm(runner: ScriptedRunner, num_blocks: int = 256) -> LLM:
    """The offline API on a scripted runner."""
    config = fake_config(max_model_len=CONTEXT, num_blocks=num_blocks)
    return LLM.from_core(fake_core(runner, config), fake_info(config), ByteTokenizer())


@asynccontextmanager
async def fake_engine(
    runner: ScriptedRunner | None = None,
    *,
    observer: EngineObserver | None = None,
    clock: Callable[[], float] = time.monotonic,
    drain_seconds: float = 0.0,
    auto: AutoConfidence | None = None,
    overlap: bool = False,
    info: Mapping[str, Any] | None = None,
    loras: CoreLoras | None = None,
    tokenizer: ByteTokenizer | None = None,
    **config: Any,
) -> AsyncIterator[AsyncEngine]:
    """An AsyncEngine on a ScriptedRunner and a ByteTokenizer; shut down at the end (a gate is opened for that).

    `config` are fields of EngineConfig, `info` of EngineInfo.
    """
    runner = runner or ScriptedRunner()
    resolved = fake_config(**config)
    core = fake_core(runner, resolved, clock, overlap, loras)
    host = ThreadHost(lambda: (core, fake_info(resolved, **(info or {}))), clock)
    engine = await AsyncEngine.launch(host, tokenizer or ByteTokenizer(), observer, clock, auto)
    try:
        yield engine
    finally:
        if runner.gate is not None:
            runner.gate.set()
        await engine.shutdown(drain_seconds)
