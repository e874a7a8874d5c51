"""ParallelModel: a HamburgerModel of which each rank holds a part (shards.py), for tensor parallelism.

Rank 0 alone decides: it gathers the logits, samples, masks by grammars and reads the stop head, and tells the others
which rows go on with which tokens, one small broadcast a micro-step. So nothing depends on all ranks computing the
same bits, and neither sampling state nor grammars leave rank 0.

    rank 0    shape ─► batch ─► trunk ─► gather, choose ─► rows and tokens ─► micro-step ─► ... ─► nobody goes on
    others        shape ─► batch ─► trunk ─► gather ────────► rows and tokens ─► micro-step ─► ... ─► next shape
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hamburger.model.batch import ForwardBatch, ScoredSlots, StepOutput, empty_sampling
from hamburger.model.config import ModelConfig
from hamburger.model.execution import Execution
from hamburger.model.group import Group
from hamburger.model.hamburger import SCORED_ROWS_AT_ONCE, HamburgerModel
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.layers import DecoderLayer
from hamburger.model.shards import StepShape, shard_trunk

_NOT_ON = -1
_ROWS = re.compile(r".*\.(self_attn\.[qkv]_proj|mlp\.(gate|up)_proj)\.(weight|bias|lora_B)")
_COLUMNS = re.compile(r".*\.(self_attn\.o_proj|mlp\.down_proj)\.(weight|lora_A)")
_ADDED_ONCE = re.compile(r".*\.(self_attn\.o_proj|mlp\.down_proj)\.bias")
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


def shard_tensor(name: str, tensor: Tensor, rank: int, size: int) -> Tensor:
    """A rank's part of a canonical tensor (config.tensor_shapes)."""
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


class ParallelModel(HamburgerModel):
    """The part of rank `group.rank`. Rank 0 calls `lead` once, then `step`; the others `follow` each step."""

    _announce: Callable[[StepShape], None]

    def __init__(self, config: ModelConfig, group: Group) -> None:
        held = shard_trunk(config.trunk, group.size)
        super().__init__(config, held)
        self.group = group
        self.rows_held = held.vocab_size  # of embedding and head
        self._num_emitting = 0  # in the step that runs

    def prepare(self, max_positions: int, how: Execution) -> None:
        """As HamburgerModel's, without kernels and weights of 8 bits. Ended rows are left out, not masked."""
        if how.kernels is not None or how.masked or how.eight_bits is not None:
            raise ValueError("a split model has no packed weights, and emits in no static shapes.")
        super().prepare(max_positions, replace(how, masked=False))
        self.head = _GatheredHead(self.head, self.group, torch.arange(self.config.trunk.vocab_size))
        graft = self.config.graft
        if graft is not None and graft.short_list_size is not None:
            self.short_head = _GatheredHead(self.short_head, self.group, self._short_columns())
        for layer in [module for module in self.modules() if isinstance(module, DecoderLayer)]:
            layer.add_module("o_proj", _Reduced(layer.o_proj, self.group))
            layer.add_module("down_proj", _Reduced(layer.down_proj, self.group))
            for adapter in (layer._modules.get("o_adapter"), layer._modules.get("down_adapter")):
                if adapter is not None:
                    adapter.add_module("down", _Reduced(adapter.get_submodule("down"), self.group))

    def lead(self, announce: Callable[[StepShape], None]) -> None:
        """Rank 0: `announce` tells the other ranks' hosts of each step; they must `follow` then."""
        self._announce = announce

    @torch.inference_mode()
    def step(self, batch: ForwardBatch, cache: PagedKVCache) -> StepOutput:
        shape = _shape_of(batch)
        self._announce(shape)
        self.group.broadcast(torch.cat([part.flatten() for part in _parts(batch)]))
        return super().step(batch, cache)

    def emit_narrowing(
        self, hidden: Tensor, features: list[Tensor], batch: ForwardBatch, only: Tensor | None = None
    ) -> StepOutput:
        self._num_emitting = len(hidden)
        output = super().emit_narrowing(hidden, features, batch, only)
        if len(hidden) and batch.max_group_limit > 1:
            self.group.broadcast(batch.emit.new_full((len(hidden),), _NOT_ON))
        return output

    def _go_on(self, rows: Tensor, tokens: Tensor) -> None:
        told = tokens.new_full((self._num_emitting,), _NOT_ON).index_copy_(0, rows, tokens)
        self.group.broadcast(told)

    @torch.inference_mode()
    def follow(self, shape: StepShape, cache: PagedKVCache) -> None:
        """The other ranks' part in the step that rank 0 has announced."""
        batch = self._receive(shape)
        feature_layers = self.config.graft.feature_layers if self.config.graft else ()
        hidden, features = self.trunk(self.embed(batch), batch, cache, self.rotary, feature_layers)
        emitting = shape.num_emitting
        if emitting:
            self.head(hidden[:emitting])
            if shape.max_group_limit > 1:
                self._follow_groups(features, batch.emit)
        if batch.scored is not None:
            for states in hidden[emitting:].split(SCORED_ROWS_AT_ONCE):
                self.head(states)

    def _follow_groups(self, features: list[Tensor], emit: Tensor) -> None:
        rows, micro = torch.arange(len(emit), device=emit.device), None
        while True:
            told = self.group.broadcast(torch.empty_like(emit))
            on = (told != _NOT_ON).nonzero().squeeze(-1)
            if not len(on):
                return
            if micro is None:
                micro = self.micro_decoder.start(torch.stack(features, dim=1)[on])
            elif len(on) < len(rows):
                micro = micro.select(torch.searchsorted(rows, on))
            rows = on
            state = self.micro_decoder(self._embedding(told[on]), micro, self.rotary)
            (self.short_head if "short_list" in self._buffers else self.head)(state)

    def _receive(self, shape: StepShape) -> ForwardBatch:
        t, b, m = shape.num_slots, len(shape.query_slots), shape.num_emitting
        sizes = [t * shape.max_group_size, t, t, t, b * shape.table_width, b, m, shape.num_scored]
        sizes.append(t if shape.has_text_lengths else 0)
        device = self.embed_tokens.weight.device
        payload = self.group.broadcast(torch.empty(sum(sizes), dtype=torch.int64, device=device))
        tokens, group_sizes, positions, slots, tables, context, emit, scored, lengths = payload.split(sizes)
        return ForwardBatch(
            token_ids=tokens.view(t, shape.max_group_size),
            group_sizes=group_sizes,
            max_group_size=shape.max_group_size,
            positions=positions,
            write_slots=slots,
            block_tables=tables.view(b, shape.table_width),
            context_slots=context,
            query_slots=shape.query_slots,
            context_slots_host=shape.context_slots_host,
            num_single=shape.num_single,
            emit=emit,
            # What chooses tokens and ends groups is rank 0's; nothing here reads these.
            confidence=torch.ones(m, device=device),
            group_limits=torch.ones_like(emit),
            max_group_limit=shape.max_group_limit,
            sampling=empty_sampling(m, device),
            scored=ScoredSlots(scored, scored, 0) if shape.num_scored else None,
            text_lengths=lengths if shape.has_text_lengths else None,
        )

    def _embedding(self, token_ids: Tensor) -> Tensor:
        """Each rank looks up the ids of its rows; the sum is exact, as all but one add 0."""
        row = token_ids - self.group.rank * self.rows_held
        mine = (row >= 0) & (row < self.rows_held)
        embedded: Tensor = self.embed_tokens(row.clamp(0, self.rows_held - 1)).to(self.state_dtype)
        return self.group.all_reduce(embedded.masked_fill(~mine[..., None], 0))

    def _short_rows(self) -> Tensor:
        """Where this rank's ids of the short list are in its rows, filled up to as many as any rank has."""
        owner = self.short_list // self.rows_held
        mine = (self.short_list % self.rows_held)[owner == self.group.rank]
        return F.pad(mine, (0, int(owner.bincount().max()) - len(mine)))

    def _short_columns(self) -> Tensor:
        """int64 [K]: where each id of the short list is in what `_short_rows` of all ranks give, side by side."""
        owner = self.short_list // self.rows_held
        before = F.one_hot(owner, self.group.size).cumsum(0).gather(1, owner[:, None]).squeeze(1) - 1
        return owner * owner.bincount().max() + before


class _Reduced(nn.Module):
    """A linear of which each rank has some input columns."""

    def __init__(self, linear: nn.Module, group: Group) -> None:
        super().__init__()
        self.linear, self.group = linear, group

    def forward(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(self.linear(x))


class _GatheredHead(nn.Module):
    """A head of which each rank has some rows. On rank 0 it gives `columns` of all ranks' logits side by side."""

    def __init__(self, head: Callable[[Tensor], Tensor], group: Group, columns: Tensor) -> None:
        super().__init__()
        self._head, self._group = head, group
        ascending = torch.equal(columns, torch.arange(len(columns), device=columns.device))
        self._number, self._columns = len(columns), None if ascending else columns

    def forward(self, state: Tensor) -> Tensor:
        gathered = self._group.gather(self._head(state))
        if self._group.rank:
            return gathered
        if self._columns is None:
            return gathered[..., : self._number]
        return gathered.index_select(-1, self._columns)


def _shape_of(batch: ForwardBatch) -> StepShape:
    assert batch.context_slots_host is not None  # static rows alone lack it
    return StepShape(
        num_slots=len(batch.token_ids),
        max_group_size=batch.max_group_size,
        query_slots=batch.query_slots,
        context_slots_host=batch.context_slots_host,
        num_single=batch.num_single,
        table_width=batch.block_tables.shape[1],
        num_emitting=len(batch.emit),
        max_group_limit=batch.max_group_limit,
        num_scored=0 if batch.scored is None else len(batch.scored.rows),
        has_text_lengths=batch.text_lengths is not None,
    )


def _parts(batch: ForwardBatch) -> list[Tensor]:
    """What `_receive` takes apart."""
    parts = [batch.token_ids, batch.group_sizes, batch.positions, batch.write_slots, batch.block_tables]
    parts += [batch.context_slots, batch.emit]
    if batch.scored is not None:
        parts.append(batch.scored.rows)
    if batch.text_lengths is not None:
        parts.append(batch.text_lengths)
    return parts
