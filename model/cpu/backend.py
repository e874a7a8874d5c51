"""CpuBackend: a model on the compiled kernels.

States are float32, keys and values of the cache's own dtype. The kernels' parts compute what their one call does, to
the bit: rows may take either way.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hamburger.model.backend import spread
from hamburger.model.batch import ForwardBatch, Reads
from hamburger.model.cpu.graft import CpuEmbedding, CpuGraft, MicroParts, PackedHead, merger_fits
from hamburger.model.cpu.library import Kernels
from hamburger.model.cpu.trunk import CpuTrunk
from hamburger.model.cpu.weights import pack_layers
from hamburger.model.group_cache import GroupCache
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.modules.adapter import ComposedSlots, Embedded
from hamburger.model.modules.hamburger import HamburgerModel, calibrated


class CpuBackend:
    """A Backend (model/backend.py)."""

    static = False

    def __init__(
        self,
        model: HamburgerModel,
        kernels: Kernels,
        bits: int | None,
        draft_bits: int = 8,
        fill: Callable[[int], None] | None = None,
    ) -> None:
        """model gives its layers up, whose weights the kernels have in a form of their own, so that memory peaks by one
        layer. Its rotary tables are float32. bits: of the trunk's weights; None takes 4 for those that have no more.
        draft_bits: of the micro decoder's. fill: gives a layer of the trunk its weights, where they are not there
        yet."""
        self.config = config = model.config
        self.trunk_config, self.state_dtype = model.trunk_config, torch.float32
        self.device, graft, weight = model.embed_tokens.weight.device, config.graft, model.head_weight.detach()
        layers = () if graft is None else graft.feature_layers
        self._trunk = CpuTrunk(kernels, model.trunk, bits, layers, model.rotary, fill)
        self.quantization, self.loras = self._trunk.quantization, self._trunk.loras
        self._head = head = PackedHead(kernels, weight)
        tied = self.trunk_config.tie_word_embeddings
        # A copy: it may lie in a mapped file, which would stay in memory as a whole for it.
        table = head.packed if tied else model.embed_tokens.weight.detach().clone()
        # The plain embedder serves where the kernels do not take its widths; else they have its weights already.
        self._embedder = None if graft is None or merger_fits(model.embedder) else model.embedder.float()
        merger = model.embedder if graft is not None and self._embedder is None else None
        self._embedding = CpuEmbedding(kernels, table, merger)
        self.short_list: Tensor | None = None
        self._micro_head, micro = head, None
        if graft is not None:
            if model.has_short_list:
                self.short_list = model.short_list.sort().values  # of equal logits the first id wins
                self._micro_head = PackedHead(kernels, weight[self.short_list])
            packed = pack_layers(kernels, self.trunk_config, model.micro_decoder.layers, draft_bits, of_trunk=False)
            micro = MicroParts(
                model.micro_decoder, model.stop_head, packed, self._micro_head, self.short_list, self._embedding,
                model.rotary, draft_bits,
            )  # fmt: skip
        self.graft = CpuGraft(kernels, config, head, micro)

    def trunk(self, batch: ForwardBatch, cache: PagedKVCache, reads: Reads) -> tuple[Tensor, list[Tensor]]:
        return self._trunk(self.embed(batch), batch, cache, reads)

    def embed(self, batch: ForwardBatch) -> Embedded:
        """What the trunk reads of the batch's T slots."""
        if self._embedder is None:
            x, rows = self._embedding(batch.token_ids.contiguous(), batch.group_sizes)
        else:
            rows = (batch.group_sizes > 1).nonzero().squeeze(-1)
            x = self._embedder(self._embedding.lookup(batch.token_ids), batch.group_sizes, rows)
        are_adapted = self.config.adapter_rank and rows is not None and len(rows)
        return Embedded(x, ComposedSlots(rows, None) if are_adapted else None)

    def head(self, states: Tensor) -> Tensor:
        return self._head.packed.multiply(states)

    def stop_logits(self, states: Tensor, index: int) -> Tensor:
        if self.config.graft is None:
            return torch.full((len(states),), float("inf"))
        return calibrated(self.graft.stop_logits(states.contiguous()).squeeze(-1), self.config, index)

    def begin_group(self, features: Tensor, rows: Tensor | None = None) -> GroupCache:
        return self.graft.begin(features)

    def micro_state(self, tokens: Tensor, cache: GroupCache) -> Tensor:
        return self.graft.micro_state(self._embedding.lookup(tokens), cache)

    def micro_step(self, tokens: Tensor, cache: GroupCache) -> tuple[Tensor, Tensor]:
        state = self.micro_state(tokens, cache)
        logits = self._micro_head.packed.multiply(state)
        return state, spread(logits, self.short_list, self.config.trunk.vocab_size)
