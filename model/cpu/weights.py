"""Weights in 4 or 8 bits, single and of whole decoder layers, as the kernels read them (kernels/structs.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hamburger.model.config import Rope, TrunkConfig
from hamburger.model.cpu.library import Kernels
from hamburger.model.cpu.structs import (
    NORMS,
    ROPES,
    AdapterStruct,
    ExpertStruct,
    GeometryStruct,
    LayerStruct,
    WeightStruct,
)
from hamburger.model.kernel_shapes import GROUP
from hamburger.model.modules.adapter import LowRank
from hamburger.model.modules.layers import DecoderLayer, Expert
from hamburger.model.modules.linear import weights_of

_SAMPLED_ROWS = 128
_MOST_STEPS = 15  # between the values of 4 bits
_OFF_GRID = 0.1  # of a step; bfloat16's rounding of the weights moves them by less
_MOST_OFF = 0.001  # of the groups
_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64


def has_4_bits(weight: Tensor) -> bool:
    """Whether groups of 32 inputs lie on grids of even steps, at most 15 from the least to the greatest value, as they
    do where weights were made of 4 bits (GGUF's Q4_0, Q4_1 and Q4_K, AWQ, GPTQ); [out, in], of which rows from all
    parts are looked at. bfloat16 may have moved a few groups off theirs, whose least value is far from 0."""
    if weight.shape[1] % GROUP:
        return False
    sample = weight[:: max(1, len(weight) // _SAMPLED_ROWS)]
    groups = sample.float().reshape(-1, GROUP)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    places = (groups - low) / (high - low).clamp_min(torch.finfo(torch.float32).tiny)  # 0..1
    steps, most_off = _MOST_STEPS, len(groups) * _MOST_OFF
    while steps and len(places) > most_off:  # mostly one turn: nearly every group has its least and greatest value
        on_grid = places * steps
        places = places[((on_grid - on_grid.round()).abs() >= _OFF_GRID).any(dim=-1)]
        steps -= 1
    return len(places) <= most_off


def own_floats(tensor: Tensor) -> Tensor:
    """float32, contiguous, and in memory of their own: a checkpoint's numbers may lie in a file that is mapped, of
    which all that was read stays resident as long as one of them is held."""
    return tensor.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)


class PackedWeight:
    """A linear's weight and bias, as the kernels read them."""

    def __init__(self, kernels: Kernels, weight: Tensor, bias: Tensor | None, bits: int) -> None:
        self._kernels, self.bits = kernels, bits
        self._linear = kernels.function("linear", _pointer, _pointer, _int64, _pointer, _pointer)
        self._memory = kernels.function("linear_memory", _pointer, _int64)
        self.outputs, self.inputs = weight.shape
        self._data = kernels.pack(weight, bits)
        self._bias = None if bias is None else own_floats(bias)
        bias_at = None if self._bias is None else self._bias.data_ptr()
        self.struct = WeightStruct(self._data.data_ptr(), bias_at, self.outputs, self.inputs, bits)
        self.reference = ctypes.byref(self.struct)

    def multiply(self, x: Tensor) -> Tensor:
        """x [..., inputs] -> float32 [..., outputs]."""
        rows = x.reshape(-1, self.inputs).float().contiguous()
        y = torch.empty(len(rows), self.outputs)
        memory = self._kernels.working_memory(self._memory(self.reference, len(rows)))
        self._linear(self.reference, rows.data_ptr(), len(rows), y.data_ptr(), memory)
        return y.view(*x.shape[:-1], self.outputs)

    @property
    def nbytes(self) -> int:
        """What one pass reads."""
        return self._data.numel()


@dataclass(frozen=True, slots=True, eq=False)
class LayerParts:
    """One decoder layer (modules/layers.py): its norms in the order of NORMS, linears, how many slots a slot sees (0:
    all), and how it turns. gate_up, down: of each expert, whom the router [experts, D] chooses; without one there is
    one MLP.
    """

    norms: Sequence[Tensor | None]
    qkv: PackedWeight
    o: PackedWeight
    gate_up: Sequence[PackedWeight]
    down: Sequence[PackedWeight]
    router: Tensor | None
    window: int
    rope: Rope


# down and up of a linear's adapter; None where it has none.
PackedPair = tuple[PackedWeight, PackedWeight] | None


class PackedAdapters:
    """Adapters of decoder layers, as the kernels read them. pairs: of qkv, o, gate_up and down of each layer.

    rank: the largest, and at least 1 group.
    """

    def __init__(self, pairs: Sequence[PackedPair]) -> None:
        self._held = pairs
        self.rank = max((down.outputs for down, _ in filter(None, pairs)), default=GROUP)
        structs = (
            AdapterStruct() if pair is None else AdapterStruct(*(weight.struct for weight in pair)) for pair in pairs
        )
        self.structs = (AdapterStruct * len(pairs))(*structs)


class PackedLayers:
    """Decoder layers, as the kernels read them."""

    def __init__(
        self, config: TrunkConfig, parts: Sequence[LayerParts], composed: PackedAdapters | None = None
    ) -> None:
        """composed: what slots of several tokens pass."""
        self.composed = composed
        self._geometry = GeometryStruct.of(config)
        self.geometry = ctypes.byref(self._geometry)
        self.weights = [weight for part in parts for weight in (part.qkv, part.o, *part.gate_up, *part.down)]
        self._floats: list[Tensor] = []  # keeps them alive, as the next ones
        self._experts: list[ctypes.Array[ExpertStruct]] = []
        self.structs = (LayerStruct * len(parts))(*(self._layer(part) for part in parts))

    def _layer(self, part: LayerParts) -> LayerStruct:
        norms = [self._held_at(norm) for norm in part.norms]
        qkv, o, router = part.qkv.struct, part.o.struct, self._held_at(part.router)
        mlps = [
            ExpertStruct(gate_up.struct, down.struct) for gate_up, down in zip(part.gate_up, part.down, strict=True)
        ]
        one, experts = mlps[0], None
        if router is not None:
            self._experts.append((ExpertStruct * len(mlps))(*mlps))
            one, experts = ExpertStruct(), ctypes.addressof(self._experts[-1])
        return LayerStruct(*norms, qkv, o, one.gate_up, one.down, router, experts, part.window, ROPES.index(part.rope))

    def _held_at(self, tensor: Tensor | None) -> int | None:
        """The address of its float32 numbers, which live as long as this; None for none."""
        if tensor is None:
            return None
        self._floats.append(own_floats(tensor))
        return self._floats[-1].data_ptr()


def pack_layers(
    kernels: Kernels,
    config: TrunkConfig,
    layers: nn.ModuleList,
    bits: int | None,
    fill: Callable[[int], None] | None = None,
    *,
    of_trunk: bool,
) -> PackedLayers:
    """The layers' weights for the kernels; they leave `layers` as they are packed, so that memory peaks by one.

    fill: gives a layer its weights before it is packed; None: they are there.
    of_trunk: they are the trunk's, some of which may have a window or turn in their own way; else the micro decoder's.
    """

    def pack(linear: nn.Module) -> PackedWeight:
        weight, bias = weights_of(linear)
        return PackedWeight(kernels, weight, bias, bits or (4 if has_4_bits(weight) else 8))

    parts, adapters = [], list[PackedPair]()
    for i in range(len(layers)):
        if fill is not None:
            fill(i)
        layer = layers[i]
        assert isinstance(layer, DecoderLayer)
        for child in layer.children():
            if isinstance(child, LowRank):  # in the order of qkv, o, gate_up and down
                down, up = (PackedWeight(kernels, *weights_of(linear), 8) for linear in (child.down, child.up))
                adapters.append((down, up))
        mlps = [layer] if layer.experts is None else [mlp for mlp in layer.experts.each if isinstance(mlp, Expert)]
        parts.append(
            LayerParts(
                norms=[None if (norm := getattr(layer, name)) is None else norm.weight for name in NORMS],
                window=(config.sliding_window or 0) if of_trunk and i in config.sliding_layers else 0,
                rope=config.rope_of(i) if of_trunk else "main",
                qkv=pack(layer.qkv_proj),
                o=pack(layer.o_proj),
                gate_up=[pack(mlp.gate_up_proj) for mlp in mlps],
                down=[pack(mlp.down_proj) for mlp in mlps],
                router=None if layer.experts is None else layer.experts.router.weight,
            )
        )
        layers[i] = nn.Identity()
    return PackedLayers(config, parts, PackedAdapters(adapters) if adapters else None)
