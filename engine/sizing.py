"""Sizes an engine: the KV pool by the memory that its model leaves, and the numbers that scheduling depends on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from hamburger.engine.core.pool import blocks_of_pool, lora_bytes
from hamburger.engine.device.load import Resolved, rank_pool_bytes, slot_choice
from hamburger.engine.device.memory import step_bytes
from hamburger.engine.text.tokenizer_files import with_own_end
from hamburger.engine.types.config import VERIFIED_GROUP, EngineArgs, EngineConfig
from hamburger.model.config import TrunkConfig
from hamburger.model.graphs.step_memory import CudaMeter
from hamburger.model.kv_cache import slot_bytes
from hamburger.model.parallel.steps import ParallelSteps
from hamburger.model.steps import EagerSteps

if TYPE_CHECKING:
    from hamburger.engine.ranks.build import Leader

# Times as fast as those of attention, which are in float32: 3.5 of the embedded model on AVX-512 with VNNI.
_WHOLE_NUMBERS = 3


def engine_config(
    args: EngineArgs,
    resolved: Resolved,
    steps: EagerSteps | ParallelSteps,
    leader: Leader | None,
    on_progress: Callable[[str], None],
) -> EngineConfig:
    """The numbers that scheduling depends on: the KV pool by the memory that is left, on a GPU after the largest steps
    were measured."""
    trunk, device = steps.config.trunk, resolved.device
    groups = resolved.groups
    prefix_cache = args.prefix_cache and trunk.context_tokens == trunk.fixed_context_tokens
    if args.prefix_cache and not prefix_cache:
        on_progress("no prefix cache: with dynamic rope scaling a prompt's keys depend on its length")
    if trunk.experts is not None and device.type == "cuda":
        on_progress("no CUDA graphs: which experts a step needs, its own numbers decide")
    measures, for_steps = device.type == "cuda" and args.kv_cache_memory is None, 0
    if leader is not None and isinstance(steps, ParallelSteps):
        leader.meet(steps, measures=measures)
    if measures:
        on_progress("measuring what steps take")
        free = torch.cuda.mem_get_info(device)[0]
        for_steps = step_bytes(
            steps, args, groups, resolved.max_model_len, free, CudaMeter(device),
            kv_dtype=resolved.kv_dtype, captures=captures_steps(args, resolved),
            settled=None if resolved.settling is None else slot_choice(resolved, resolved.settling)[1],
        )  # fmt: skip
    on_progress("sizing the KV pool")
    # So that adapters may come when the pool has taken its share.
    number_bytes = steps.state_dtype.itemsize if resolved.kernels is None else None
    for_loras = args.max_loras * lora_bytes(trunk, args.max_lora_rank, number_bytes)
    budget = rank_pool_bytes(args, device, for_steps + for_loras)
    if leader is not None:
        budget = leader.pool_bytes(budget)
    return EngineConfig(
        max_model_len=resolved.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_slots=args.max_num_batched_slots,
        block_size=args.block_size,
        num_blocks=blocks_of_pool(
            budget,
            slot_bytes(trunk, resolved.kv_dtype),
            block_size=args.block_size,
            max_model_len=resolved.max_model_len,
            max_num_seqs=args.max_num_seqs,
            for_loras=for_loras if args.kv_cache_memory is None else 0,
        ),
        eos_token_ids=with_own_end(trunk.eos_token_ids, trunk.vocab_size, resolved.source.tokenizer_path),
        max_group=steps.config.max_group if groups == "composed" else max(VERIFIED_GROUP, steps.config.max_group),
        groups=groups,
        settling=resolved.settling,
        even_context=_even_context(trunk, counts_in_bits=resolved.kernels is not None),
        max_queue=args.max_queue,
        max_queue_seconds=args.max_queue_seconds,
        prefix_cache=prefix_cache,
    )


def _even_context(trunk: TrunkConfig, *, counts_in_bits: bool) -> int:
    """EngineConfig.even_context, by the products of a layer. counts_in_bits: its matrices' are of whole numbers."""
    heads = trunk.num_heads * trunk.head_dim
    of_matrices = trunk.hidden_size * (2 * heads + 2 * trunk.num_kv_heads * trunk.head_dim + trunk.mlp_products)
    of_attention = 2 * heads  # for each slot of the context
    return max(1, of_matrices // (of_attention * (_WHOLE_NUMBERS if counts_in_bits else 1)))


def captures_steps(args: EngineArgs, resolved: Resolved) -> bool:
    """Whether decoding steps become CUDA graphs. torch's attention would gather max_model_len slots of every row in
    each captured step, at 64 rows gigabytes; and which experts a step needs, its numbers decide."""
    on_gpu = resolved.device.type == "cuda" and resolved.attention != "torch"
    has_experts = resolved.checkpoint.config.trunk.experts is not None
    return on_gpu and not has_experts and args.tensor_parallel_size == 1 and not args.enforce_eager
