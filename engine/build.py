"""Builds an engine core: checkpoint, model, KV pool, runner. Torch is imported here and in what it imports."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from hamburger.engine.core.core import EngineCore
from hamburger.engine.core.overlap import OverlappedCore
from hamburger.engine.core.pool import blocks_of_pool
from hamburger.engine.device.cpu_threads import StepThreads
from hamburger.engine.device.load import find, model_of, rank_pool_bytes
from hamburger.engine.device.memory import decode_graphs, step_bytes
from hamburger.engine.device.runner import Runner
from hamburger.engine.text.grammar import Grammars
from hamburger.engine.text.tokenizer import Tokenizer
from hamburger.engine.types.config import EngineArgs, EngineConfig
from hamburger.engine.types.messages import EngineInfo, SubmitRequest
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.model.config import ConfigError, ModelConfig
from hamburger.model.device.out_of_memory import no_memory
from hamburger.model.graphs.step_memory import CudaMeter
from hamburger.model.kv_cache import PagedKVCache, slot_bytes

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
    found = find(args, on_progress=on_progress)
    source, device, dtype, kv_dtype = found.source, found.device, found.dtype, found.kv_dtype
    kernels, backend = found.kernels, found.backend
    model_config, max_model_len = found.checkpoint.config, found.max_model_len
    # torch's attention would gather max_model_len slots of every row in each captured step, at 64 rows gigabytes.
    captures = (
        args.tensor_parallel_size == 1 and device.type == "cuda" and backend != "torch" and not args.enforce_eager
    )
    leader = _leader(args, on_lost) if args.tensor_parallel_size > 1 else None
    if leader is not None:
        undo.callback(leader.ranks.close)
    model = model_of(found, args, None if leader is None else leader.group)
    if found.eight_bits:
        on_progress("weights as int8")
    if kernels is not None:
        on_progress(f"weights as {model.quantization}, kernels for {kernels.instructions}")
    del found  # the checkpoint's tensors
    prefix_cache = args.prefix_cache and model_config.trunk.context_tokens == model_config.trunk.fixed_context_tokens
    if args.prefix_cache and not prefix_cache:
        on_progress("no prefix cache: with dynamic rope scaling a prompt's keys depend on its length")
    measures, for_steps = device.type == "cuda" and args.kv_cache_memory is None, 0
    if leader is not None:
        leader.meet(model, device, measures=measures)
    if measures:
        on_progress("measuring what steps take")
        for_steps = step_bytes(
            model,
            replace(args, enforce_eager=not captures),
            max_model_len,
            torch.cuda.mem_get_info(device)[0],
            CudaMeter(device),
        )
    on_progress("sizing the KV pool")
    budget = rank_pool_bytes(args, device, for_steps)
    if leader is not None:
        budget = leader.pool_bytes(budget)
    config = EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_slots=args.max_num_batched_slots,
        block_size=args.block_size,
        num_blocks=_num_blocks(args, model_config, max_model_len, kv_dtype, budget),
        eos_token_ids=model_config.trunk.eos_token_ids,
        max_group=model_config.max_group,
        max_queue=args.max_queue,
        max_queue_seconds=args.max_queue_seconds,
        prefix_cache=prefix_cache,
    )
    try:
        cache = PagedKVCache(model.held, config.num_blocks, config.block_size, kv_dtype, device)
        graphs = decode_graphs(model, cache, args, max_model_len) if captures else None
        if graphs is not None:
            graphs.prepare(lambda done, total: tell_captures(on_progress, done, total))
    except (RuntimeError, MemoryError) as error:
        if (said := no_memory(error)) is None:
            raise
        raise ConfigError(
            "The KV pool and the CUDA graphs do not fit beside the weights: lower kv_cache_memory or max_num_seqs, "
            f"or set enforce_eager. ({said})"
        ) from error
    runner: Runner | LeadingRunner
    if leader is not None:
        runner = leader.runner(model, cache, config.num_blocks)
    else:
        runner = Runner(model, cache, graphs, None if kernels is None else _step_threads())
    graft = model_config.graft
    confidence = args.confidence if args.confidence is not None else model_config.default_confidence
    tokens_per_kv = graft.expected_tokens_per_kv if graft and confidence == graft.default_confidence else 1.0
    info = EngineInfo(
        model=source.name,
        is_plain_base=graft is None,
        max_model_len=max_model_len,
        max_group=model_config.max_group,
        default_confidence=confidence,
        vocab_size=model_config.trunk.vocab_size,
        eos_token_ids=list(model_config.trunk.eos_token_ids),
        block_size=config.block_size,
        total_slots=config.total_slots,
        expected_tokens=int(config.total_slots * tokens_per_kv),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_slots=config.max_num_batched_slots,
        device=str(device) if leader is None else f"{args.tensor_parallel_size} x {device.type}",
        dtype=str(dtype).removeprefix("torch."),
        quantization=model.quantization,
    )
    grammars = Grammars(lambda: Tokenizer.load(source.tokenizer_path), info.vocab_size, info.eos_token_ids)
    if isinstance(runner, Runner) and _overlaps(args, device):
        core: EngineCore = OverlappedCore(config, runner, grammars=grammars)
    else:
        core = EngineCore(config, runner, grammars=grammars)
    on_progress("warming up: Triton compiles its kernels, once a machine" if backend != "torch" else "warming up")
    _warm_up(core, info)
    return core, info


def _leader(args: EngineArgs, on_lost: OnLost | None) -> Leader:
    """Imported only here: an engine of one process needs no msgspec (benchmarks/gpu.sh has none)."""
    from hamburger.engine.ranks.build import Leader

    return Leader(args, on_lost)


def tell_captures(on_progress: Callable[[str], None], done: int, total: int) -> None:
    """A line for each quarter of the batch sizes."""
    if done == 0 or done * 4 // total > (done - 1) * 4 // total:
        on_progress(f"capturing CUDA graphs: {done} of {total} batch sizes")


def _overlaps(args: EngineArgs, device: torch.device) -> bool:
    """Whether steps overlap. On CPU there is nothing beside which the host could work: docs/performance.md."""
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


def _step_threads() -> StepThreads | None:
    """For our kernels, whose results do not depend on it; None where there is one, or somebody said how many."""
    if torch.get_num_threads() == 1 or os.environ.get("OMP_NUM_THREADS"):
        return None
    return StepThreads(torch.get_num_threads, torch.set_num_threads)


def _num_blocks(args: EngineArgs, config: ModelConfig, max_model_len: int, dtype: torch.dtype, budget: int) -> int:
    return blocks_of_pool(
        budget,
        slot_bytes(config.trunk, dtype),
        block_size=args.block_size,
        max_model_len=max_model_len,
        max_num_seqs=args.max_num_seqs,
    )
