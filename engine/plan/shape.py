"""Shape: what planning needs of a model, in numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from hamburger.engine.core.pool import lora_bytes
from hamburger.engine.plan.held import Held, as_numbers
from hamburger.model.config import ModelConfig, kv_slot_bytes
from hamburger.model.tensor_shapes import tensor_shapes

NUMBER_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
KV_BYTES = {**NUMBER_BYTES, "int8": 1}  # and a scale a head


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightReads:
    """Bytes of weights that a step reads. trunk: by one macro-step, without a head; head: for its one token; merge:
    besides, where it reads a slot of several tokens; micro: by one micro-step, head included. plain: as `trunk`, of the
    base. experts: the part of trunk and plain that is experts', of which each stream reads expert_share.
    """

    trunk: int
    head: int
    merge: int
    micro: int
    plain: int
    experts: int = 0
    expert_share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What planning needs of a model, or of the part of it that each of num_parts GPUs has, parameters aside, which are
    all. weights_bytes: all that is loaded. max_model_len: None where nothing says it.

    tokens_per_kv: what was measured of the checkpoint; reads: None where only a number of parameters is known.
    slides_beyond: as of TrunkConfig. loras: the bytes of a LoRA adapter of a rank; None as reads.
    """

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    parameters: int
    weights_bytes: int
    kv_bytes: int
    max_model_len: int | None
    max_group: int | None
    tokens_per_kv: float
    reads: WeightReads | None
    slides_beyond: int | None = None
    loras: Callable[[int], int] | None = None
    num_parts: int = 1

    @property
    def slot_bytes(self) -> int:
        return kv_slot_bytes(self.num_layers, self.num_kv_heads, self.head_dim, self.kv_bytes)


def shape_of(
    name: str, config: ModelConfig, dtype: str, kv_dtype: str | None = None, *, held: Held | None = None
) -> Shape:
    """The shape of a model that is loaded in a dtype. kv_dtype: of the KV pool, if it is another. held: how its weights
    are, if not in numbers of the dtype."""
    trunk, graft, number_bytes = config.trunk, config.graft, NUMBER_BYTES[dtype]
    held = as_numbers(config, number_bytes) if held is None else held
    plain, stop = held.of("model.layers.", "model.norm."), held.of("stop_head.")
    return Shape(
        name=name,
        num_layers=trunk.num_layers,
        num_kv_heads=trunk.num_kv_heads,
        head_dim=trunk.head_dim,
        parameters=num_parameters(config),
        weights_bytes=held.total,
        kv_bytes=KV_BYTES[kv_dtype or dtype],
        max_model_len=trunk.context_tokens,
        max_group=config.max_group,
        tokens_per_kv=graft.expected_tokens_per_kv if graft and graft.groups == "composed" else 1.0,
        reads=WeightReads(
            trunk=plain + stop,
            head=held.head,
            merge=held.of("embedder.", "adapter."),
            micro=held.of("micro_decoder.", "stop_head.") + held.micro_head if graft else 0,
            plain=plain,
            experts=sum(size for tensor, size in held.tensors.items() if ".experts." in tensor),
            expert_share=1.0 if trunk.experts is None else trunk.experts.per_token / trunk.experts.number,
        ),
        slides_beyond=trunk.slides_beyond,
        loras=partial(lora_bytes, trunk, number_bytes=None if held.is_packed else number_bytes),
    )


def num_parameters(config: ModelConfig) -> int:
    """Of the whole model."""
    return sum(math.prod(shape) for tensor, shape in tensor_shapes(config).items() if tensor != "short_list")
