"""Shard: one rank's part of a model: its tensors, and the parts of a backend that speak with the other ranks.

lookup ──sum──► layers: o and down ──sum──► head ──gather──► rank 0
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hamburger.model.backend import Heads
from hamburger.model.config import ModelConfig
from hamburger.model.emission.scoring import SCORED_ROWS_AT_ONCE
from hamburger.model.modules.hamburger import HamburgerModel
from hamburger.model.modules.linear import FormedLinear, MakeLinear, Part, give
from hamburger.model.parallel.collectives import Collectives
from hamburger.model.parallel.step_calls import CallSizes, StepCalls
from hamburger.model.parallel.step_shape import shard_trunk

_ROWS = re.compile(r".*\.(self_attn\.[qkv]_proj|mlp\.(gate|up)_proj)\.(weight|bias|lora_B)")
_COLUMNS = re.compile(r".*\.(self_attn\.o_proj|mlp\.down_proj)\.(weight|lora_A)")
_ADDED_ONCE = re.compile(r".*\.(self_attn\.o_proj|mlp\.down_proj)\.bias")
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


def shard_tensor(name: str, tensor: Tensor, rank: int, size: int) -> Tensor:
    """A rank's part of a canonical tensor (tensor_shapes.py)."""
    if name in _VOCABULARY:
        rows = -(-len(tensor) // size)
        part = tensor[rank * rows : (rank + 1) * rows].clone()  # a view would keep the whole tensor
        return part if len(part) == rows else F.pad(part, (0, 0, 0, rows - len(part)))
    if _ROWS.fullmatch(name):
        return tensor.tensor_split(size)[rank]
    if _COLUMNS.fullmatch(name):
        return tensor.tensor_split(size, dim=1)[rank].contiguous()
    if _ADDED_ONCE.fullmatch(name) and rank:  # the sum over the ranks must hold it once
        return torch.zeros_like(tensor)
    return tensor


class Shard:
    """The part of rank `ranks.rank`. trunk_config: the trunk's sizes here. calls: there once `hold` was called.

    Raises ConfigError where heads or width cannot be shared out evenly.
    """

    calls: StepCalls

    def __init__(self, config: ModelConfig, ranks: Collectives) -> None:
        self.ranks, self._config = ranks, config
        self.trunk_config = shard_trunk(config.trunk, ranks.size)
        self._rows = self.trunk_config.vocab_size  # of embedding and head

    def tensor(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of a canonical tensor."""
        return shard_tensor(name, tensor, self.ranks.rank, self.ranks.size)

    def linear(self, make: MakeLinear) -> MakeLinear:
        """Makes linears of which each rank has a part: where that is of the inputs, outputs are summed over ranks."""

        def made(inputs: int, outputs: int, *, bias: bool, part: Part, split: bool = False) -> nn.Module:
            linear = make(inputs, outputs, bias=bias, part=part, split=split)
            return _Summed(linear, self) if split else linear

        return made

    def hold(self, model: HamburgerModel) -> None:
        """The part's weights are in place."""
        self._model = model
        self.calls = StepCalls(self.ranks, self._call_sizes(), model.embed_tokens.weight)

    def lookup(self, token_ids: Tensor) -> Tensor:
        """ids int64 [...] -> embeddings [..., D]. Each rank looks up the ids of its rows; the sum is exact, as all but
        one add 0."""
        row = token_ids - self.ranks.rank * self._rows
        mine = (row >= 0) & (row < self._rows)
        embedded: Tensor = self._model.embed_tokens(row.clamp(0, self._rows - 1))
        return self.calls.all_reduce(embedded.masked_fill(~mine[..., None], 0))

    def heads(self, of_rows: Callable[[Tensor | None], Callable[[Tensor], Tensor]]) -> Heads:
        """of_rows: rows of the model's head weight (int64 [R]; None: all) -> what multiplies by them."""
        first = _GatheredHead(of_rows(None), self, torch.arange(self._config.trunk.vocab_size))
        if not self._model.has_short_list:
            return Heads(first, first)
        return Heads(first, _GatheredHead(of_rows(self._short_rows()), self, self._short_columns()))

    def _call_sizes(self) -> CallSizes:
        graft, trunk = self._config.graft, self._config.trunk
        return CallSizes(
            hidden=trunk.hidden_size,
            layers=trunk.num_layers,
            adapter_rank=self._config.adapter_rank,
            micro_layers=0 if graft is None else graft.micro_layers,
            micro_context=0 if graft is None or graft.features == "fused" else len(graft.feature_layers),
            head=self._rows,
            micro_head=len(self._short_rows()) if self._model.has_short_list else self._rows,
            scored_at_once=SCORED_ROWS_AT_ONCE,
        )

    def _short_rows(self) -> Tensor:
        """Where this rank's ids of the short list are in its rows, filled up to as many as any rank has."""
        owner = self._model.short_list // self._rows
        mine = (self._model.short_list % self._rows)[owner == self.ranks.rank]
        return F.pad(mine, (0, int(owner.bincount().max()) - len(mine)))

    def _short_columns(self) -> Tensor:
        """int64 [K]: where each id of the short list is in what `_short_rows` of all ranks give, side by side."""
        owner = self._model.short_list // self._rows
        before = F.one_hot(owner, self.ranks.size).cumsum(0).gather(1, owner[:, None]).squeeze(1) - 1
        return owner * owner.bincount().max() + before


class _Summed(FormedLinear):
    """A linear of which each rank has some input columns."""

    def __init__(self, linear: nn.Module, shard: Shard) -> None:
        super().__init__()
        self.linear = linear
        self._shard = shard

    def take(self, name: str, tensor: Tensor) -> None:
        give(self.linear, name, tensor)

    def forward(self, x: Tensor) -> Tensor:
        return self._shard.calls.all_reduce(self.linear(x))


class _GatheredHead:
    """A head of which each rank has some rows. On rank 0 it gives `columns` of all ranks' logits side by side; on the
    others, their own."""

    def __init__(self, head: Callable[[Tensor], Tensor], shard: Shard, columns: Tensor) -> None:
        self._head, self._shard = head, shard
        ascending = torch.equal(columns, torch.arange(len(columns), device=columns.device))
        self._number, self._columns = len(columns), None if ascending else columns

    def __call__(self, state: Tensor) -> Tensor:
        calls = self._shard.calls
        gathered = calls.gather(self._head(state))
        if calls.rank:
            return gathered
        if self._columns is None:
            return gathered[..., : self._number]
        return gathered.index_select(-1, self._columns)
