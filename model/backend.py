"""Backend: the arithmetic of one model, whatever computes it. It knows slots and states, not what becomes of them.

    embed ─► trunk ─► head, stop head                      once a macro-step
                └──► begin_group ─► micro_step ─► ...      once for each further token of a group

`TorchBackend` is the plain reference. cpu/, gpu/ and parallel/ hold the others; assemble.py alone knows them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hamburger.model.batch import ForwardBatch, Reads
from hamburger.model.config import ModelConfig, TrunkConfig
from hamburger.model.group_cache import GroupCache
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.modules.adapter import ComposedSlots, Embedded, LoraPair, PassedLora
from hamburger.model.modules.hamburger import HamburgerModel
from hamburger.model.modules.lora import Loras, LoraWeights
from hamburger.model.tensor_shapes import JOINED

Head = Callable[[Tensor], Tensor]  # states [..., D] -> logits [..., rows of its weight]


class Backend(Protocol):
    """What computes a model's numbers.

    trunk_config: the trunk's sizes in this process, where others may hold the rest. state_dtype: of states between
    calls. quantization: what the trunk's weights are. short_list: int64 [K], different ids, which micro-steps choose
    from; None for all. static: shapes never depend on a step's numbers, so nothing waits for the device. loras: the
    adapters that batches may name; None for none.
    """

    config: ModelConfig
    trunk_config: TrunkConfig
    device: torch.device
    state_dtype: torch.dtype
    quantization: str
    short_list: Tensor | None
    static: bool

    @property
    def loras(self) -> Loras | None: ...

    def trunk(self, batch: ForwardBatch, cache: PagedKVCache, reads: Reads) -> tuple[Tensor, list[Tensor]]:
        """Embed the batch's T slots, pass the layers, write the slots' keys and values.

        Returns the final normed states of reads.rows [N, D], and after each of the graft's feature layers the states
        of the first reads.num_featured of them, [M, D] each.
        """

    def head(self, states: Tensor) -> Tensor:
        """states [N, D] of the trunk -> logits [N, V], of the state dtype."""

    def stop_logits(self, states: Tensor, index: int) -> Tensor:
        """states [R, D] that chose token `index` of their groups -> calibrated stop logits, float32 [R]; infinite for
        a plain base, which always stops."""

    def begin_group(self, features: Tensor, rows: Tensor | None = None) -> GroupCache:
        """Groups of R rows with features [R, F, D] go on after their first token.

        rows: int64 [R], which of the batch's emitting rows these are; None: all of them.
        """

    def micro_step(self, tokens: Tensor, cache: GroupCache) -> tuple[Tensor, Tensor]:
        """tokens int64 [R], the newest of the cache's rows -> states [R, D] and logits [R, V], which are -inf off the
        short list; the cache grows."""


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """What gives the logits: `first` of the trunk's states over V ids, `micro` of micro-steps' over the short list, if
    there is one, else over V ids."""

    first: Head
    micro: Head


class TorchLoras:
    """Loras whose pairs are plain tensors of one dtype, on one device."""

    def __init__(self, trunk: TrunkConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._trunk, self._dtype, self._device = trunk, dtype, device
        self._layers: dict[int, list[dict[str, LoraPair]]] = {}

    def load(self, number: int, weights: LoraWeights) -> None:
        self._layers[number] = [
            {
                name: LoraPair(*(tensor.to(self._device, self._dtype) for tensor in pair))
                for name in JOINED
                if (pair := weights.joined(self._trunk, layer, name)) is not None
            }
            for layer in range(self._trunk.num_layers)
        ]

    def unload(self, number: int) -> None:
        del self._layers[number]

    def passed(self, batch: ForwardBatch) -> tuple[PassedLora, ...]:
        return tuple(PassedLora(slots.rows, self._layers[slots.number]) for slots in batch.loras)


class TorchBackend:
    """Plain torch on the modules of a HamburgerModel."""

    def __init__(
        self,
        model: HamburgerModel,
        heads: Heads,
        *,
        static: bool = False,
        quantization: str = "none",
        lookup: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """static: shapes never depend on a step's numbers, so nothing waits for the device (emission/static.py).

        lookup: ids int64 [...] -> embeddings [..., D], in another way than by the model's own table.
        """
        self.model, self.config, self.trunk_config = model, model.config, model.trunk_config
        self.heads, self.static, self.quantization = heads, static, quantization
        weight = model.embed_tokens.weight
        self.device, self.state_dtype = weight.device, weight.dtype
        self.short_list = model.short_list if model.has_short_list else None
        self._lookup = lookup or model.embed_tokens
        self._feature_layers = model.config.graft.feature_layers if model.config.graft else ()
        self.loras = TorchLoras(self.trunk_config, weight.dtype, weight.device)

    def embed(self, batch: ForwardBatch) -> Embedded:
        """What the trunk reads of the batch's T slots."""
        model, sizes, loras = self.model, batch.group_sizes, self.loras.passed(batch)
        if batch.max_group_size == 1:
            return Embedded(self._lookup(batch.token_ids[:, 0]), loras=loras)
        rows = None if self.static else (sizes > 1).nonzero().squeeze(-1)
        x = model.embedder(self._lookup(batch.token_ids), sizes, rows)
        if not self.config.adapter_rank:
            return Embedded(x, loras=loras)
        return Embedded(x, ComposedSlots(rows, (sizes > 1)[:, None] if rows is None else None), loras)

    def trunk(self, batch: ForwardBatch, cache: PagedKVCache, reads: Reads) -> tuple[Tensor, list[Tensor]]:
        model = self.model
        states: tuple[Tensor, list[Tensor]] = model.trunk(
            self.embed(batch), batch, cache, model.rotary, self._feature_layers, reads
        )
        return states

    def head(self, states: Tensor) -> Tensor:
        return self.heads.first(states)

    def stop_logits(self, states: Tensor, index: int) -> Tensor:
        return self.model.stop_logits(states, index)

    def begin_group(self, features: Tensor, rows: Tensor | None = None) -> GroupCache:
        return self.model.micro_decoder.start(features)

    def micro_step(self, tokens: Tensor, cache: GroupCache) -> tuple[Tensor, Tensor]:
        state = self.micro_state(tokens, cache)
        return state, spread(self.heads.micro(state), self.short_list, self.config.trunk.vocab_size)

    def micro_state(self, tokens: Tensor, cache: GroupCache) -> Tensor:
        """micro_step's states [R, D] alone."""
        state: Tensor = self.model.micro_decoder(self._lookup(tokens), cache, self.model.rotary)
        return state


def spread(logits: Tensor, short_list: Tensor | None, vocab_size: int) -> Tensor:
    """logits [R, K] of the short list's ids -> [R, V], -inf elsewhere; unchanged where there is no list."""
    if short_list is None:
        return logits
    return logits.new_full((len(logits), vocab_size), float("-inf")).index_copy_(1, short_list, logits)
