"""The compiled kernels (kernels/): weights in 4 or 8 bits, and whole decoder layers in one call, on x86-64 processors.

A group of 32 weights of an output shares a scale (8 bits) or a scale and a zero (4 bits), in half precision. Inputs are
rounded to 8 bits in groups of 32, sums are exact, everything else is float32. `PackedLinear` and `Trunk` are the plain
reference. The package builds the kernels where it finds a C++ compiler; without them the reference serves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from hamburger.model.config import TrunkConfig
from hamburger.model.cpu.structs import (
    AdapterStruct,
    BatchStruct,
    GeometryStruct,
    LayerStruct,
    MergedStruct,
    WeightStruct,
    check_layouts,
)

InstructionSet = Literal["avx512", "avx2"]

_FORMAT = 6  # of what is passed and packed; supports.cpp says the same
GROUP = 32
MAX_HEAD_DIM = 256
_MAX_QUERY_HEADS = 32  # of one KV head
BLOCK = 16  # outputs
_GROUP_BYTES = {4: 320, 8: 544}  # of a block
_SAMPLED_ROWS = 128
_OFF_GRID = 0.1  # of a step; bfloat16's rounding of the weights moves them by less
_SETS: tuple[InstructionSet, ...] = ("avx512", "avx2")
_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """The new slots of a batch, as ForwardBatch has them; all int64 but cos and sin, float32 [T, head_dim]."""

    cos: Tensor
    sin: Tensor
    write_slots: Tensor
    block_tables: Tensor
    context_slots: Tensor
    query_slots: Tensor
    block_size: int


class Kernels:
    """The compiled functions for one instruction set, and the memory they work in. For one thread at a time."""

    def __init__(self, path: str, instructions: InstructionSet) -> None:
        library = ctypes.CDLL(path)  # finds the OpenMP of torch, which is loaded for all: one pool of threads
        self.instructions = instructions
        self._library = library
        self._layers = self.function("layers", _pointer, _pointer, ctypes.c_int, *4 * (_pointer,))
        self._layers_memory = self.function("layers_memory", _pointer, *2 * (_int64,))
        self._linear = self.function("linear", _pointer, _pointer, _int64, _pointer, _pointer)
        self._linear_memory = self.function("linear_memory", _pointer, _int64)
        self._pack = self.function("pack", ctypes.c_int, ctypes.c_int, _pointer, _int64, _int64, _pointer)
        self._memory = torch.empty(0, dtype=torch.uint8)

    def function(self, name: str, *arguments: type) -> Callable[..., int]:
        """hb_NAME for this instruction set; those that tell a size are named *_memory."""
        function = getattr(self._library, f"hb_{name}_{self.instructions}")
        function.restype, function.argtypes = _int64 if name.endswith("_memory") else None, arguments
        typed: Callable[..., int] = function
        return typed

    def pack(self, weight: Tensor, bits: int) -> Tensor:
        """[outputs, inputs], bfloat16 or float32, inputs a multiple of 32 -> uint8, as kernels/structs.h says."""
        outputs, inputs = weight.shape
        weight = weight.detach().contiguous()
        packed = torch.empty(-(-outputs // BLOCK) * (inputs // GROUP) * _GROUP_BYTES[bits], dtype=torch.uint8)
        is_float = weight.dtype == torch.float32
        self._pack(bits, is_float, weight.data_ptr(), outputs, inputs, packed.data_ptr())
        return packed

    def linear(self, weight: PackedWeight, x: Tensor) -> Tensor:
        """x float32 [rows, inputs], contiguous -> float32 [rows, outputs]."""
        y = torch.empty(len(x), weight.outputs)
        memory = self.working_memory(self._linear_memory(weight.reference, len(x)))
        self._linear(weight.reference, x.data_ptr(), len(x), y.data_ptr(), memory)
        return y

    def layers(
        self,
        layers: PackedLayers,
        x: Tensor,
        slots: Slots,
        kv: Sequence[Tensor],
        emit: Tensor,
        feature_layers: Sequence[int],
        norm: Tensor,
        read: Tensor,
        merged: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """All layers on x, float32 [T, D], contiguous, in place; they write the slots' keys and values.

        kv: of each layer [blocks, block_size, 2, kv_heads, head_dim], bfloat16 or float32. norm: of the last states,
        float32 [D]. merged: int64 [N], the rows that pass the layers' adapters.
        Returns the normed states of rows read, int64 [S], float32 [S, D], and the states of rows emit, int64 [M], after
        each of feature_layers, float32 [M, D].
        """
        tensors = (slots.cos, slots.sin, slots.write_slots, slots.block_tables, slots.context_slots, slots.query_slots)
        final = torch.empty(len(read), x.shape[1])
        features = [torch.empty(len(emit), x.shape[1]) for _ in feature_layers]
        places = (_pointer * len(kv))()
        for layer, states in zip(feature_layers, features, strict=True):
            places[layer] = states.data_ptr()
        batch = BatchStruct(
            len(x), len(slots.query_slots), *(tensor.data_ptr() for tensor in tensors),
            slots.block_tables.shape[1], slots.block_size, kv[0].dtype == torch.float32,
            emit.data_ptr(), len(emit), ctypes.addressof(places),
            norm.data_ptr(), read.data_ptr(), len(read), final.data_ptr(),
            MergedStruct() if merged is None else MergedStruct(len(merged), merged.data_ptr(), layers.rank),
        )  # fmt: skip
        memory = self.working_memory(self._layers_memory(layers.geometry, len(x), layers.rank))
        pointers = (_pointer * len(kv))(*(tensor.data_ptr() for tensor in kv))
        self._layers(layers.geometry, layers.structs, len(kv), pointers, ctypes.byref(batch), x.data_ptr(), memory)
        return final, features

    def working_memory(self, size: int) -> int:
        """The address of so many bytes, until the next call."""
        if self._memory.numel() < size:
            self._memory = torch.empty(size, dtype=torch.uint8)
        return self._memory.data_ptr()


def has_4_bits(weight: Tensor) -> bool:
    """Whether each group of 32 inputs lies on a grid of 16 even steps from its least to its greatest value, as the
    weights of a GGUF Q4_1 file do; [out, in], of which rows from all parts are looked at."""
    if weight.shape[1] % GROUP:
        return False
    sample = weight[:: max(1, len(weight) // _SAMPLED_ROWS)]
    groups = sample.float().reshape(-1, GROUP)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    steps = (groups - low) / ((high - low) / 15).clamp_min(torch.finfo(torch.float32).tiny)
    return bool(((steps - steps.round()).abs() < _OFF_GRID).all())


class PackedWeight:
    """A linear's weight and bias, as the kernels read them."""

    def __init__(self, kernels: Kernels, weight: Tensor, bias: Tensor | None, bits: int) -> None:
        self.bits = bits
        self.outputs, self.inputs = weight.shape
        self._data = kernels.pack(weight, bits)
        self._bias = None if bias is None else bias.detach().float().contiguous()
        bias_at = None if self._bias is None else self._bias.data_ptr()
        self.struct = WeightStruct(self._data.data_ptr(), bias_at, self.outputs, self.inputs, bits)
        self.reference = ctypes.byref(self.struct)

    @property
    def nbytes(self) -> int:
        """What one pass reads."""
        return self._data.numel()


@dataclass(frozen=True, slots=True, eq=False)
class LayerParts:
    """One decoder layer (layers.py): norms [D] or [head_dim], linears, and how many slots a slot sees (0: all).

    adapters: down and up of qkv, o, gate_up and down; or none.
    """

    attn_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: PackedWeight
    o: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
    window: int
    adapters: Sequence[PackedWeight]


class PackedLayers:
    """Decoder layers, as the kernels read them."""

    def __init__(self, config: TrunkConfig, parts: Sequence[LayerParts]) -> None:
        self._geometry = GeometryStruct.of(config)
        self.geometry = ctypes.byref(self._geometry)
        self.weights = [weight for part in parts for weight in (part.qkv, part.o, part.gate_up, part.down)]
        self._held = [part.adapters for part in parts]
        self.rank = parts[0].adapters[0].outputs if parts[0].adapters else 0
        self._norms: list[Tensor] = []  # keeps them alive
        self.structs = (LayerStruct * len(parts))(*(self._layer(part) for part in parts))

    def _layer(self, part: LayerParts) -> LayerStruct:
        norms = [self._at(norm) for norm in (part.attn_norm, part.mlp_norm, part.q_norm, part.k_norm)]
        linears = [weight.struct for weight in (part.qkv, part.o, part.gate_up, part.down)]
        pairs = zip(part.adapters[::2], part.adapters[1::2], strict=True)
        adapters = (AdapterStruct * 4)(*(AdapterStruct(down.struct, up.struct) for down, up in pairs))
        return LayerStruct(*norms, *linears, part.window, adapters)

    def _at(self, norm: Tensor | None) -> int | None:
        if norm is None:
            return None
        self._norms.append(norm.detach().float().contiguous())
        return self._norms[-1].data_ptr()


def load_kernels(instructions: InstructionSet | None = None) -> Kernels | None:
    """The kernels for the best instruction set that this processor has, or for the one named; None where they were not
    built, cannot run, or are of another version. Raises RuntimeError where this version's structs are not ours."""
    spec = find_spec("hamburger.model.cpu._kernels")
    if spec is None or spec.origin is None:
        return None
    try:
        library = ctypes.CDLL(spec.origin)
        if library.hb_format() != _FORMAT:
            return None
    except (OSError, AttributeError):  # torch without GNU OpenMP; a file that is not our library
        return None
    check_layouts(library)
    for name in _SETS if instructions is None else (instructions,):
        if library.hb_supports(name == "avx512"):
            return Kernels(spec.origin, name)
    return None


def layers_fit(config: TrunkConfig) -> bool:
    """Whether the kernels take this geometry."""
    widths = (config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size)
    return (
        all(width % GROUP == 0 for width in widths)
        and config.head_dim % GROUP == 0
        and config.head_dim <= MAX_HEAD_DIM
        and config.num_heads // config.num_kv_heads <= _MAX_QUERY_HEADS
    )
