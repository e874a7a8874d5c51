"""The trunk: one pass over a batch's slots, returning the states that the graft reads.

`run_layers` is the one loop over a trunk's layers, for all that loop in Python: Trunk, gpu/ and training/."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from torch import Tensor, nn

from hamburger.model.batch import ForwardBatch, Reads
from hamburger.model.config import TrunkConfig
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.modules.adapter import Embedded
from hamburger.model.modules.attention import PagedAttention, StaticAttention
from hamburger.model.modules.layers import DecoderLayer, RMSNorm
from hamburger.model.modules.linear import MakeLinear, plain_linear
from hamburger.model.modules.rotary import RotaryEmbedding

_State = TypeVar("_State")


def run_layers(
    num_layers: int,
    state: _State,
    layer: Callable[[int, _State], _State],
    feature_layers: tuple[int, ...],
    feature_of: Callable[[_State], Tensor],
    final_of: Callable[[_State], Tensor],
    num_featured: int | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Pass `state` through the layers; what a state is, is theirs who call.

    layer: of an index and the state before it, the state after it. feature_of: what is kept of the state after each of
    feature_layers. final_of: the final normed states [N, D]. A feature layer that is the last layer means these: the
    first num_featured of them, or all.
    Returns the final normed states and the features.
    """
    features: list[Tensor] = []
    last = num_layers - 1
    for index in range(num_layers):
        state = layer(index, state)
        if index in feature_layers and index != last:
            features.append(feature_of(state))
    final = final_of(state)
    if last in feature_layers:
        features.append(final[:num_featured])
    return final, features


class Trunk(nn.Module):
    """Decoder layers and final norm. Embedding and head belong to HamburgerModel, which shares them."""

    def __init__(self, config: TrunkConfig, adapter_rank: int = 0, linear: MakeLinear = plain_linear) -> None:
        """adapter_rank: of the adapters that slots of several tokens pass."""
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(
            DecoderLayer(config, adapter_rank, linear, experts=config.experts_of(i)) for i in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        embedded: Embedded,
        batch: ForwardBatch,
        cache: PagedKVCache,
        rotary: RotaryEmbedding,
        feature_layers: tuple[int, ...],
        reads: Reads,
    ) -> tuple[Tensor, list[Tensor]]:
        """The batch's T slots -> the final normed states [N, D] of the slots that `reads` names, and after each of
        feature_layers the states of the first reads.num_featured of them, [M, D] each."""
        angles = rotary.of_layers(batch.positions, batch.text_lengths)
        config, featured = self.config, reads.rows[: reads.num_featured]
        form = PagedAttention if batch.context_slots_host is not None else StaticAttention
        attention = form(batch, cache, embedded.x.dtype, config.sliding_window, config.sliding_layers)

        def layer(index: int, x: Tensor) -> Tensor:
            attend, loras = partial(attention, index), embedded.loras_of(index)
            out: Tensor = self.layers[index](x, *angles[index], attend, composed=embedded.composed, loras=loras)
            return out

        return run_layers(
            len(self.layers),
            embedded.x,
            layer,
            feature_layers,
            lambda x: x.index_select(0, featured),
            lambda x: self.final(x.index_select(0, reads.rows)),
            reads.num_featured,
        )

    def final(self, x: Tensor) -> Tensor:
        """The residual stream [..., D] after the last layer -> the final normed states."""
        normed: Tensor = self.norm(x)
        return normed
