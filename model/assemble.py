"""Canonical checkpoint tensors -> a HamburgerModel that is ready to step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hamburger.model.config import JOINED, ModelConfig, TrunkConfig
from hamburger.model.execution import DEFAULT, Execution
from hamburger.model.hamburger import HamburgerModel
from hamburger.model.parallel.collectives import Collectives
from hamburger.model.parallel.model import ParallelModel, shard_tensor


def assemble(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int,
    how: Execution = DEFAULT,
    group: Collectives | None = None,
) -> HamburgerModel:
    """Build the model from tensors named as `config.tensor_shapes` says (checked by the loader), in `dtype`.

    max_positions: the longest sequence to serve, in tokens.
    how: what computes it (execution.py). group: make a ParallelModel of it that holds this rank's part.
    """
    with torch.device("meta"):
        model = HamburgerModel(config) if group is None else ParallelModel(config, group)
    state = {}
    for name, parts in parts_of(config).items():
        held = [tensors[p] if group is None else shard_tensor(p, tensors[p], group.rank, group.size) for p in parts]
        joined = torch.cat(held) if len(held) > 1 else held[0]
        state[name] = joined.to(device, dtype if joined.is_floating_point() else joined.dtype)
    model.load_state_dict(state, strict=True, assign=True)
    model.eval().requires_grad_(False)
    del state  # it would keep each weight beside what is made of it
    model.prepare(max_positions, how)
    return model


def parts_of(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Module parameter -> the canonical tensors that are joined along axis 0 to make it."""
    names: dict[str, tuple[str, ...]] = {
        "embed_tokens.weight": ("model.embed_tokens.weight",),
        "trunk.norm.weight": ("model.norm.weight",),
    }
    if not config.trunk.tie_word_embeddings:
        names["lm_head.weight"] = ("lm_head.weight",)
    for i in range(config.trunk.num_layers):
        names |= _layer(f"trunk.layers.{i}.", f"model.layers.{i}.", config.trunk)
        if config.adapter_rank:
            names |= _adapter(f"trunk.layers.{i}.", f"adapter.model.layers.{i}.")
    graft = config.graft
    if graft is None:
        return names
    for i in range(graft.micro_layers):
        names |= _layer(f"micro_decoder.layers.{i}.", f"micro_decoder.layers.{i}.", config.trunk)
    same = [f"embedder.{p}_proj.{kind}" for p in ("q", "k", "v", "out") for kind in ("weight", "bias")]
    same += ["embedder.pos"] + [f"stop_head.{i}.{kind}" for i in (0, 2, 4) for kind in ("weight", "bias")]
    if graft.micro_norm:
        same.append("micro_decoder.norm.weight")
    if graft.features == "fused":
        same += [
            f"micro_decoder.{p}.weight" for p in ("feature_norm", "embedding_norm", "feature_proj", "embedding_proj")
        ]
    if graft.short_list_size is not None:
        same.append("short_list")
    return names | {name: (name,) for name in same}


def _adapter(ours: str, theirs: str) -> dict[str, tuple[str, ...]]:
    """Joined linears share one lora_A (load.py sees to it)."""
    parts: dict[str, tuple[str, ...]] = {}
    for name, joined in JOINED.items():
        parts[f"{ours}{name}_adapter.down.weight"] = (f"{theirs}{joined[0]}.lora_A",)
        parts[f"{ours}{name}_adapter.up.weight"] = tuple(f"{theirs}{part}.lora_B" for part in joined)
    return parts


def _layer(ours: str, theirs: str, trunk: TrunkConfig) -> dict[str, tuple[str, ...]]:
    parts: dict[str, tuple[str, ...]] = {
        "attn_norm.weight": ("input_layernorm.weight",),
        "mlp_norm.weight": ("post_attention_layernorm.weight",),
    }
    has_bias = {"qkv": trunk.qkv_bias, "o": trunk.o_bias, "gate_up": trunk.mlp_bias, "down": trunk.mlp_bias}
    for name, joined in JOINED.items():
        for kind in ("weight", "bias") if has_bias[name] else ("weight",):
            parts[f"{name}_proj.{kind}"] = tuple(f"{part}.{kind}" for part in joined)
    if trunk.qk_norm:
        parts |= {f"{name}_norm.weight": (f"self_attn.{name}_norm.weight",) for name in ("q", "k")}
    return {ours + name: tuple(theirs + part for part in joined) for name, joined in parts.items()}
