"""HamburgerModel: one macro-step for a mixed batch of prefill chunks and decode slots. It holds no request state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hamburger.model.adapter import Embedded, MergedSlots
from hamburger.model.batch import ForwardBatch, Logprobs, ScoredSlots, StepOutput
from hamburger.model.config import ModelConfig, TrunkConfig
from hamburger.model.cpu.embedding import NativeEmbedding, merger_fits
from hamburger.model.cpu.graft import MicroParts, NativeEmitter
from hamburger.model.cpu.head import PackedHead
from hamburger.model.cpu.library import Kernels
from hamburger.model.cpu.modules import (
    NativeLinear,
    NativeMicroStepDecoder,
    NativeStopHead,
    NativeTrunk,
    pack_layers,
    replace_linears,
)
from hamburger.model.cpu.onednn import PackedLinear, can_pack, pack_linears
from hamburger.model.embedder import CompositionalEmbedder
from hamburger.model.emission.groups import GrowingGroups
from hamburger.model.emission.masked import Groups, MaskedStep
from hamburger.model.execution import Execution
from hamburger.model.gpu.int8 import EightBitLinear, use_eight_bits
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.micro_cache import GroupCache
from hamburger.model.micro_decoder import MicroStepDecoder, StopHead
from hamburger.model.rotary import RotaryEmbedding
from hamburger.model.sampler import Choice, GroupSampler, token_logprobs
from hamburger.model.trunk import Trunk

# The states [M, D] and features [M, D] each of a batch's emitting rows -> their groups.
Emit = Callable[[Tensor, list[Tensor], ForwardBatch], StepOutput]
# Logits of a long prompt are never held at once: float32 rows of a 128k vocabulary take 64 MiB this way.
SCORED_ROWS_AT_ONCE = 128


class HamburgerModel(nn.Module):
    """A trunk with its graft, or a plain base model (every group then has one token).

    `prepare` must be called once after the weights are in place.
    """

    rotary: RotaryEmbedding
    state_dtype: torch.dtype
    quantization = "none"  # what the trunk's weights are
    masked = False
    emitter: NativeEmitter | None = None
    short_list: Tensor
    head: Callable[[Tensor], Tensor]
    micro_head: Callable[[Tensor], Tensor] | None  # the micro-steps' own over all ids, if they have one
    short_head: Callable[[Tensor], Tensor]

    def __init__(self, config: ModelConfig, held: TrunkConfig | None = None) -> None:
        """held: the trunk's sizes in this process, where others hold the rest of it (model.py)."""
        super().__init__()
        self.config = config
        self.held = t = config.trunk if held is None else held
        g = config.graft
        self.micro_head = None  # not in the class, where it would hide a module of that name; so the next
        self.native_embedding: NativeEmbedding | None = None
        # Not nn.Embedding(V, D): drawing its initial numbers on the meta device imports torch's compiler for a second.
        self.embed_tokens = nn.Embedding.from_pretrained(torch.empty(t.vocab_size, t.hidden_size), freeze=False)
        self.trunk = Trunk(t, config.merge_rank)
        if not t.tie_word_embeddings:
            self.lm_head = nn.Linear(t.hidden_size, t.vocab_size, bias=False)
        if g is not None:
            self.embedder = CompositionalEmbedder(t.hidden_size, g.max_group, g.merger_heads)
            self.micro_decoder = MicroStepDecoder(t, g)
            self.stop_head = StopHead(t.hidden_size)
            if g.short_list_size is not None:
                self.register_buffer("short_list", torch.empty(g.short_list_size, dtype=torch.int64))

    def prepare(self, max_positions: int, how: Execution) -> None:
        """Make what follows from the weights; max_positions: the longest sequence in tokens.

        Raises ValueError where parts of `how` exclude each other.
        """
        weight = self.embed_tokens.weight
        packed = how.packed
        if packed is None:
            packed = can_pack(weight.dtype, weight.device) and not how.eight_bits
        self.masked = weight.device.type == "cuda" if how.masked is None else how.masked
        if self.masked and how.kernels is not None:
            raise ValueError("the compiled kernels keep only rows that go on: masked is not for them.")
        trunk, graft = self.config.trunk, self.config.graft
        if graft is not None:  # the micro decoder counts its own positions
            max_positions = max(max_positions, len(graft.feature_layers) + graft.max_group)
        self.state_dtype = weight.dtype if how.kernels is None else torch.float32
        self.rotary = RotaryEmbedding(trunk, max_positions, weight.device, self.state_dtype)
        if how.kernels is not None:
            self._use(how.kernels, how.bits)
            return
        if graft is not None and graft.short_list_size is not None:
            self.short_head = _head(self.head_weight.detach()[self._short_rows()], packed, how.eight_bits)
        if how.eight_bits:
            self._use_eight_bits()
        elif packed:
            pack_linears(self)
        if how.backend != "torch":
            self._fuse()
        self.head = _head(weight, packed) if trunk.tie_word_embeddings else self.lm_head
        if how.eight_bits and graft is not None and graft.short_list_size is None:
            self.micro_head = _head(self.head_weight.detach(), packed, how.eight_bits)

    def _use(self, kernels: Kernels, bits: int | None) -> None:
        """Trunk, graft and linears become the kernels' own; what is left is small, and float32."""
        trunk, graft = NativeTrunk(kernels, self.trunk, bits), self.config.graft
        self.quantization = trunk.quantization
        self.add_module("trunk", trunk)  # called as the plain one is
        weight = self.head_weight.detach()
        self.head = head = NativeLinear(kernels, weight)
        head_of_trunk = PackedHead(kernels, head.packed, weight)
        micro, short_list = None, None
        if graft is not None:
            if graft.short_list_size is not None:
                short_list = self.short_list = self.short_list.sort().values  # of equal logits the first id wins
                self.short_head = short_head = NativeLinear(kernels, weight[short_list])
                head_of_micro_steps = PackedHead(kernels, short_head.packed, weight[short_list])
            else:
                head_of_micro_steps = head_of_trunk
            micro = MicroParts(
                self.micro_decoder,
                self.stop_head,
                pack_layers(kernels, self.config.trunk, self.micro_decoder.layers, 8),
                head_of_micro_steps,
                short_list,
                self.embed_tokens.weight,
                self.rotary,
            )
        self.emitter = NativeEmitter(kernels, self.config, head_of_trunk, micro)
        if graft is None or merger_fits(self.embedder):
            merger = None if graft is None else self.embedder
            self.native_embedding = NativeEmbedding(kernels, self.embed_tokens.weight.detach(), merger)
            if merger is not None:
                del self.embedder
        if graft is not None:
            self.add_module("micro_decoder", NativeMicroStepDecoder(self.emitter, self.config.trunk, graft))
            self.add_module("stop_head", NativeStopHead(self.emitter))
        if not self.config.trunk.tie_word_embeddings:
            del self.lm_head
        replace_linears(kernels, self)
        for name, child in self.named_children():
            if name != "embed_tokens":
                child.float()

    def _fuse(self) -> None:
        """Trunk and micro decoder on the Triton kernels, whose package may be missing where they are not asked for."""
        from hamburger.model.gpu.attention import TritonChunks
        from hamburger.model.gpu.modules import FusedMicroStepDecoder, FusedTrunk

        trunk, graft = self.config.trunk, self.config.graft
        chunks = TritonChunks(self.trunk.config, self.state_dtype)
        self.add_module("trunk", FusedTrunk(self.trunk, chunks))  # called as the plain one is
        if graft is not None:
            self.add_module("micro_decoder", FusedMicroStepDecoder(self.micro_decoder, trunk, graft))

    def _short_rows(self) -> Tensor:
        """int64 [K]: the rows of head_weight that the micro-steps' head is made of."""
        return self.short_list

    def _use_eight_bits(self) -> None:
        use_eight_bits(self.trunk)
        if self.config.graft is not None:
            use_eight_bits(self.micro_decoder)
        self.quantization = "int8"

    @property
    def head_weight(self) -> Tensor:
        """[V, D]: the head that trunk and micro-steps share."""
        return self.embed_tokens.weight if self.config.trunk.tie_word_embeddings else self.lm_head.weight

    @torch.inference_mode()
    def step(self, batch: ForwardBatch, cache: PagedKVCache) -> StepOutput:
        """Run one macro-step: write every new slot's KV, emit a group for each row of `batch.emit`, score
        `batch.scored`."""
        emit: Emit = self.emit_narrowing
        if self.masked and batch.sampling.constraint is None:
            emit = self._emit_masked
        elif self.emitter is not None and self.emitter.takes(batch.sampling):
            emit = self.emitter.emit
        return self.step_with(emit, batch, cache)

    def step_with(self, emit: Emit, batch: ForwardBatch, cache: PagedKVCache) -> StepOutput:
        """A macro-step whose groups `emit` makes."""
        feature_layers = self.config.graft.feature_layers if self.config.graft else ()
        hidden, features = self.trunk(self.embed(batch), batch, cache, self.rotary, feature_layers)
        if batch.scored is None:
            return emit(hidden, features, batch)
        emitting = len(batch.emit)
        output = emit(hidden[:emitting], features, batch)
        return replace(output, prompt_logprobs=self._score(hidden[emitting:], batch.scored))

    def embed(self, batch: ForwardBatch) -> Embedded:
        """What the trunk reads of the batch's T slots."""
        if self.native_embedding is not None:
            x, rows = self.native_embedding(batch.token_ids.contiguous(), batch.group_sizes)
            return Embedded(x, MergedSlots(rows, None) if self.config.merge_rank and len(rows) else None)
        if batch.max_group_size == 1:
            return Embedded(self._embedding(batch.token_ids[:, 0]))
        tokens, sizes = self._embedding(batch.token_ids), batch.group_sizes
        rows = None if self.masked else (sizes > 1).nonzero().squeeze(-1)
        merged = MergedSlots(rows, (sizes > 1)[:, None] if rows is None else None)
        return Embedded(self.embedder(tokens, sizes, rows), merged if self.config.merge_rank else None)

    def _embedding(self, token_ids: Tensor) -> Tensor:
        """int64 [...] -> [..., D]."""
        embedded: Tensor = self.embed_tokens(token_ids).to(self.state_dtype)
        return embedded

    def emit_narrowing(
        self, hidden: Tensor, features: list[Tensor], batch: ForwardBatch, only: Tensor | None = None
    ) -> StepOutput:
        """First tokens from the trunk's state [M, D], then micro-steps for the rows whose groups go on.

        only: int64 [R], ascending, the rows that emit; the others' groups are empty. None for all.
        """
        m, width, device = hidden.shape[0], batch.max_group_limit, hidden.device
        group = GrowingGroups(m, width, batch.sampling.max_logprobs, device)
        if not m:
            return group.output()
        sampler = GroupSampler(batch.sampling, None if self.emitter is None else self.emitter.draw)
        rows = torch.arange(m, device=device) if only is None else only
        limits = torch.where(batch.confidence < 1, batch.group_limits, 1)
        threshold = torch.logit(batch.confidence)
        state, micro = hidden if only is None else hidden[only], None
        logits = self.head(state)
        for index in range(width):
            choice = sampler.choose(logits, rows, index)
            if micro is not None and choice.possible is not None and not choice.possible.all():
                # The short list holds nothing that is allowed: the trunk chooses that token, in the next macro-step.
                keep = choice.possible.nonzero().squeeze(-1)
                if not len(keep):
                    break
                rows, state, logits, micro = rows[keep], state[keep], logits[keep], micro.select(keep)
                choice = Choice(choice.tokens[keep], choice.likeliest[keep])
            stop = self.stop_logit(state, index)
            group.add(rows, index, choice.tokens, stop, logits, batch.sampling.logprobs[rows] >= 0)
            if index + 1 == width:
                break
            # A stop value read before a token that is not the argmax is stale, so such a group ends here.
            ended = (choice.tokens[:, None] == batch.sampling.end_ids[rows]).any(-1)
            if batch.sampling.constraint is not None:
                ended |= batch.sampling.constraint.advance(rows, choice.tokens)
            on = (-stop >= threshold[rows]) & choice.likeliest & ~ended & (limits[rows] > index + 1)
            keep = on.nonzero().squeeze(-1)
            if not len(keep):
                break
            rows, tokens = rows[keep], choice.tokens[keep]
            if micro is None:
                micro = self.micro_decoder.start(torch.stack(features, dim=1)[rows])
            elif len(keep) < len(on):
                micro = micro.select(keep)
            self._go_on(rows, tokens, m)
            state, logits = self.micro_step(tokens, micro)
        return group.output()

    def _emit_masked(self, hidden: Tensor, features: list[Tensor], batch: ForwardBatch) -> StepOutput:
        """The same in static shapes: no row is left out, so nobody waits to learn which go on."""
        width = batch.max_group_limit
        groups = Groups.empty(len(hidden), width, hidden.device)
        step = MaskedStep(groups, batch.sampling, batch.confidence, batch.group_limits)
        if not len(hidden):
            return step.output()
        state, logits = hidden, self.head(hidden)
        step.take(0, logits, self.stop_logit(state, 0))
        if width > 1:
            micro = self.micro_decoder.start_static(torch.stack(features, dim=1), width)
        for index in range(1, width):
            state, logits = self.micro_step(groups.newest, micro)
            step.take(index, logits, self.stop_logit(state, index))
        return step.output()

    def _score(self, states: Tensor, scored: ScoredSlots) -> Logprobs:
        """Log-probabilities of the tokens after `states` [S, D], under the trunk alone."""
        parts = [
            token_logprobs(self.head(rows), ids, scored.max_logprobs)
            for rows, ids in zip(
                states.split(SCORED_ROWS_AT_ONCE), scored.next_ids.split(SCORED_ROWS_AT_ONCE), strict=True
            )
        ]
        chosen, top_ids, top = (torch.cat(part) for part in zip(*parts, strict=True))
        return Logprobs(chosen, top_ids, top)

    def _go_on(self, rows: Tensor, tokens: Tensor, num_emitting: int) -> None:
        """Rows [R] of M emitting ones go on with tokens [R]: for a model with other parts, which must know
        (model.py)."""

    def micro_step(self, tokens: Tensor, micro: GroupCache) -> tuple[Tensor, Tensor]:
        """tokens [R], the newest of each group -> state [R, D] and logits [R, V]; off the short list they are -inf."""
        state: Tensor = self.micro_decoder(self._embedding(tokens), micro, self.rotary)
        if "short_list" not in self._buffers:
            return state, (self.micro_head or self.head)(state)
        short = self.short_head(state)
        logits = short.new_full((len(tokens), self.config.trunk.vocab_size), float("-inf"))
        return state, logits.index_copy_(1, self.short_list, short)

    def stop_logit(self, state: Tensor, index: int) -> Tensor:
        """state [R, D] after token `index` of the group -> calibrated float32 [R]; a plain base model always stops."""
        graft = self.config.graft
        if graft is None:
            return torch.full((len(state),), float("inf"), device=state.device)
        logit: Tensor = self.stop_head(state).squeeze(-1).float()
        if graft.stop_scale is not None:
            logit = logit * graft.stop_scale[index]
        if graft.stop_bias is not None:
            logit = logit + graft.stop_bias[index]
        return logit


def _head(weight: Tensor, packed: bool, eight_bits: bool = False) -> Callable[[Tensor], Tensor]:
    """state [..., D] -> logits [..., rows of weight]."""
    if eight_bits:
        return EightBitLinear(weight, None)
    return PackedLinear(weight) if packed else partial(F.linear, weight=weight)
