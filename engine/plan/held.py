"""What a model's weights take in memory once they are loaded, and what of them a step reads, in bytes. No torch."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from hamburger.model.config import ModelConfig
from hamburger.model.kernel_shapes import BLOCK, GROUP, packed_bytes
from hamburger.model.tensor_shapes import shared_lora_a, tensor_shapes

_SHORT_LIST_ID_BYTES = 8
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """tensors: by canonical name, without embeddings and heads. head, micro_head: what of them a macro-step and a
    micro-step read at least. other: the rest, which is held too. is_packed: as the CPU kernels have them, adapters too.
    """

    tensors: dict[str, int]
    head: int
    micro_head: int
    other: int
    is_packed: bool

    @property
    def total(self) -> int:
        return sum(self.tensors.values()) + self.other

    def of(self, *prefixes: str) -> int:
        """Of all tensors whose names begin so."""
        return sum(size for tensor, size in self.tensors.items() if tensor.startswith(prefixes))


def as_numbers(config: ModelConfig, number_bytes: int, *, copies_tied_head: bool = False) -> Held:
    """In numbers of so many bytes. copies_tied_head: plain torch on a CPU has it in oneDNN's layout beside the
    embeddings."""
    sizes = {tensor: math.prod(shape) for tensor, shape in tensor_shapes(config).items()}
    rows = sizes.pop("short_list", 0)
    for name in _held_once(config):
        sizes.pop(name, None)
    trunk = config.trunk
    embeddings = sum(sizes.pop(name, 0) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    head, short = trunk.vocab_size * trunk.hidden_size, rows * trunk.hidden_size
    copies = short + (head if copies_tied_head and trunk.tie_word_embeddings else 0)  # the short list's are rows of it
    return Held(
        tensors={tensor: size * number_bytes for tensor, size in sizes.items()},
        head=head * number_bytes,
        micro_head=(short or head) * number_bytes,
        other=(embeddings + copies) * number_bytes + rows * _SHORT_LIST_ID_BYTES,
        is_packed=False,
    )


def as_int8(config: ModelConfig, number_bytes: int) -> Held:
    """As a GPU has them that was asked for int8 (gpu/int8.py): the linears of trunk and micro decoder, and a copy of
    the micro-steps' head, in bytes with a scale a row; all else in numbers of so many bytes."""
    plain, trunk = as_numbers(config, number_bytes), config.trunk
    tensors = dict(plain.tensors)
    for name, shape in tensor_shapes(config).items():
        is_linear = len(shape) == 2 and not name.endswith(("norm.weight", "mlp.gate.weight"))
        if is_linear and name.startswith(("model.layers.", "micro_decoder.")):
            tensors[name] = math.prod(shape) + shape[0] * _FLOAT_BYTES
    if config.graft is None:
        return replace(plain, tensors=tensors)
    rows = config.graft.short_list_size or trunk.vocab_size
    micro_head = rows * (trunk.hidden_size + _FLOAT_BYTES)
    in_numbers = plain.micro_head if config.graft.short_list_size else 0  # a copy, too
    return replace(plain, tensors=tensors, micro_head=micro_head, other=plain.other - in_numbers + micro_head)


def as_packed(config: ModelConfig, number_bytes: int, four_bits: Collection[str] = ()) -> Held:
    """As the CPU kernels have them (cpu/backend.py): linears in 8 bits, drafting ones of verified groups in 4, all else
    in float32.

    number_bytes: of an embedding that has no tied head, whose 8 bits it would be. four_bits: the trunk's linears that
    have no more.
    """
    trunk, graft = config.trunk, config.graft
    shapes = tensor_shapes(config)
    (rows,) = shapes.pop("short_list", (0,))
    for name in ("model.embed_tokens.weight", "lm_head.weight", *_held_once(config)):
        shapes.pop(name, None)
    draft_bits = 4 if graft is not None and graft.groups == "verified" else 8
    packs_embedder = trunk.hidden_size // 2 % GROUP == 0

    def held(name: str, shape: tuple[int, ...]) -> int:
        is_drafting = name.startswith("micro_decoder.")
        is_plain = name.endswith("mlp.gate.weight") or (name.startswith("embedder.") and not packs_embedder)
        if name == "embedder.pos" or len(shape) < 2 or name.endswith("_norm.weight") or is_plain:
            return math.prod(shape) * _FLOAT_BYTES
        return packed_bytes(shape[0], shape[1], 4 if name in four_bits or (is_drafting and draft_bits == 4) else 8)

    def head_of(outputs: int) -> tuple[int, int]:
        """In all, and its copy in 4 bits, which is all that greedy rows read of most outputs."""
        coarse = packed_bytes(outputs, trunk.hidden_size, 4)
        errors = -(-outputs // BLOCK) * BLOCK * _FLOAT_BYTES
        return packed_bytes(outputs, trunk.hidden_size, 8) + coarse + errors, coarse

    (head, head_read), (short, short_read) = head_of(trunk.vocab_size), head_of(rows)
    table = 0 if trunk.tie_word_embeddings else trunk.vocab_size * trunk.hidden_size * number_bytes
    return Held(
        tensors={name: held(name, shape) for name, shape in shapes.items()},
        head=head_read,
        micro_head=short_read or head_read,
        other=head + short + table + rows * _SHORT_LIST_ID_BYTES,
        is_packed=True,
    )


def _held_once(config: ModelConfig) -> list[str]:
    """The lora_A that joined linears share with the first of them."""
    return [name for names in shared_lora_a(config).values() for name in names] if config.adapter_rank else []
