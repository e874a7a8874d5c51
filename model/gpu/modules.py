"""Trunk and micro-step decoder on the Triton kernels (triton_*.py), each with the face of the plain one it replaces.

The matrices stay the plain modules' own linears, whatever they are by then; everything between them is fused. No step
waits for the device, and decoding steps launch the same kernels whatever their numbers are (CUDA graphs).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from hamburger.model.adapter import Embedded, MergedSlots
from hamburger.model.batch import ForwardBatch
from hamburger.model.config import DynamicRopeScaling, GraftConfig, TrunkConfig
from hamburger.model.gpu.attention import attend_singles, num_splits
from hamburger.model.gpu.chunks import ChunkAttention, chunks_of, window_of
from hamburger.model.gpu.layers import add_rms_norm, gated, rotate_into_cache
from hamburger.model.gpu.micro_attention import micro_attention
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.layers import DecoderLayer
from hamburger.model.micro_decoder import MicroStepDecoder
from hamburger.model.rotary import RotaryEmbedding
from hamburger.model.trunk import Trunk

_CPU_PROCESSORS = 4  # Triton's interpreter: enough that long contexts are split


class FusedAttention:
    """Attention of one ForwardBatch's slots over the cache, and the writing of their keys and values.

    Made once a step for all layers. Of the batch it reads shapes, device tensors and, where there are chunks, their
    numbers on the host. One-slot rows whose context_slots are 0 are padding: they write nothing and get zeros.
    """

    def __init__(
        self,
        config: TrunkConfig,
        batch: ForwardBatch,
        cache: PagedKVCache,
        rotary: RotaryEmbedding,
        chunk_attention: ChunkAttention,
        processors: int,
    ) -> None:
        """processors: multiprocessors of the device, which long contexts are split for."""
        self._config, self._batch, self._cache = config, batch, cache
        self._tables, self._at = _angles(config, rotary, batch)
        longest = batch.block_tables.shape[1] * cache.block_size
        self._splits = num_splits(batch.num_single, cache.data[0].shape[3], longest, processors)
        chunks = chunks_of(batch)
        self._chunks = chunk_attention.plan(chunks, batch.block_tables, cache.block_size) if chunks else None

    def __call__(self, index: int, layer: DecoderLayer, qkv: Tensor) -> Tensor:
        """qkv of layer `index`, [T, (num_heads + 2 * kv_heads) * head_dim] -> [T, num_heads * head_dim]."""
        batch, data = self._batch, self._cache.data[index]
        q = rotate_into_cache(
            qkv, self._tables, self._at, _norms(layer), self._config.rms_norm_eps, data, batch.write_slots,
            batch.context_slots, batch.num_single, layer.num_heads,
        )  # fmt: skip
        out = torch.empty_like(q)
        window = window_of(self._config, index)
        if n := batch.num_single:
            attend_singles(q, data, batch.block_tables, batch.context_slots[:n], out, self._splits, window)
        if self._chunks is not None:
            self._chunks(q, data, out, window)
        return out.flatten(1)


class FusedTrunk(nn.Module):
    """Trunk. chunk_attention: what runs the attention of prompts' chunks."""

    def __init__(self, plain: Trunk, chunk_attention: ChunkAttention) -> None:
        super().__init__()
        self._chunk_attention = chunk_attention
        self.config, self.layers, self.norm = plain.config, plain.layers, plain.norm

    def forward(
        self,
        embedded: Embedded,
        batch: ForwardBatch,
        cache: PagedKVCache,
        rotary: RotaryEmbedding,
        feature_layers: tuple[int, ...],
    ) -> tuple[Tensor, list[Tensor]]:
        """As Trunk.forward."""
        x, merged = embedded.x, embedded.merged
        chunks, processors = self._chunk_attention, _processors(x.device)
        attention = FusedAttention(self.config, batch, cache, rotary, chunks, processors)
        last_layer = len(self.layers) - 1
        features: list[Tensor] = []
        delta: Tensor | None = None
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            x, delta = _layer(layer, x, delta, partial(attention, i, layer), merged=merged)
            if i in feature_layers and i != last_layer:
                features.append(x.index_select(0, batch.emit) + delta.index_select(0, batch.emit))
        read = batch.emit if batch.scored is None else torch.cat((batch.emit, batch.scored.rows))
        assert delta is not None
        _, hidden = add_rms_norm(x.index_select(0, read), delta.index_select(0, read), self.norm.weight, self.norm.eps)
        if last_layer in feature_layers:
            features.append(hidden[: len(batch.emit)])
        return hidden, features


class FusedMicroStepDecoder(nn.Module):
    """MicroStepDecoder for serving: one micro-step at a time."""

    def __init__(self, plain: MicroStepDecoder, trunk: TrunkConfig, graft: GraftConfig) -> None:
        super().__init__()
        self._config = trunk
        self._max_group = graft.max_group
        self.layers, self.norm, self.fused = plain.layers, plain.norm, plain.fused
        if self.fused:
            self.feature_norm, self.embedding_norm = plain.feature_norm, plain.embedding_norm
            self.feature_proj, self.embedding_proj = plain.feature_proj, plain.embedding_proj

    def start(self, features: Tensor) -> FusedMicroCache:
        """Begin a group for R rows with features [R, F, D]."""
        return self.start_static(features, self._max_group)

    def start_static(self, features: Tensor, width: int) -> FusedMicroCache:
        """The same for groups of up to `width` tokens, in a cache of the one size that the kernels are compiled for."""
        context = features
        if self.fused:
            _, normed = add_rms_norm(features, None, self.feature_norm.weight, self.feature_norm.eps)
            context = self.feature_proj(normed.flatten(1))
        first = self.layers[0]
        assert isinstance(first, DecoderLayer)
        positions = self._max_group - 1 if self.fused else features.shape[1] + self._max_group - 1
        kv = features.new_empty(len(self.layers), len(features), positions, 2, first.num_kv_heads, first.head_dim)
        return FusedMicroCache(context, torch.arange(len(features), device=features.device), kv, 0)

    def forward(self, embedding: Tensor, cache: FusedMicroCache, rotary: RotaryEmbedding) -> Tensor:
        """One micro-step: embedding [R, D] of the group's newest token -> state [R, D]; the cache grows."""
        rows, new = len(embedding), 1
        x = embedding
        if self.fused:
            _, normed = add_rms_norm(embedding, None, self.embedding_norm.weight, self.embedding_norm.eps)
            x = cache.context + self.embedding_proj(normed)
        elif cache.length == 0:
            x = torch.cat((cache.context, embedding.unsqueeze(1)), dim=1)
            new = x.shape[1]
            x = x.flatten(0, 1)
        delta: Tensor | None = None
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            # Only the last position's output is read, so the last layer computes no other.
            only = new > 1 and i == len(self.layers) - 1

            def attend(qkv: Tensor, layer: DecoderLayer = layer, kv: Tensor = cache.kv[i], only: bool = only) -> Tensor:
                return micro_attention(
                    qkv, (rotary.cos, rotary.sin), _norms(layer), self._config.rms_norm_eps, kv, cache.rows,
                    cache.length, new, layer.num_heads, last_only=only,
                )  # fmt: skip

            x, delta = _layer(layer, x, delta, attend, keep=(rows, new) if only else None)
        cache.length += new
        assert delta is not None
        if self.norm is None:
            return x + delta
        return add_rms_norm(x, delta, self.norm.weight, self.norm.eps)[1]


class FusedMicroCache:
    """Keys and values of the groups being emitted, each position at its place from the beginning.

    kv: [layers, places, positions, 2, kv_heads, head_dim]. rows: int64 [R], the places of the rows still going on.
    context: [R, ...] of these rows. length: positions held so far.
    """

    def __init__(self, context: Tensor, rows: Tensor, kv: Tensor, length: int) -> None:
        self.context, self.rows, self.kv, self.length = context, rows, kv, length

    def select(self, rows: Tensor) -> FusedMicroCache:
        """The cache of some rows only (int64 [R'])."""
        return FusedMicroCache(
            self.context.index_select(0, rows), self.rows.index_select(0, rows), self.kv, self.length
        )


def _layer(
    layer: DecoderLayer,
    x: Tensor,
    delta: Tensor | None,
    attend: Callable[[Tensor], Tensor],
    keep: tuple[int, int] | None = None,
    merged: MergedSlots | None = None,
) -> tuple[Tensor, Tensor]:
    """DecoderLayer.forward on x + delta, its own last addition left to whoever reads the result next.

    attend: qkv -> what the heads saw. keep: (rows, positions) where attend gives the last position of each row only.
    """
    x, normed = add_rms_norm(x, delta, layer.attn_norm.weight, layer.attn_norm.eps)
    attended = layer.project("o", attend(layer.project("qkv", normed, merged)), merged)
    if keep is not None:
        x = x.unflatten(0, keep)[:, -1]
    x, normed = add_rms_norm(x, attended, layer.mlp_norm.weight, layer.mlp_norm.eps)
    return x, layer.project("down", gated(layer.project("gate_up", normed, merged)), merged)


def _norms(layer: DecoderLayer) -> tuple[Tensor, Tensor] | None:
    if layer.q_norm is None or layer.k_norm is None:
        return None
    return layer.q_norm.weight, layer.k_norm.weight


def _angles(config: TrunkConfig, rotary: RotaryEmbedding, batch: ForwardBatch) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Tables of cos and sin [n, head_dim] and the row that each of the T slots takes."""
    if batch.text_lengths is None or not isinstance(config.rope_scaling, DynamicRopeScaling):
        return (rotary.cos, rotary.sin), batch.positions
    cos, sin = rotary(batch.positions, batch.text_lengths)
    return (cos.squeeze(-2), sin.squeeze(-2)), torch.arange(len(cos), device=cos.device)


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _CPU_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
