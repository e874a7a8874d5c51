"""What one rank of tensor parallelism holds, in numbers, and what rank 0 tells the others of a step. No torch.

split by heads         q, k, v (rows), o (columns), the KV cache (KV heads)
split by width         gate, up (rows), down (columns)
split by vocabulary    embedding and head (rows): the two largest tensors, and tied ones are one
whole on every rank    norms, embedder, stop head, fused features: a few squares of the width, read seldom
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hamburger.model.config import ConfigError, TrunkConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What a rank's host must know of a ForwardBatch (batch.py) before its tensors come; fields as there.

    num_slots: T. num_composed: those of several tokens, where an adapter is theirs alone. num_emitting: M.
    table_width: N of block_tables. num_scored: S. Sampling is rank 0's alone.
    """

    num_slots: int
    num_composed: int
    max_group_size: int
    query_slots: list[int]
    context_slots_host: list[int]
    num_single: int
    table_width: int
    num_emitting: int
    max_group_limit: int
    num_scored: int
    has_text_lengths: bool

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """Values of each tensor of the batch, as they lie behind each other on their way to the ranks (steps.py)."""
        t, b, m = self.num_slots, len(self.query_slots), self.num_emitting
        lengths = t if self.has_text_lengths else 0
        return t * self.max_group_size, t, t, t, b * self.table_width, b, m, self.num_scored, lengths


def shard_trunk(trunk: TrunkConfig, size: int) -> TrunkConfig:
    """The trunk that each of `size` ranks builds; the vocabulary's last rows may be padding.

    Raises ConfigError where heads or width cannot be shared out evenly.
    """
    if trunk.qk_norm == "width" and size > 1:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but {trunk.architecture} norms queries and keys over all "
            "heads at once: use 1."
        )
    if trunk.experts is not None and size > 1:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but the experts of {trunk.architecture} are not split: use 1."
        )
    split = {"num_key_value_heads": trunk.num_kv_heads, "intermediate_size": trunk.intermediate_size}
    if any(number % size for number in split.values()):
        possible = [n for n in range(1, trunk.num_kv_heads + 1) if not any(m % n for m in split.values())]
        numbers = " and ".join(f"{name} {number}" for name, number in split.items())
        raise ConfigError(
            f"tensor_parallel_size is {size}, but it must divide the model's {numbers}: "
            f"use {' or '.join(map(str, possible))}."
        )
    return replace(
        trunk,
        num_heads=trunk.num_heads // size,
        num_kv_heads=trunk.num_kv_heads // size,
        intermediate_size=trunk.intermediate_size // size,
        vocab_size=-(-trunk.vocab_size // size),
    )
