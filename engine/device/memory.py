"""How much memory the KV pool may take, and what a GPU's steps need beside it.

Linux's own limits are asked, so that a container's limit counts.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import torch

from hamburger.engine.core.pool import pool_share
from hamburger.engine.device.control_groups import memory_left
from hamburger.engine.types.config import VERIFIED_GROUP, EngineArgs
from hamburger.engine.types.messages import Groups
from hamburger.engine.types.sampling_params import MAX_LOGPROBS
from hamburger.model.config import ConfigError
from hamburger.model.device.out_of_memory import out_of_memory_reason
from hamburger.model.graphs.capture import CudaCapture, EagerCapture
from hamburger.model.graphs.decode_graphs import DecodeGraphs
from hamburger.model.graphs.step_memory import Largest, Meter, graph_bytes, peak_bytes, small_cache
from hamburger.model.kv_cache import PagedKVCache, slot_bytes
from hamburger.model.parallel.steps import ParallelSteps
from hamburger.model.settled_places import SettledPlaces
from hamburger.model.steps import EagerSteps


def pool_bytes(device: torch.device, kv_cache_memory: int | None, num_engines: int = 1, kept_free: int = 0) -> int:
    """Bytes for the KV pool: what the user set, or a share of what is free now (after the weights were loaded).

    num_engines: how many divide that share among them. On a GPU each has its part of the whole memory for weights and
    pool, so that it does not matter which of them came first, or comes again. kept_free: bytes that this engine's
    LoRA adapters will need and, on a GPU, its steps (step_bytes).
    """
    if kv_cache_memory is not None:
        return kv_cache_memory
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        budget = pool_share("cuda", max(0, free - kept_free))
        if num_engines > 1:
            part = pool_share("cuda", total) // num_engines - torch.cuda.memory_reserved(device) - kept_free
            budget = max(0, min(budget, part))
        return budget
    # The pool of an engine that came before is not yet touched, so it still counts as free here: hence a part each.
    return pool_share("cpu", max(0, available_host_bytes() - num_engines * kept_free)) // num_engines


def step_bytes(
    steps: EagerSteps | ParallelSteps,
    args: EngineArgs,
    groups: Groups,
    max_model_len: int,
    free_bytes: int,
    meter: Meter,
    *,
    kv_dtype: torch.dtype,
    captures: bool,
    settled: SettledPlaces | None = None,
) -> int:
    """Bytes that the largest steps and, if it captures any, CUDA graphs take beside weights and pool: measured.

    free_bytes: of the device, which the pool cannot be larger than. kv_dtype, settled: of the KV cache. Raises
    ConfigError where no pool would be left.
    """
    pool_slots = free_bytes // slot_bytes(steps.trunk_config, kv_dtype)
    largest = Largest(
        max_slots=args.max_num_batched_slots,
        max_rows=decode_rows(args, groups),
        max_model_len=max_model_len,
        context_slots=pool_slots // args.max_num_seqs,
        max_logprobs=min(MAX_LOGPROBS, steps.config.trunk.vocab_size),
        block_size=args.block_size,
        kv_dtype=kv_dtype,
        is_verified=groups == "verified",
        settled=settled,
    )
    try:
        needed = peak_bytes(steps, largest, meter)
        if captures and isinstance(steps, EagerSteps):
            cache = small_cache(steps, args.max_num_batched_slots, args.block_size, kv_dtype, settled)
            make = partial(decode_graphs, steps, cache, args, groups, max_model_len)
            needed += graph_bytes(make, decode_rows(args, groups), meter)
            del cache, make
    except (RuntimeError, MemoryError) as error:
        if (said := out_of_memory_reason(error)) is None:
            raise
        raise ConfigError(
            f"max_num_batched_slots is {args.max_num_batched_slots} and max_num_seqs {args.max_num_seqs}, but steps of "
            f"that size do not fit beside the weights: lower them. ({said})"
        ) from error
    meter.begin()  # all of it can be had again
    return needed


def decode_rows(args: EngineArgs, groups: Groups) -> int:
    """Rows of a GPU's largest decoding steps, which are measured and captured: one for each sequence and, with verified
    groups, as many drafts, or as make one group."""
    if groups == "composed":
        return args.max_num_seqs
    return min(max(2 * args.max_num_seqs, VERIFIED_GROUP), args.max_num_batched_slots)


def decode_graphs(
    steps: EagerSteps, cache: PagedKVCache, args: EngineArgs, groups: Groups, max_model_len: int
) -> DecodeGraphs:
    """For the model's device, nothing captured yet."""
    device = steps.device
    capture = CudaCapture(device) if device.type == "cuda" else EagerCapture()
    columns = -(-max_model_len // args.block_size)
    return DecodeGraphs(
        steps,
        cache,
        capture,
        max_rows=decode_rows(args, groups),
        max_columns=columns,
        is_verified=groups == "verified",
    )


def available_host_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process can still take: the machine's available memory or its control groups', the less."""
    available, left = _meminfo_available(root / "proc/meminfo"), memory_left(root)
    return available if left is None else min(available, left)


def _meminfo_available(path: Path) -> int:
    """MemAvailable; where there is no /proc (macOS) half of the physical memory."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    kibibytes = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return kibibytes * 1024
