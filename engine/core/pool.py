"""How large the KV pool is: the rule by which the engine sizes it and `hamburger plan` predicts it. No torch."""

from __future__ import annotations

from hamburger.model.config import ConfigError, TrunkConfig
from hamburger.model.kernel_shapes import GROUP, packed_bytes
from hamburger.model.tensor_shapes import JOINED, layer_shapes

# A GPU is there for the server; a CPU machine's memory is shared with everything else on it.
_GPU_SHARE, _CPU_SHARE = 0.9, 0.4


def pool_share(device_type: str, free_bytes: int) -> int:
    """Bytes for the pool of the memory that is free after the weights were loaded; device_type: `cuda` or `cpu`."""
    return int(free_bytes * (_GPU_SHARE if device_type == "cuda" else _CPU_SHARE))


def lora_bytes(trunk: TrunkConfig, rank: int, number_bytes: int | None) -> int:
    """Most bytes that a LoRA adapter of this rank takes: one of all linears. What all that may come take is kept free
    before the pool has its share.

    number_bytes: of its numbers; None: in 8 bits, as the CPU kernels hold it (cpu/loras.py).
    """
    total = 0
    for layer in range(trunk.num_layers):
        shapes = layer_shapes(trunk, layer)
        for parts in JOINED.values():
            if f"{parts[0]}.weight" not in shapes:  # experts have no adapters
                continue
            joined = len(parts) * rank
            inputs = shapes[f"{parts[0]}.weight"][1]
            outputs = sum(shapes[f"{part}.weight"][0] for part in parts)
            if number_bytes is None:
                joined = -(-joined // GROUP) * GROUP
                total += packed_bytes(joined, inputs, 8) + packed_bytes(outputs, joined, 8)
            else:
                total += joined * (inputs + outputs) * number_bytes
    return total


def blocks_of_pool(
    budget_bytes: int,
    slot_bytes: int,
    *,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int | None,
    for_loras: int = 0,
) -> int:
    """Blocks that fit into the pool's memory, but never more than max_num_seqs sequences of max_model_len can use.

    max_num_seqs: None for any number. for_loras: bytes that the pool has not, as adapters may need them. Raises
    ConfigError where not even one such sequence fits, at one slot a token.
    """
    block_bytes = slot_bytes * block_size
    per_sequence = -(-max_model_len // block_size)
    fits = budget_bytes // block_bytes
    if fits < per_sequence:
        needed = per_sequence * block_bytes
        if block_bytes > budget_bytes and block_size > max_model_len:
            raise ConfigError(
                f"block_size is {block_size} slots, whose KV takes {needed / 2**20:.0f} MiB, but the KV pool has "
                f"{budget_bytes / 2**20:.0f} MiB: lower block_size or raise kv_cache_memory."
            )
        beside = f", beside {for_loras / 2**20:.0f} MiB for max_loras of max_lora_rank" if for_loras else ""
        raise ConfigError(
            f"max_model_len is {max_model_len} tokens, whose KV takes {needed / 2**20:.0f} MiB, but the KV pool has "
            f"{budget_bytes / 2**20:.0f} MiB{beside}: lower {'these or ' if for_loras else ''}max_model_len"
            f"{f' to {fits * block_size} or less' if fits else ''}, or raise kv_cache_memory."
        )
    return fits if max_num_seqs is None else min(fits, max_num_seqs * per_sequence)
