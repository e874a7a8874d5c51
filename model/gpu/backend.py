"""TritonBackend: trunk and micro decoder on the Triton kernels; the rest is TorchBackend's.

The matrices are the model's own linears, whatever their form; everything between them is fused. No step waits for the
device, and decoding steps launch the same kernels whatever their numbers are (CUDA graphs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from hamburger.model.backend import Heads, TorchBackend
from hamburger.model.batch import ForwardBatch, Reads
from hamburger.model.gpu.batch_attention import BatchAttention, norms_of, processors_of, wide_normed
from hamburger.model.gpu.chunk_attention import TritonChunks
from hamburger.model.gpu.layers import add_rms_norm, gated
from hamburger.model.gpu.micro_attention import micro_attention
from hamburger.model.group_cache import GroupCache
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.modules.adapter import ComposedSlots, LayerLora
from hamburger.model.modules.hamburger import HamburgerModel
from hamburger.model.modules.layers import DecoderLayer, RMSNorm
from hamburger.model.modules.trunk import run_layers

# What a layer leaves: the residual stream, and what is still to be added to it (the next norm does so).
_Pair = tuple[Tensor, Tensor | None]


class TritonBackend(TorchBackend):
    """The arguments are those of TorchBackend."""

    def __init__(
        self,
        model: HamburgerModel,
        heads: Heads,
        *,
        static: bool = False,
        quantization: str = "none",
        lookup: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(model, heads, static=static, quantization=quantization, lookup=lookup)
        self._chunks = TritonChunks(self.trunk_config, self.state_dtype)
        self._processors = processors_of(self.device)

    def trunk(self, batch: ForwardBatch, cache: PagedKVCache, reads: Reads) -> tuple[Tensor, list[Tensor]]:
        embedded, model = self.embed(batch), self.model
        attention = BatchAttention(self.trunk_config, batch, cache, model.rotary, self._chunks, self._processors)
        norm, featured = model.trunk.norm, reads.rows[: reads.num_featured]

        def layer(index: int, pair: _Pair) -> _Pair:
            decoder_layer = model.trunk.layers[index]
            assert isinstance(decoder_layer, DecoderLayer)
            attend = partial(attention, index, decoder_layer)
            loras = embedded.loras_of(index)
            return _layer(decoder_layer, *pair, attend, composed=embedded.composed, loras=loras)

        def final(pair: _Pair) -> Tensor:
            x, delta = (None if part is None else part.index_select(0, reads.rows) for part in pair)
            assert x is not None
            return add_rms_norm(x, delta, norm.weight, norm.eps)[1]

        def feature(pair: _Pair) -> Tensor:
            x, delta = pair
            assert delta is not None
            return x.index_select(0, featured) + delta.index_select(0, featured)

        first: _Pair = embedded.x, None
        return run_layers(
            len(model.trunk.layers), first, layer, self._feature_layers, feature, final, reads.num_featured
        )

    def begin_group(self, features: Tensor, rows: Tensor | None = None) -> GroupCache:
        decoder, context = self.model.micro_decoder, features
        if decoder.fused:
            norm = decoder.feature_norm
            context = decoder.feature_proj(add_rms_norm(features, None, norm.weight, norm.eps)[1].flatten(1))
        return GroupCache(context, decoder.empty_kv(features))

    def micro_state(self, tokens: Tensor, cache: GroupCache) -> Tensor:
        embedded = self._lookup(tokens)
        decoder, rotary, rows, new = self.model.micro_decoder, self.model.rotary, len(embedded), 1
        x = embedded
        if decoder.fused:
            norm = decoder.embedding_norm
            normed = add_rms_norm(embedded, None, norm.weight, norm.eps)[1]
            x = cache.of_rows(cache.context) + decoder.embedding_proj(normed)
        elif cache.length == 0:
            x = torch.cat((cache.of_rows(cache.context), embedded.unsqueeze(1)), dim=1)
            new = x.shape[1]
            x = x.flatten(0, 1)
        delta: Tensor | None = None
        for i, layer in enumerate(decoder.layers):
            assert isinstance(layer, DecoderLayer)
            # Only the last position's output is read, so the last layer computes no other.
            only = new > 1 and i == len(decoder.layers) - 1

            def attend(qkv: Tensor, layer: DecoderLayer = layer, kv: Tensor = cache.kv[i], only: bool = only) -> Tensor:
                return micro_attention(
                    qkv, (rotary.cos, rotary.sin), norms_of(layer), self.trunk_config.rms_norm_eps, kv, cache.places,
                    cache.length, new, layer.num_heads, last_only=only,
                )  # fmt: skip

            x, delta = _layer(layer, x, delta, attend, keep=(rows, new) if only else None)
        cache.length += new
        assert delta is not None
        if decoder.norm is None:
            return x + delta
        return add_rms_norm(x, delta, decoder.norm.weight, decoder.norm.eps)[1]


def _layer(
    layer: DecoderLayer,
    x: Tensor,
    delta: Tensor | None,
    attend: Callable[[Tensor], Tensor],
    keep: tuple[int, int] | None = None,
    composed: ComposedSlots | None = None,
    loras: Sequence[LayerLora] = (),
) -> tuple[Tensor, Tensor]:
    """DecoderLayer.forward on x + delta, its own last addition left to whoever reads the result next.

    attend: qkv -> what the heads saw. keep: (rows, positions) where attend gives the last position of each row only.
    """
    x, normed = _entering(layer.attn_norm, x, delta)
    qkv = wide_normed(layer, layer.project("qkv", normed, composed, loras))
    attended = _leaving(layer.attn_out_norm, layer.project("o", attend(qkv), composed, loras))
    if keep is not None:
        x = x.unflatten(0, keep)[:, -1]
    x, normed = _entering(layer.mlp_norm, x, attended)
    if layer.experts is not None:
        return x, _leaving(layer.mlp_out_norm, layer.experts(normed))
    gate_up = layer.project("gate_up", normed, composed, loras)
    return x, _leaving(layer.mlp_out_norm, layer.project("down", gated(gate_up, layer.activation), composed, loras))


def _entering(norm: RMSNorm | None, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
    """x + delta, and what the next linear reads of it."""
    if norm is not None:
        return add_rms_norm(x, delta, norm.weight, norm.eps)
    total = x if delta is None else x + delta
    return total, total


def _leaving(norm: RMSNorm | None, delta: Tensor) -> Tensor:
    """What is added to the residual stream."""
    return delta if norm is None else add_rms_norm(delta, None, norm.weight, norm.eps)[1]
