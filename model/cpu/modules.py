"""Modules of the model on the compiled kernels (library.py), each with the face of the plain one that it replaces.

States are float32 between them, keys and values in the cache's own dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hamburger.model.adapter import Embedded, LowRank
from hamburger.model.batch import ForwardBatch
from hamburger.model.config import GraftConfig, TrunkConfig
from hamburger.model.cpu.graft import NativeEmitter
from hamburger.model.cpu.library import (
    GROUP,
    Kernels,
    LayerParts,
    PackedLayers,
    PackedWeight,
    Slots,
    has_4_bits,
)
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.layers import DecoderLayer
from hamburger.model.rotary import RotaryEmbedding
from hamburger.model.trunk import Trunk


class NativeLinear(nn.Module):
    """y = x W^T + b."""

    def __init__(self, kernels: Kernels, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight [out, in], in a multiple of 32."""
        super().__init__()
        self._kernels = kernels
        self.packed = PackedWeight(kernels, weight, bias, 8)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> float32 [..., out]."""
        rows = x.reshape(-1, x.shape[-1]).float().contiguous()
        return self._kernels.linear(self.packed, rows).view(*x.shape[:-1], self.packed.outputs)


class NativeTrunk(nn.Module):
    """Trunk; bits: of its weights, None takes 4 for those that have no more, else 8."""

    def __init__(self, kernels: Kernels, trunk: Trunk, bits: int | None = None) -> None:
        super().__init__()
        config = trunk.config
        self.config = config
        self._norm = trunk.norm.weight.detach().float().contiguous()
        self._kernels = kernels
        self.layers = pack_layers(kernels, config, trunk.layers, bits, config.sliding_layers)
        self.quantization = "+".join(f"int{bits}" for bits in sorted({w.bits for w in self.layers.weights}))

    def forward(
        self,
        embedded: Embedded,
        batch: ForwardBatch,
        cache: PagedKVCache,
        rotary: RotaryEmbedding,
        feature_layers: tuple[int, ...],
    ) -> tuple[Tensor, list[Tensor]]:
        """As Trunk.forward; the embedded states are overwritten."""
        x = embedded.x.contiguous()  # one-token groups of a batch that had room for more are a view with gaps
        cos, sin = rotary(batch.positions, batch.text_lengths)
        slots = Slots(
            cos.contiguous(),
            sin.contiguous(),
            batch.write_slots,
            batch.block_tables,
            batch.context_slots,
            torch.tensor(batch.query_slots),
            cache.block_size,
        )
        last_layer = self.config.num_layers - 1
        between = [layer for layer in feature_layers if layer != last_layer]
        merged = None if embedded.merged is None else embedded.merged.rows
        read = batch.emit if batch.scored is None else torch.cat((batch.emit, batch.scored.rows))
        hidden, features = self._kernels.layers(
            self.layers, x, slots, cache.data, batch.emit, between, self._norm, read, merged
        )
        if last_layer in feature_layers:
            features.append(hidden[: len(batch.emit)])
        return hidden, features


class NativeStopHead(nn.Module):
    """StopHead."""

    def __init__(self, emitter: NativeEmitter) -> None:
        super().__init__()
        self._emitter = emitter

    def forward(self, state: Tensor) -> Tensor:
        """state float32 [R, D] -> stop logit [R, 1]."""
        return self._emitter.stop_logits(state.contiguous())


class NativeMicroStepDecoder(nn.Module):
    """MicroStepDecoder for serving: one micro-step at a time."""

    def __init__(self, emitter: NativeEmitter, trunk: TrunkConfig, graft: GraftConfig) -> None:
        super().__init__()
        self._emitter = emitter
        self._features = 0 if graft.features == "fused" else len(graft.feature_layers)  # each in a position of its own
        positions = len(graft.feature_layers) + graft.max_group
        self._kv_shape = (positions, 2, trunk.num_kv_heads, trunk.head_dim)
        self._layers = graft.micro_layers

    def start(self, features: Tensor) -> NativeMicroCache:
        """Begin a group for R rows with features [R, F, D]."""
        rows = len(features)
        kv = torch.empty(self._layers, rows, *self._kv_shape)
        return NativeMicroCache(self._emitter.begin(features), torch.arange(rows), list(kv), 0)

    def forward(self, embedding: Tensor, cache: NativeMicroCache, rotary: RotaryEmbedding) -> Tensor:
        """One micro-step: embedding [R, D] of the group's newest token -> state [R, D]; the cache grows."""
        state = self._emitter.state(embedding.contiguous(), cache.context, cache.rows, cache.length, cache.kv)
        cache.length += 1 if cache.length else self._features + 1
        return state


class NativeMicroCache:
    """Keys and values of the groups being emitted: a block of positions for each row that began.

    rows: int64 [R], which blocks the rows still going on have. context: what begin() gave, of all rows that began.
    """

    def __init__(self, context: Tensor, rows: Tensor, kv: list[Tensor], length: int) -> None:
        self.context, self.rows, self.kv, self.length = context, rows, kv, length

    def select(self, rows: Tensor) -> NativeMicroCache:
        """The cache of some rows only (int64 [R'])."""
        return NativeMicroCache(self.context, self.rows.index_select(0, rows), self.kv, self.length)


def pack_layers(
    kernels: Kernels,
    config: TrunkConfig,
    layers: nn.ModuleList,
    bits: int | None,
    sliding: tuple[int, ...] = (),
) -> PackedLayers:
    """The layers' weights for the kernels; they leave `layers` as they are packed, so that memory peaks by one."""

    def pack(linear: nn.Linear) -> PackedWeight:
        return PackedWeight(kernels, linear.weight, linear.bias, bits or (4 if has_4_bits(linear.weight) else 8))

    parts = []
    for i in range(len(layers)):
        layer = layers[i]
        assert isinstance(layer, DecoderLayer)
        adapters = [child for child in layer.children() if isinstance(child, LowRank)]
        parts.append(
            LayerParts(
                attn_norm=layer.attn_norm.weight,
                mlp_norm=layer.mlp_norm.weight,
                q_norm=None if layer.q_norm is None else layer.q_norm.weight,
                k_norm=None if layer.k_norm is None else layer.k_norm.weight,
                window=(config.sliding_window or 0) if i in sliding else 0,
                qkv=pack(layer.qkv_proj),
                o=pack(layer.o_proj),
                gate_up=pack(layer.gate_up_proj),
                down=pack(layer.down_proj),
                adapters=[
                    PackedWeight(kernels, linear.weight, None, 8)
                    for adapter in adapters
                    for linear in (adapter.down, adapter.up)
                ],
            )
        )
        layers[i] = nn.Identity()
    return PackedLayers(config, parts)


def replace_linears(kernels: Kernels, module: nn.Module) -> None:
    """Every nn.Linear below `module` whose width the kernels take becomes a NativeLinear, the others float32."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and child.in_features % GROUP == 0:
                setattr(parent, name, NativeLinear(kernels, child.weight, child.bias))
