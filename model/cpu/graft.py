"""What a graft adds to a trunk, on the kernels: embedder, heads, stop head and micro decoder.

The parts compute what the one call does, to the bit: rows may take either way.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hamburger.model.batch import Logprobs
from hamburger.model.config import GraftConfig, ModelConfig
from hamburger.model.cpu.library import Kernels
from hamburger.model.cpu.structs import (
    EmbeddingStruct,
    EmissionStruct,
    GeometryStruct,
    GraftStruct,
    HeadStruct,
    MergerStruct,
    WeightStruct,
    pointers,
)
from hamburger.model.cpu.weights import PackedLayers, PackedWeight, own_floats
from hamburger.model.group_cache import GroupCache
from hamburger.model.kernel_shapes import BLOCK, GROUP
from hamburger.model.modules.embedder import CompositionalEmbedder
from hamburger.model.modules.linear import weights_of
from hamburger.model.modules.micro_decoder import MicroStepDecoder, StopHead
from hamburger.model.modules.rotary import RotaryEmbedding

_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64
MAX_GROUP = 64


def merger_fits(plain: CompositionalEmbedder) -> bool:
    """Whether the kernels take its widths."""
    most, half = plain.pos.shape
    return half % GROUP == 0 and most <= MAX_GROUP


class CpuEmbedding:
    """Slots' tokens -> what the trunk reads, in one call: an embedding, or a composed group's (modules/embedder.py)."""

    def __init__(self, kernels: Kernels, table: Tensor | PackedWeight, plain: CompositionalEmbedder | None) -> None:
        """table: [V, D], or the head in 8 bits that it is tied to. plain: composes groups; None where it does not."""
        pointer, int64 = ctypes.c_void_p, ctypes.c_int64
        self._kernels, self._table = kernels, table
        if isinstance(table, PackedWeight):
            self.struct = EmbeddingStruct.of_head(table.struct)
        else:
            self.struct = EmbeddingStruct.of(table)
        self._run = kernels.function("embed", *4 * (pointer,), int64, int64, *4 * (pointer,))
        self._memory = kernels.function("embed_memory", pointer, int64, int64)
        self._merger = MergerStruct()
        if plain is not None:
            self._pos = own_floats(plain.pos)
            linears = (plain.q_proj, plain.k_proj, plain.v_proj, plain.out_proj)
            self._weights = [PackedWeight(kernels, *weights_of(linear), 8) for linear in linears]
            structs = (weight.struct for weight in self._weights)
            self._merger = MergerStruct(*structs, self._pos.data_ptr(), 2 * self._pos.shape[1], plain.heads)

    def __call__(self, token_ids: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor | None]:
        """int64 [T, W], of which sizes [T] count -> states float32 [T, D], and the slots of several, int64 [N]; None
        where W is 1."""
        slots, width = token_ids.shape
        states = torch.empty(slots, self.struct.width)
        composed = torch.empty(slots, dtype=torch.int64) if width > 1 else None
        count = ctypes.c_int64()
        merger = ctypes.byref(self._merger)
        memory = self._kernels.working_memory(self._memory(merger, slots if width > 1 else 0, width))
        tensors = (token_ids, sizes)
        self._run(
            ctypes.byref(self.struct), merger, *(t.data_ptr() for t in tensors), slots, width,
            states.data_ptr(), None if composed is None else composed.data_ptr(), ctypes.byref(count), memory,
        )  # fmt: skip
        return states, None if composed is None else composed[: count.value]

    def lookup(self, token_ids: Tensor) -> Tensor:
        """int64 [*] -> float32 [*, D]: the tokens' own embeddings."""
        flat = token_ids.reshape(-1, 1).contiguous()
        return self(flat, torch.ones_like(flat))[0].view(*token_ids.shape, self.struct.width)


class PackedHead:
    """A head in 8 bits; for greedy rows its copy in 4 bits, and how far each output of that is off (graft/head.h)."""

    def __init__(self, kernels: Kernels, weight: Tensor) -> None:
        """weight: [outputs, inputs]."""
        self.packed = packed = PackedWeight(kernels, weight, None, 8)
        self._coarse = PackedWeight(kernels, weight, None, 4)
        self.errors = torch.zeros(-(-packed.outputs // BLOCK) * BLOCK)
        self.struct = HeadStruct(packed.struct, self._coarse.struct, self.errors.data_ptr())
        kernels.function("head_errors", _pointer, _pointer)(ctypes.byref(self.struct), self.errors.data_ptr())


@dataclass(frozen=True, slots=True, eq=False)
class MicroParts:
    """The graft's modules and what they stand on. layers: the micro decoder's. head: of micro-steps.

    short_list: int64, ascending, the ids that `head` chooses from; None: all. bits: of the projections of features and
    embeddings.
    """

    decoder: MicroStepDecoder
    stop_head: StopHead
    layers: PackedLayers
    head: PackedHead
    short_list: Tensor | None
    embedding: CpuEmbedding
    rotary: RotaryEmbedding
    bits: int


class CpuGraft:
    """Heads, stop head and micro decoder, as the kernels read them."""

    def __init__(self, kernels: Kernels, config: ModelConfig, head: PackedHead, micro: MicroParts | None) -> None:
        """head: of first tokens. micro: what the graft adds; None for a plain base model."""
        self.kernels, self.config = kernels, config
        self._emit = kernels.function("emit", *3 * (_pointer,))
        self._memory = kernels.function("emit_memory", _pointer, _int64)
        self._draw = kernels.function("draw", _pointer, _int64, _int64, *6 * (_pointer,))
        self._logprobs = kernels.function("logprobs", _pointer, _int64, _int64, _pointer, _int64, *4 * (_pointer,))
        self._choose = kernels.function("choose", *2 * (_pointer,), _int64, _pointer, _int64, *5 * (_pointer,))
        self._stop = kernels.function("stop_logits", _pointer, _pointer, _int64, _pointer, _pointer)
        self._begin = kernels.function("micro_begin", _pointer, _pointer, _int64, _pointer, _pointer)
        self._state = kernels.function("micro_state", *4 * (_pointer,), _int64, _int64, *3 * (_pointer,))
        self._held: list[object] = [head]  # what the struct points to
        self._struct = GraftStruct(geometry=GeometryStruct.of(config.trunk), head=head.struct)
        if config.graft is not None and micro is not None:
            self._add(config.graft, micro)
        self._reference = ctypes.byref(self._struct)

    def _add(self, graft: GraftConfig, micro: MicroParts) -> None:
        s, plain = self._struct, micro.decoder
        s.layers = ctypes.cast(micro.layers.structs, _pointer)
        s.count, s.features = len(micro.layers.structs), len(graft.feature_layers)
        s.positions, s.fused = len(graft.feature_layers) + graft.max_group, plain.fused
        if plain.fused:
            s.feature_norm = self._held_at(plain.feature_norm.weight)
            s.embedding_norm = self._held_at(plain.embedding_norm.weight)
            s.feature_proj = self._pack(plain.feature_proj, micro.bits)
            s.embedding_proj = self._pack(plain.embedding_proj, micro.bits)
        if plain.norm is not None:
            s.norm = self._held_at(plain.norm.weight)
        linears = (child for child in micro.stop_head if isinstance(child, nn.Linear))
        s.stop = (WeightStruct * 3)(*(self._pack(linear) for linear in linears))
        s.stop_scale = self._held_at(torch.tensor(graft.stop_scale or (1.0,) * graft.max_group))
        s.stop_bias = self._held_at(torch.tensor(graft.stop_bias or (0.0,) * graft.max_group))
        s.micro_head = micro.head.struct
        s.embedding = micro.embedding.struct
        tables = [table[: s.positions].float().contiguous() for table in (micro.rotary.cos, micro.rotary.sin)]
        s.cos, s.sin = (table.data_ptr() for table in tables)
        if micro.short_list is not None:
            s.short_list = micro.short_list.data_ptr()
        self._held += [micro.layers, micro.head, micro.short_list, micro.embedding, tables]

    def _held_at(self, numbers: Tensor) -> int:
        """The address of the numbers in float32, which live as long as this."""
        numbers = own_floats(numbers)
        self._held.append(numbers)
        return numbers.data_ptr()

    def _pack(self, linear: nn.Module, bits: int = 8) -> WeightStruct:
        packed = PackedWeight(self.kernels, *weights_of(linear), bits)
        self._held.append(packed)
        return packed.struct

    def emit(self, emission: EmissionStruct) -> None:
        """Make the groups of its rows."""
        self._emit(self._reference, ctypes.byref(emission), self._working_memory(emission.rows))

    def choose(
        self, emission: EmissionStruct, index: int, rows: Tensor, states: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `emit` chooses as token `index` of the groups of rows int64 [R], ascending, by states [R, D].

        Returns tokens int64 [R]; float32 [R], of drafts how likely they are; and Choice.possible, bool [R]."""
        tokens, chances = torch.empty_like(rows), torch.empty(len(rows))
        possible = torch.empty(len(rows), dtype=torch.bool)
        rows, states = rows.contiguous(), states.contiguous()
        self._choose(
            self._reference, ctypes.byref(emission), index, rows.data_ptr(), len(rows), states.data_ptr(),
            tokens.data_ptr(), chances.data_ptr(), possible.data_ptr(), self._working_memory(emission.rows),
        )  # fmt: skip
        return tokens, chances, possible

    def draw(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: Tensor
    ) -> Tensor:
        """What sampler.sample draws, but for rounding where two tokens are tied. To the bit what `emit` draws."""
        rows, vocabulary = logits.shape
        tokens = torch.empty(rows, dtype=torch.int64)
        given = tuple(t.contiguous() for t in (temperature, top_k, top_p, min_p, keys))
        logits = logits.contiguous()
        self._draw(logits.data_ptr(), rows, vocabulary, *(t.data_ptr() for t in given), tokens.data_ptr())
        return tokens

    def logprobs(self, logits: Tensor, tokens: Tensor, k: int, *, ranked: bool = False) -> Logprobs:
        """What sampler.token_logprobs gives, with ranks."""
        rows, vocabulary = logits.shape
        logits, tokens = logits.contiguous(), tokens.contiguous()
        chosen, top = torch.empty(rows), torch.empty(rows, k)
        ranks, top_ids = torch.empty_like(tokens), torch.empty(rows, k, dtype=torch.int64)
        found = (t.data_ptr() for t in (chosen, ranks, top_ids, top))
        self._logprobs(logits.data_ptr(), rows, vocabulary, tokens.data_ptr(), k, *found)
        return Logprobs(chosen, top_ids, top, ranks)

    def stop_logits(self, states: Tensor) -> Tensor:
        """float32 [R, D], contiguous -> float32 [R, 1], not calibrated."""
        stops = torch.empty(len(states), 1)
        self._stop(self._reference, states.data_ptr(), len(states), stops.data_ptr(), self._working_memory(len(states)))
        return stops

    def begin(self, features: Tensor) -> GroupCache:
        """Groups of R rows with features float32 [R, F, D] go on; fused features are [R, D] of context."""
        rows, count, width = features.shape
        t, positions = self.config.trunk, self._struct.positions
        context = torch.empty(rows, width) if self._struct.fused else torch.empty(rows, count, width)
        parts = features.transpose(0, 1).contiguous()
        memory = self._working_memory(rows)
        self._begin(self._reference, pointers(parts.unbind()), rows, context.data_ptr(), memory)
        return GroupCache(context, torch.empty(self._struct.count, rows, positions, 2, t.num_kv_heads, t.head_dim))

    def micro_state(self, embedded: Tensor, cache: GroupCache) -> Tensor:
        """One micro-step: embedded float32 [R, D] of the newest tokens -> states [R, D]; the cache grows."""
        embedded, places = embedded.contiguous(), cache.places
        states = torch.empty_like(embedded)
        tensors = (cache.context, embedded, places)
        memory = self._working_memory(len(embedded))
        self._state(
            self._reference, *(t.data_ptr() for t in tensors), len(embedded), cache.length,
            pointers(cache.kv.unbind()), states.data_ptr(), memory,
        )  # fmt: skip
        cache.length += 1 if cache.length or self._struct.fused else self._struct.features + 1
        return states

    def _working_memory(self, rows: int) -> int:
        return self.kernels.working_memory(self._memory(self._reference, rows))
