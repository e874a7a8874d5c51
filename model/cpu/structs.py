"""What the compiled kernels are passed: the structs of kernels/structs.h, which says what their fields are.

The library is asked how they are laid out when it is loaded (library.py): a field that stands elsewhere in a mirror
would be read from the wrong bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import zip_longest
from typing import Self

from torch import Tensor

from hamburger.model.config import Rope, TrunkConfig
from hamburger.model.settled_places import SettledPlaces

_pointer, _int32, _int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
ROPES: tuple[Rope, ...] = ("main", "local", "none")  # a batch's angles
NORMS = ("attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm", "q_norm", "k_norm")  # a layer's, in this order
_SUFFIX = "Struct"  # what a mirror's name has beyond that of the struct


class WeightStruct(ctypes.Structure):
    _fields_ = (("data", _pointer), ("bias", _pointer), ("outputs", _int32), ("inputs", _int32), ("bits", _int32))


class AdapterStruct(ctypes.Structure):
    _fields_ = (("down", WeightStruct), ("up", WeightStruct))


class AnglesStruct(ctypes.Structure):
    _fields_ = tuple((name, _pointer) for name in ("cos", "sin", "positions"))

    @classmethod
    def of(cls, tables: tuple[Tensor, Tensor], positions: Tensor | None) -> Self:
        """float32 and int64, contiguous; they must outlive what is made."""
        cos, sin = tables
        return cls(cos.data_ptr(), sin.data_ptr(), None if positions is None else positions.data_ptr())


class ExpertStruct(ctypes.Structure):
    _fields_ = (("gate_up", WeightStruct), ("down", WeightStruct))


class LayerStruct(ctypes.Structure):
    _fields_ = (
        *((name, _pointer) for name in NORMS),
        *((name, WeightStruct) for name in ("qkv", "o", "gate_up", "down")),
        ("router", _pointer),
        ("experts", _pointer),
        ("window", _int32),
        ("angles", _int32),
    )


class GeometryStruct(ctypes.Structure):
    _fields_ = (
        *((name, _int32) for name in ("hidden", "heads", "kv_heads", "head_dim", "intermediate")),
        ("eps", ctypes.c_float),
        ("wide_norms", _int32),
        ("gelu", _int32),
        *((name, _int32) for name in ("experts", "experts_per_token", "expert_width", "sum_to_one")),
    )

    @classmethod
    def of(cls, config: TrunkConfig) -> Self:
        """A trunk's."""
        experts, mixture = config.experts, (0, 0, 0, 0)
        all_have_experts = all(config.experts_of(layer) is not None for layer in range(config.num_layers))
        intermediate = 0 if all_have_experts else config.intermediate_size
        if experts is not None:
            mixture = experts.number, experts.per_token, experts.width, experts.sum_to_one
        widths = (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, intermediate)
        return cls(*widths, config.rms_norm_eps, config.qk_norm == "width", config.activation == "gelu_tanh", *mixture)


class AdaptedStruct(ctypes.Structure):
    _fields_ = (("count", _int64), ("rows", _pointer), ("rank", _int64), ("adapters", _pointer))


class PlacesStruct(ctypes.Structure):
    _fields_ = (
        *((name, _pointer) for name in ("lenders", "lends")),
        *((name, _int64) for name in ("most", "kept", "lent")),
    )

    @classmethod
    def of(cls, settled: SettledPlaces) -> Self:
        """It must outlive what is made."""
        lenders = settled.lenders
        return cls(lenders.data_ptr(), settled.lends.data_ptr(), lenders.shape[2], settled.kept, settled.lent)


class BatchStruct(ctypes.Structure):
    _fields_ = (
        *((name, _int64) for name in ("slots", "sequences")),
        ("angles", AnglesStruct * len(ROPES)),
        *((name, _pointer) for name in ("write_slots", "block_tables", "context_slots", "query_slots")),
        *((name, _pointer) for name in ("places", "settled_from", "settled_slots")),
        *((name, _int64) for name in ("table_width", "block_size")),
        ("kv_bits", _int32),
        ("kv_scales", _pointer),
        ("emit", _pointer),
        ("emitting", _int64),
        *((name, _pointer) for name in ("features", "norm", "read")),
        ("reading", _int64),
        ("states", _pointer),
        ("adapted", _pointer),
        ("adaptations", _int64),
        ("clock", _pointer),
    )


class MergerStruct(ctypes.Structure):
    _fields_ = (
        *((name, WeightStruct) for name in ("q", "k", "v", "out")),
        ("pos", _pointer),
        *((name, _int32) for name in ("hidden", "heads")),
    )


class EmbeddingStruct(ctypes.Structure):
    _fields_ = (("rows", _pointer), ("bits", _int32), ("width", _int32))

    @classmethod
    def of(cls, table: Tensor) -> Self:
        """[V, D], bfloat16 or float32, contiguous; it must outlive what is made."""
        return cls(table.data_ptr(), 8 * table.itemsize, table.shape[1])

    @classmethod
    def of_head(cls, weight: WeightStruct) -> Self:
        """The rows of a head in 8 bits, which are its embeddings, too; it must outlive what is made."""
        return cls(weight.data, 8, weight.inputs)


class HeadStruct(ctypes.Structure):
    _fields_ = (("weight", WeightStruct), ("coarse", WeightStruct), ("errors", _pointer))


class GraftStruct(ctypes.Structure):
    _fields_ = (
        ("geometry", GeometryStruct),
        ("head", HeadStruct),
        ("layers", _pointer),
        *((name, _int32) for name in ("count", "features", "positions", "fused")),
        *((name, _pointer) for name in ("feature_norm", "embedding_norm")),
        *((name, WeightStruct) for name in ("feature_proj", "embedding_proj")),
        ("norm", _pointer),
        ("stop", WeightStruct * 3),
        *((name, _pointer) for name in ("stop_scale", "stop_bias")),
        ("micro_head", HeadStruct),
        ("short_list", _pointer),
        ("embedding", EmbeddingStruct),
        *((name, _pointer) for name in ("cos", "sin")),
    )


class ChangesStruct(ctypes.Structure):
    _fields_ = (
        ("adjustments", _int64),
        ("adjusted", _pointer),
        ("prompt_ids", _pointer),
        ("prompts", _int64),
        ("output_ids", _pointer),
        ("outputs", _int64),
        *((name, _pointer) for name in ("presence", "frequency", "repetition", "bias_row", "bias_id", "bias")),
        ("biases", _int64),
        *((name, _pointer) for name in ("min_index", "output_index", "end_ids")),
        *((name, _int64) for name in ("ends", "masks")),
        *((name, _pointer) for name in ("masked", "allowed")),
        ("words", _int64),
    )


class EmissionStruct(ctypes.Structure):
    _fields_ = (
        *((name, _int64) for name in ("rows", "width", "ends")),
        *((name, _pointer) for name in ("hidden", "features", "limits", "thresholds", "end_ids", "checks")),
        *((name, _pointer) for name in ("temperatures", "top_k", "top_p", "min_p", "keys")),
        *((name, _pointer) for name in ("changes", "token_ids", "sizes", "stops", "clock")),
    )


class SettlingStruct(ctypes.Structure):
    _fields_ = (
        *((name, _int64) for name in ("layers", "kv_heads", "head_dim", "candidates")),
        *((name, _pointer) for name in ("from", "to", "angles", "probe", "places")),
        ("precision", ctypes.c_float),
        ("kv_bits", _int32),
        ("kv_scales", _pointer),
    )


def pointers(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """Where they lie; the tensors must outlive what is made."""
    return (_pointer * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def check_layouts(library: ctypes.CDLL) -> None:
    """Raises RuntimeError with the first field, or struct, that is not the same in the library and here."""
    text = ctypes.create_string_buffer(2**16)
    library.hb_layouts(text, _int64(len(text)))
    compiled: dict[str, list[str]] = {}
    for line in text.value.decode().splitlines():
        compiled.setdefault(line.partition(":")[0].partition(".")[0], []).append(line)
    mirrors = {name.removesuffix(_SUFFIX): mirror for name, mirror in globals().items() if name.endswith(_SUFFIX)}
    for name in {**compiled, **mirrors}:
        mirrored = _layout(name, mirrors[name]) if name in mirrors else []
        for there, here in zip_longest(compiled.get(name, ()), mirrored, fillvalue=f"no more of {name}"):
            if there != here:
                raise RuntimeError(
                    f"The compiled kernels have {there!r} where model/cpu/structs.py has {here!r}: "
                    "make kernels/structs.h and structs.py the same, and compile the kernels again."
                )


def _layout(name: str, mirror: type[ctypes.Structure]) -> list[str]:
    """What supports.cpp writes of the struct."""
    places = {field: getattr(mirror, field) for field, *_ in mirror._fields_}
    fields = [f"{name}.{field}: {place.size} bytes at {place.offset}" for field, place in places.items()]
    return [*fields, f"{name}: {ctypes.sizeof(mirror)} bytes"]
