"""Readers: a trunk over whole texts, one slot a token: by torch's modules, or by the compiled kernels that serve it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hamburger.model.batch import ForwardBatch, Reads, empty_sampling
from hamburger.model.cpu.graft import CpuEmbedding
from hamburger.model.cpu.library import Kernels
from hamburger.model.cpu.trunk import CpuTrunk
from hamburger.model.cpu.weights import PackedWeight
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.modules.adapter import Embedded
from hamburger.model.modules.hamburger import HamburgerModel
from hamburger.training.forward.network import Slots, trunk_states

_BLOCK = 32  # slots


@dataclass(frozen=True, slots=True)
class Text:
    """token_ids: what is fed, at least one. wanted: the first of them whose state is asked for, and all behind it."""

    token_ids: Sequence[int]
    wanted: int


class Reader(Protocol):
    """Reads texts whole. `slots` says how many slots of a pass a text of so many tokens takes."""

    device: torch.device

    def slots(self, num_tokens: int) -> int: ...

    def states(self, texts: Sequence[Text], layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The N wanted tokens' final normed states [N, D], text by text, and those of the feature layers [N, F, D]."""

    def logits(self, states: Tensor) -> Tensor:
        """States [N, D] -> [N, V]."""


class PlainReader:
    """The modules of model/modules, on any device."""

    def __init__(self, model: HamburgerModel) -> None:
        self._model = model
        self.device = model.embed_tokens.weight.device

    def slots(self, num_tokens: int) -> int:
        return num_tokens

    def states(self, texts: Sequence[Text], layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        flat, positions, at = _laid_out(texts)
        ones = torch.ones(len(flat), dtype=torch.int64)
        slots = Slots(flat[:, None], ones, positions, [len(text.token_ids) for text in texts]).to(self.device)
        hidden, features = trunk_states(self._model, slots, layers)
        at = at.to(self.device)
        return hidden[at], features[at]

    def logits(self, states: Tensor) -> Tensor:
        return F.linear(states, self._model.head_weight)


class KernelReader:
    """The compiled kernels' trunk and head, on a KV cache of its own: the numbers of what is served on this CPU."""

    def __init__(self, model: HamburgerModel, kernels: Kernels, cache_dtype: torch.dtype) -> None:
        """model gives its layers up; its rotary tables are float32, its linears plain."""
        self.device = torch.device("cpu")
        self._config, self._cache_dtype = model.trunk_config, cache_dtype
        self._head = PackedWeight(kernels, model.head_weight.detach(), None, 8)
        tied, table = self._config.tie_word_embeddings, model.embed_tokens.weight.detach()
        self._embedding = CpuEmbedding(kernels, self._head if tied else table, None)
        self._trunk = CpuTrunk(kernels, model.trunk, None, (), model.rotary)
        self._cache: PagedKVCache | None = None

    def slots(self, num_tokens: int) -> int:
        return _blocks(num_tokens) * _BLOCK

    def states(self, texts: Sequence[Text], layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        flat, positions, at = _laid_out(texts)
        lengths = [len(text.token_ids) for text in texts]
        sizes = [_blocks(length) for length in lengths]
        starts = torch.tensor([0, *sizes]).cumsum(0)[:-1]
        x = self._embedding.lookup(flat)
        contexts, last = torch.tensor(lengths), torch.tensor(lengths).cumsum(0) - 1
        batch = ForwardBatch(
            token_ids=flat[:, None],
            group_sizes=torch.ones_like(flat),
            max_group_size=1,
            positions=positions,
            write_slots=positions + (starts * _BLOCK).repeat_interleave(contexts),
            block_tables=starts[:, None] + torch.arange(max(sizes)).clamp(max=torch.tensor(sizes)[:, None] - 1),
            context_slots=contexts,
            query_slots=lengths,
            context_slots_host=lengths,
            num_single=0,  # none is told apart
            emit=last,
            confidence=torch.ones(len(texts)),
            group_limits=torch.ones_like(last),
            max_group_limit=1,
            sampling=empty_sampling(len(texts), self.device),
        )
        self._trunk.keep(layers)
        hidden, features = self._trunk(Embedded(x), batch, self._room(sum(sizes)), Reads(at, len(at)))
        return hidden, torch.stack(features, dim=1) if features else hidden.new_empty(len(hidden), 0, hidden.shape[1])

    def logits(self, states: Tensor) -> Tensor:
        return self._head.multiply(states)

    def _room(self, num_blocks: int) -> PagedKVCache:
        if self._cache is None or self._cache.scratch_block < num_blocks:
            self._cache = PagedKVCache(self._config, num_blocks, _BLOCK, self._cache_dtype, self.device)
        return self._cache


def _blocks(num_tokens: int) -> int:
    return -(-num_tokens // _BLOCK)


def _laid_out(texts: Sequence[Text]) -> tuple[Tensor, Tensor, Tensor]:
    """int64: the tokens of all texts, one after the other, each one's place in its text, and where the wanted lie."""
    flat = torch.tensor([token for text in texts for token in text.token_ids])
    positions = torch.cat([torch.arange(len(text.token_ids)) for text in texts])
    wanted = torch.cat([torch.arange(len(text.token_ids)) >= text.wanted for text in texts])
    return flat, positions, wanted.nonzero()[:, 0]
