"""Builds an engine core in three stages. Torch is imported here and in what it imports.

resolve (device/load.py)    arguments and checkpoint -> what runs where
size (sizing.py)            memory -> the KV pool, and the numbers that scheduling depends on
build                       model, pool, graphs, runner, core
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from hamburger.engine.core.core import EngineCore
from hamburger.engine.core.loras import CoreLoras
from hamburger.engine.core.overlap import OverlappedCore
from hamburger.engine.device.cpu_threads import StepThreads
from hamburger.engine.device.load import (
    Resolved,
    resolve,
    settling_told,
    shard_steps_of,
    slot_choice,
    steps_of,
)
from hamburger.engine.device.loras import LoraFolders
from hamburger.engine.device.memory import decode_graphs, decode_rows
from hamburger.engine.device.runner import Runner
from hamburger.engine.device.step_costs import measure_costs
from hamburger.engine.device.thread_places import thread_places
from hamburger.engine.drafting.costs import MeasuredCosts, StepCosts
from hamburger.engine.drafting.policy import DraftPolicy
from hamburger.engine.grammar.matching import Grammars
from hamburger.engine.sizing import captures_steps, engine_config
from hamburger.engine.text.tokenizer import Tokenizer
from hamburger.engine.types.config import EngineArgs, EngineConfig
from hamburger.engine.types.messages import EngineInfo, SubmitRequest
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.model.checkpoints.lazy_tensors import NO_TENSORS
from hamburger.model.config import ConfigError
from hamburger.model.cpu.library import Kernels
from hamburger.model.device.out_of_memory import out_of_memory_reason
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.parallel.steps import ParallelSteps
from hamburger.model.steps import EagerSteps, Steps

if TYPE_CHECKING:
    from hamburger.engine.ranks.build import Leader
    from hamburger.engine.ranks.ranks import LeadingRunner, OnLost


def build_core(
    args: EngineArgs, on_progress: Callable[[str], None] = lambda line: None, on_lost: OnLost | None = None
) -> tuple[EngineCore, EngineInfo]:
    """Load the model and size the KV pool. on_progress gets one line for people at the start of each stage.

    on_lost: what to do, in another thread, when one of several ranks ends (ranks.py); None fails the step that runs.
    Raises CheckpointError or ConfigError, whose messages are fit for the user.
    """
    with ExitStack() as undo:
        built = _build(args, on_progress, on_lost, undo)
        undo.pop_all()
        return built


def _build(
    args: EngineArgs, on_progress: Callable[[str], None], on_lost: OnLost | None, undo: ExitStack
) -> tuple[EngineCore, EngineInfo]:
    resolved = resolve(args, on_progress=on_progress)
    leader: Leader | None = None
    steps: EagerSteps | ParallelSteps
    if args.tensor_parallel_size > 1:
        leader = _leader(args, on_lost)
        undo.callback(leader.ranks.close)
        steps = shard_steps_of(resolved, args, leader.collectives)
    else:
        steps = steps_of(resolved, args)
    _tell_weights(resolved, steps, on_progress)
    resolved = replace(resolved, checkpoint=replace(resolved.checkpoint, tensors=NO_TENSORS))  # the model has them now
    config = engine_config(args, resolved, steps, leader, on_progress)
    runner, policy = _runner(args, config, resolved, steps, leader, on_progress)
    info = _info(args, config, resolved, steps)
    grammars = Grammars(lambda: Tokenizer.load(resolved.source.tokenizer_path), info.vocab_size, info.eos_token_ids)
    loras: CoreLoras | None = None
    if args.max_loras and steps.loras is not None:
        folders = LoraFolders(steps.loras, steps.config.trunk, args.max_lora_rank, resolved.source)
        loras = CoreLoras(folders, args.max_loras)
    if isinstance(runner, Runner) and config.groups == "composed" and _overlaps(args, resolved.device):
        core: EngineCore = OverlappedCore(config, runner, grammars=grammars, loras=loras)
    else:
        core = EngineCore(
            config,
            runner,
            grammars=grammars,
            policy=policy,
            settle=runner.settle if isinstance(runner, Runner) else None,
            loras=loras,
        )
    compiles = resolved.attention != "torch"
    on_progress("warming up: Triton compiles its kernels, once a machine" if compiles else "warming up")
    _warm_up(core, info)
    return core, info


def _tell_weights(resolved: Resolved, steps: Steps, on_progress: Callable[[str], None]) -> None:
    if resolved.int8:
        on_progress("weights as int8")
    if resolved.kernels is not None:
        on_progress(f"weights as {steps.quantization}, kernels for {resolved.kernels.instructions}")


def _runner(
    args: EngineArgs,
    config: EngineConfig,
    resolved: Resolved,
    steps: EagerSteps | ParallelSteps,
    leader: Leader | None,
    on_progress: Callable[[str], None],
) -> tuple[Runner | LeadingRunner, DraftPolicy | None]:
    """What runs scheduled batches, on a KV pool of its own, and what decides its drafts.

    Raises ConfigError where the pool or the first steps do not fit.
    """
    runs: Steps = steps
    threads = None if resolved.kernels is None else _step_threads(resolved.kernels)
    most_rows = min(config.max_num_batched_slots, config.max_group * config.max_num_seqs)
    if resolved.device.type != "cpu":  # whose memory for steps is measured
        most_rows = min(most_rows, decode_rows(args, config.groups))
    costs: MeasuredCosts | None = None
    try:
        choice, places = (None, None) if config.settling is None else slot_choice(resolved, config.settling)
        cache = PagedKVCache(
            steps.trunk_config, config.num_blocks, config.block_size, resolved.kv_dtype, resolved.device, places
        )
        if isinstance(steps, EagerSteps) and captures_steps(args, resolved):
            runs = graphs = decode_graphs(steps, cache, args, config.groups, config.max_model_len)
            graphs.prepare(lambda done, total: tell_captures(on_progress, done, total))
        if config.settling is not None and choice is not None and places is not None:
            on_progress(settling_told(config.settling, choice, places))
        runner: Runner | LeadingRunner = Runner(runs, cache, threads, config.groups, choice)
        measure = partial(measure_costs, runs, cache, most_rows, resolved.max_model_len, threads)
        if leader is not None and isinstance(runner, Runner):
            runner = leader.runner(runner, config.num_blocks)
            measure = partial(runner.lead, measure)
        if config.groups == "verified":
            on_progress("measuring steps")
            costs = measure()
    except (RuntimeError, MemoryError) as error:
        if (reason := out_of_memory_reason(error)) is None:
            raise
        raise ConfigError(
            "The KV pool, the CUDA graphs and the first steps do not fit beside the weights: lower kv_cache_memory or "
            f"max_num_seqs, or set enforce_eager. ({reason})"
        ) from error
    if costs is None:
        return runner, None
    return runner, DraftPolicy(StepCosts(costs), steps.config.max_group - 1, max_rows=most_rows)


def _info(args: EngineArgs, config: EngineConfig, resolved: Resolved, steps: Steps) -> EngineInfo:
    model, size = steps.config, args.tensor_parallel_size
    confidence, graft = model.default_confidence, model.graft
    if config.groups == "verified":
        confidence = 0.0  # as many drafts as pay
    if args.confidence is not None:
        confidence = args.confidence
    tokens_per_kv = 1.0
    if graft and config.groups == "composed" and confidence == graft.default_confidence:
        tokens_per_kv = graft.expected_tokens_per_kv
    return EngineInfo(
        settling="" if config.settling is None else config.settling.told,
        model=resolved.source.name,
        is_plain_base=graft is None,
        max_model_len=config.max_model_len,
        max_group=config.max_group,
        groups=config.groups,
        default_confidence=confidence,
        vocab_size=model.trunk.vocab_size,
        eos_token_ids=list(config.eos_token_ids),
        block_size=config.block_size,
        total_slots=config.total_slots,
        expected_tokens=int(config.total_slots * tokens_per_kv),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_slots=config.max_num_batched_slots,
        device=str(resolved.device) if size == 1 else f"{size} x {resolved.device.type}",
        dtype=str(resolved.dtype).removeprefix("torch."),
        kv_cache_dtype=str(resolved.kv_dtype).removeprefix("torch."),
        quantization=steps.quantization,
    )


def _leader(args: EngineArgs, on_lost: OnLost | None) -> Leader:
    """Imported only here: an engine of one process needs no msgspec (benchmarks/gpu.sh has none)."""
    from hamburger.engine.ranks.build import Leader

    return Leader(args, on_lost)


def tell_captures(on_progress: Callable[[str], None], done: int, total: int) -> None:
    """A line for each quarter of the batch sizes."""
    if done == 0 or done * 4 // total > (done - 1) * 4 // total:
        on_progress(f"capturing CUDA graphs: {done} of {total} batch sizes")


def _overlaps(args: EngineArgs, device: torch.device) -> bool:
    """Whether steps of composed groups overlap. On CPU there is nothing beside which the host could work:
    docs/performance.md."""
    return args.overlap_steps == "on" or (args.overlap_steps == "auto" and device.type != "cpu")


def _warm_up(core: EngineCore, info: EngineInfo) -> None:
    """A whole group and the next, so that the first request does not wait for libraries to prepare their kernels."""
    max_tokens = min(info.max_group + 1, info.max_model_len - 1)
    prompt_ids = [0] * min(16, info.max_model_len - max_tokens)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=0, confidence=0)
    core.add(SubmitRequest("warm-up", prompt_ids, params, time.monotonic()))
    while core.has_work:
        for failure in core.step().failures:
            raise ConfigError(f"{failure.message} Lower kv_cache_memory, max_num_batched_slots or max_num_seqs.")


def _step_threads(kernels: Kernels) -> StepThreads | None:
    """For our kernels, whose results do not depend on it; None where there is one, or somebody said how many."""
    number = torch.get_num_threads()
    if number == 1 or os.environ.get("OMP_NUM_THREADS"):
        return None
    return StepThreads(torch.get_num_threads, torch.set_num_threads, places=thread_places(kernels, number))
