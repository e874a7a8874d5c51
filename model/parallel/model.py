"""ParallelModel: a HamburgerModel of which each rank holds a part (shards.py), for tensor parallelism.

Rank 0 alone decides: it gathers the logits, samples, masks by grammars and reads the stop head, and tells the others
which rows go on with which tokens, one small broadcast a micro-step. So nothing depends on all ranks computing the
same bits, and neither sampling state nor grammars leave rank 0.

    rank 0    shape ─► batch ─► trunk ─► gather, choose ─► rows and tokens ─► micro-step ─► ... ─► nobody goes on
    others        shape ─► batch ─► trunk ─► gather ────────► rows and tokens ─► micro-step ─► ... ─► next shape

A step that the memory of any rank does not hold ends on all of them: step_calls.py.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hamburger.model.batch import ForwardBatch, ScoredSlots, StepOutput, empty_sampling
from hamburger.model.config import ModelConfig
from hamburger.model.device.out_of_memory import let_go, no_memory
from hamburger.model.execution import Execution
from hamburger.model.hamburger import SCORED_ROWS_AT_ONCE, HamburgerModel
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.layers import DecoderLayer
from hamburger.model.parallel.collectives import Group
from hamburger.model.parallel.shards import StepShape, shard_trunk
from hamburger.model.parallel.step_calls import NOT_ON, CallSizes, StepCalls

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
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

    calls: StepCalls
    _announce: Callable[[StepShape], None]

    def __init__(self, config: ModelConfig, group: Group) -> None:
        super().__init__(config, shard_trunk(config.trunk, group.size))
        self.group = group
        self.rows_held = self.held.vocab_size  # of embedding and head

    def prepare(self, max_positions: int, how: Execution) -> None:
        """As HamburgerModel's, without kernels and weights of 8 bits. Ended rows are left out, not masked."""
        if how.kernels is not None or how.masked or how.eight_bits:
            raise ValueError("a split model has no packed weights, and emits in no static shapes.")
        super().prepare(max_positions, replace(how, masked=False))
        self.calls = StepCalls(self.group, self._call_sizes(), self.embed_tokens.weight)
        self.head = _GatheredHead(self.head, self.calls, torch.arange(self.config.trunk.vocab_size))
        graft = self.config.graft
        if graft is not None and graft.short_list_size is not None:
            self.short_head = _GatheredHead(self.short_head, self.calls, self._short_columns())
        for layer in [module for module in self.modules() if isinstance(module, DecoderLayer)]:
            layer.add_module("o_proj", _Reduced(layer.o_proj, self.calls))
            layer.add_module("down_proj", _Reduced(layer.down_proj, self.calls))
            for adapter in (layer._modules.get("o_adapter"), layer._modules.get("down_adapter")):
                if adapter is not None:
                    adapter.add_module("down", _Reduced(adapter.get_submodule("down"), self.calls))

    def lead(self, announce: Callable[[StepShape], None]) -> None:
        """Rank 0: `announce` tells the other ranks' hosts of each step; they must `follow` then."""
        self._announce = announce

    @torch.inference_mode()
    def step(self, batch: ForwardBatch, cache: PagedKVCache) -> StepOutput:
        """As HamburgerModel's. Raises torch.OutOfMemoryError where the memory of any rank does not hold the step; all
        ranks are ready for the next one then."""
        shape = self._shape_of(batch)
        values = torch.cat([part.flatten() for part in _parts(batch)])
        self._announce(shape)  # memory that ends before this is nobody else's concern
        self.calls.begin(shape)
        self.calls.share_batch(values)
        return self._in_step(partial(super().step, batch, cache))

    def _in_step(self, compute: Callable[[], _Result]) -> _Result:
        """This rank's part of the step whose calls have begun. Raises torch.OutOfMemoryError, and does on all ranks."""
        reason = None
        try:
            result = compute()
            lacking = self.calls.agree()
        except Exception as error:
            reason = no_memory(error)
            if reason is None:
                raise
        if reason is not None:  # and the error, with its frames and what they held, is gone
            let_go(self.embed_tokens.weight.device)
            logger.warning("Rank %d ran out of memory in a step: %s", self.group.rank, reason)
            lacking = self.calls.abandon()
        if lacking:
            ranks = " and ".join(f"rank {rank}" for rank in lacking)
            raise torch.OutOfMemoryError(ranks if reason is None else f"{ranks}: {reason}")
        return result

    def emit_narrowing(
        self, hidden: Tensor, features: list[Tensor], batch: ForwardBatch, only: Tensor | None = None
    ) -> StepOutput:
        output = super().emit_narrowing(hidden, features, batch, only)
        if len(hidden) and batch.max_group_limit > 1:
            self.calls.share_rows(torch.full_like(batch.emit, NOT_ON))
            self.calls.go_on(0)
        return output

    def _go_on(self, rows: Tensor, tokens: Tensor, num_emitting: int) -> None:
        self.calls.share_rows(tokens.new_full((num_emitting,), NOT_ON).index_copy_(0, rows, tokens))
        self.calls.go_on(len(rows))

    @torch.inference_mode()
    def follow(self, shape: StepShape, cache: PagedKVCache) -> None:
        """The other ranks' part in the step that rank 0 has announced."""
        self.calls.begin(shape)
        with suppress(torch.OutOfMemoryError):  # rank 0 has heard of it
            self._in_step(partial(self._follow, shape, cache))

    def _follow(self, shape: StepShape, cache: PagedKVCache) -> None:
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
            told = self.calls.share_rows(torch.empty_like(emit))
            on = (told != NOT_ON).nonzero().squeeze(-1)
            self.calls.go_on(len(on))
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
        sizes, device = shape.part_sizes, self.embed_tokens.weight.device
        values = self.calls.share_batch(torch.empty(sum(sizes), dtype=torch.int64, device=device))
        tokens, group_sizes, positions, slots, tables, context, emit, scored, lengths = values.split(sizes)
        return ForwardBatch(
            token_ids=tokens.view(shape.num_slots, shape.max_group_size),
            group_sizes=group_sizes,
            max_group_size=shape.max_group_size,
            positions=positions,
            write_slots=slots,
            block_tables=tables.view(len(shape.query_slots), shape.table_width),
            context_slots=context,
            query_slots=shape.query_slots,
            context_slots_host=shape.context_slots_host,
            num_single=shape.num_single,
            emit=emit,
            # What chooses tokens and ends groups is rank 0's; nothing here reads these.
            confidence=torch.ones(len(emit), device=device),
            group_limits=torch.ones_like(emit),
            max_group_limit=shape.max_group_limit,
            sampling=empty_sampling(len(emit), device),
            scored=ScoredSlots(scored, scored, 0) if shape.num_scored else None,
            text_lengths=lengths if shape.has_text_lengths else None,
        )

    def _embedding(self, token_ids: Tensor) -> Tensor:
        """Each rank looks up the ids of its rows; the sum is exact, as all but one add 0."""
        row = token_ids - self.group.rank * self.rows_held
        mine = (row >= 0) & (row < self.rows_held)
        embedded: Tensor = self.embed_tokens(row.clamp(0, self.rows_held - 1)).to(self.state_dtype)
        return self.calls.all_reduce(embedded.masked_fill(~mine[..., None], 0))

    def _shape_of(self, batch: ForwardBatch) -> StepShape:
        assert batch.context_slots_host is not None  # static rows alone lack it
        has_adapter = self.config.merge_rank > 0
        return StepShape(
            num_slots=len(batch.token_ids),
            num_merged=int((batch.group_sizes > 1).sum()) if has_adapter else 0,
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

    def _call_sizes(self) -> CallSizes:
        graft, trunk = self.config.graft, self.config.trunk
        has_short_list = graft is not None and graft.short_list_size is not None
        return CallSizes(
            hidden=trunk.hidden_size,
            layers=trunk.num_layers,
            merge_rank=self.config.merge_rank,
            micro_layers=0 if graft is None else graft.micro_layers,
            micro_context=0 if graft is None or graft.features == "fused" else len(graft.feature_layers),
            head=self.rows_held,
            micro_head=len(self._short_rows()) if has_short_list else self.rows_held,
            scored_at_once=SCORED_ROWS_AT_ONCE,
        )

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

    def __init__(self, linear: nn.Module, calls: StepCalls) -> None:
        super().__init__()
        self.linear, self.calls = linear, calls

    def forward(self, x: Tensor) -> Tensor:
        return self.calls.all_reduce(self.linear(x))


class _GatheredHead(nn.Module):
    """A head of which each rank has some rows. On rank 0 it gives `columns` of all ranks' logits side by side."""

    def __init__(self, head: Callable[[Tensor], Tensor], calls: StepCalls, columns: Tensor) -> None:
        super().__init__()
        self._head, self._calls = head, calls
        ascending = torch.equal(columns, torch.arange(len(columns), device=columns.device))
        self._number, self._columns = len(columns), None if ascending else columns

    def forward(self, state: Tensor) -> Tensor:
        gathered = self._calls.gather(self._head(state))
        if self._calls.rank:
            return gathered
        if self._columns is None:
            return gathered[..., : self._number]
        return gathered.index_select(-1, self._columns)


def _parts(batch: ForwardBatch) -> list[Tensor]:
    """What `_receive` takes apart: StepShape.part_sizes."""
    parts = [batch.token_ids, batch.group_sizes, batch.positions, batch.write_slots, batch.block_tables]
    parts += [batch.context_slots, batch.emit]
    if batch.scored is not None:
        parts.append(batch.scored.rows)
    if batch.text_lengths is not None:
        parts.append(batch.text_lengths)
    return parts
