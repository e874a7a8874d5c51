"""The trunk: one pass over a batch's slots, returning the states that the graft reads."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from hamburger.model.adapter import Embedded
from hamburger.model.attention import PagedAttention
from hamburger.model.batch import ForwardBatch
from hamburger.model.config import TrunkConfig
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.layers import DecoderLayer, RMSNorm
from hamburger.model.rotary import RotaryEmbedding
from hamburger.model.static_attention import StaticAttention


class Trunk(nn.Module):
    """Decoder layers and final norm. Embedding and head belong to HamburgerModel, which shares them."""

    def __init__(self, config: TrunkConfig, merge_rank: int = 0) -> None:
        """merge_rank: of the adapters that slots of several tokens pass."""
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(DecoderLayer(config, merge_rank) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        embedded: Embedded,
        batch: ForwardBatch,
        cache: PagedKVCache,
        rotary: RotaryEmbedding,
        feature_layers: tuple[int, ...],
    ) -> tuple[Tensor, list[Tensor]]:
        """The batch's T slots -> final normed states [M + S, D], and the states after feature_layers, each [M, D].

        The states are those of the M emitting rows, then of the S scored slots (none without batch.scored). A feature
        layer that is the last layer means the final normed state.
        """
        cos, sin = rotary(batch.positions, batch.text_lengths)
        config = self.config
        form = PagedAttention if batch.context_slots_host is not None else StaticAttention
        attention = form(batch, cache, embedded.x.dtype, config.sliding_window, config.sliding_layers)
        features: list[Tensor] = []
        x, merged = embedded.x, embedded.merged
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, partial(attention, i), merged=merged)
            if i in feature_layers and i != len(self.layers) - 1:
                features.append(x.index_select(0, batch.emit))
        read = batch.emit if batch.scored is None else torch.cat((batch.emit, batch.scored.rows))
        hidden: Tensor = self.norm(x.index_select(0, read))
        if len(self.layers) - 1 in feature_layers:
            features.append(hidden[: len(batch.emit)])
        return hidden, features
