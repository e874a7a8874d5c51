"""BatchAttention: a batch's attention by Triton kernels: one-slot rows split over their context, chunks in tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from hamburger.model.batch import ForwardBatch
from hamburger.model.config import Rope, TrunkConfig
from hamburger.model.gpu.attention import attend_singles, num_splits
from hamburger.model.gpu.chunks import ChunkAttention, chunks_of, settled_of, window_of
from hamburger.model.gpu.layers import add_rms_norm, rotate_into_cache
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.modules.layers import DecoderLayer
from hamburger.model.modules.rotary import RotaryEmbedding
from hamburger.model.rope_scaling import DynamicRopeScaling

_Angles = tuple[tuple[Tensor, Tensor], Tensor]

_CPU_PROCESSORS = 4  # Triton's interpreter: enough that long contexts are split


class BatchAttention:
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
        self._angles = _angles(config, rotary, batch)
        longest = batch.block_tables.shape[1] * cache.block_size
        self._splits = num_splits(batch.num_single, cache.data[0].shape[3], longest, processors)
        self._settled, self._chunks = settled_of(batch), None
        if chunks := chunks_of(batch):
            self._chunks = chunk_attention.plan(chunks, batch.block_tables, cache.block_size, self._settled)

    def __call__(self, index: int, layer: DecoderLayer, qkv: Tensor) -> Tensor:
        """qkv of layer `index`, [T, (num_heads + 2 * kv_heads) * head_dim] -> [T, num_heads * head_dim]."""
        batch, of_cache = self._batch, self._cache.layer(index)
        tables, at = self._angles[self._config.rope_of(index)]
        q = rotate_into_cache(
            qkv, tables, at, norms_of(layer), self._config.rms_norm_eps, of_cache, batch.write_slots,
            batch.context_slots, batch.num_single, layer.num_heads,
        )  # fmt: skip
        out = torch.empty_like(q)
        window = window_of(self._config, index)
        if n := batch.num_single:
            contexts = batch.context_slots[:n]
            attend_singles(q, of_cache, batch.block_tables, contexts, out, self._splits, window, self._settled)
        if self._chunks is not None:
            self._chunks(q, of_cache, out, window)
        return out.flatten(1)


def norms_of(layer: DecoderLayer) -> tuple[Tensor, Tensor] | None:
    """Weights of the norms of each head of q and k, where the layer has them."""
    if layer.q_norm is None or layer.k_norm is None or layer.has_wide_norms:
        return None
    return layer.q_norm.weight, layer.k_norm.weight


def wide_normed(layer: DecoderLayer, qkv: Tensor) -> Tensor:
    """qkv [T, (num_heads + 2 * kv_heads) * head_dim], q and k normed where their norms are over all heads."""
    if layer.q_norm is None or layer.k_norm is None or not layer.has_wide_norms:
        return qkv
    q, k, v = qkv.split([heads * layer.head_dim for heads in (layer.num_heads, *2 * (layer.num_kv_heads,))], dim=-1)
    q, k = (add_rms_norm(part, None, norm.weight, norm.eps)[1] for part, norm in ((q, layer.q_norm), (k, layer.k_norm)))
    return torch.cat((q, k, v), dim=-1)


def _angles(config: TrunkConfig, rotary: RotaryEmbedding, batch: ForwardBatch) -> dict[Rope, _Angles]:
    """Tables of cos and sin [n, head_dim] and the row that each of the T slots takes, for each way to turn."""
    found: dict[Rope, _Angles] = {"main": ((rotary.cos, rotary.sin), batch.positions)}
    if batch.text_lengths is not None and isinstance(config.rope_scaling, DynamicRopeScaling):
        cos, sin = rotary(batch.positions, batch.text_lengths)
        found["main"] = (cos.squeeze(-2), sin.squeeze(-2)), torch.arange(len(cos), device=cos.device)
    if config.local_rope_theta is not None:
        found["local"] = (rotary.local_cos, rotary.local_sin), batch.positions
    if config.unturned_layers:
        found["none"] = rotary(batch.positions, rope="none"), torch.zeros_like(batch.positions)
    return found


def processors_of(device: torch.device) -> int:
    """Multiprocessors of the device."""
    if device.type != "cuda":
        return _CPU_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
