"""Which shapes the CPU kernels (cpu/) take, and how many bytes their weights have. No torch."""

from __future__ import annotations

from hamburger.model.config import TrunkConfig

GROUP = 32  # inputs that share a scale
BLOCK = 16  # outputs
_MAX_HEAD_DIM = 256
_MAX_QUERY_HEADS = 32  # of one KV head
_GROUP_BYTES = {4: 320, 8: 544}  # of a block


def packed_bytes(outputs: int, inputs: int, bits: int) -> int:
    """Of a weight [outputs, inputs] in 4 or 8 bits, inputs a multiple of GROUP, as kernels/structs.h lays it out."""
    return -(-outputs // BLOCK) * (inputs // GROUP) * _GROUP_BYTES[bits]


def layers_fit(config: TrunkConfig) -> bool:
    """Whether the kernels take this geometry."""
    widths = [config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size]
    if config.experts is not None:
        widths.append(config.experts.width)
    return (
        all(width % GROUP == 0 for width in widths)
        and config.head_dim % GROUP == 0
        and config.head_dim <= _MAX_HEAD_DIM
        and config.num_heads // config.num_kv_heads <= _MAX_QUERY_HEADS
    )
