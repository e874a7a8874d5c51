"""A checkpoint's quantised weights as numbers, under the names of those that are not quantised.

The layouts are those that AutoAWQ, GPTQModel, compressed-tensors and transformers write; a weight is
scale * (code - zero) in each.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from hamburger.model.checkpoints.lazy_tensors import Lazy, LazyTensors
from hamburger.model.checkpoints.quantised.methods import Method, Quantisation
from hamburger.model.checkpoints.sources import CheckpointError

T = TypeVar("T")

# What a quantised weight is called.
_KINDS: dict[Method, tuple[str, ...]] = {
    "fp8": ("weight",),
    "modelopt": ("weight",),
    "compressed-tensors": ("weight", "weight_packed"),
    "awq": ("qweight",),
    "gptq": ("qweight",),
}
_BYTES = (torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
# What belongs to a quantised weight and is read with it.
_OF_WEIGHT = {
    *("scales", "qzeros", "g_idx"),
    *("weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape", "weight_g_idx"),
}
# How inputs, outputs and the KV cache would be rounded.
_OF_ROUNDING = {f"{of}_{what}" for of in ("input", "output", "k", "v", "q") for what in ("scale", "zero_point")}
_LEFT_OUT = _OF_WEIGHT | _OF_ROUNDING | {"activation_scale", "kv_scale"}
_AT_ONCE = 1 << 15  # numbers that are computed together, which torch gives to one thread


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a file holds of one linear."""

    tensors: Mapping[str, Tensor]
    linear: str
    where: str

    def checked(self, compute: Callable[[], T]) -> T:
        """Raises CheckpointError where parts are missing or do not fit."""
        try:
            return compute()
        except KeyError as error:
            raise CheckpointError(
                f"{self.where}: {error.args[0]}, a part of a quantised weight, is missing."
            ) from error
        except (RuntimeError, IndexError, TypeError, ValueError, ArithmeticError) as error:
            message = f"{self.linear}: the parts of its quantised weight do not fit: {error}"
            raise CheckpointError(f"{self.where}: {message}") from error

    def __getitem__(self, part: str) -> Tensor:
        return self.tensors[f"{self.linear}.{part}"]

    def get(self, part: str) -> Tensor | None:
        return self.tensors.get(f"{self.linear}.{part}")


def unquantised(
    quantisation: Quantisation, tensors: Mapping[str, Tensor], dtype: torch.dtype, where: str
) -> LazyTensors:
    """The tensors with a weight [out, in], in `dtype`, for each quantised one, and without what belongs to those.

    Raises CheckpointError, some when a weight is asked for, that names the linear of which a part is missing or has a
    shape that does not fit.
    """
    found: dict[str, Tensor | Lazy] = {}
    for name, tensor in tensors.items():
        linear, _, part = name.rpartition(".")
        if part in _LEFT_OUT:
            continue
        if part not in ("qweight", "weight_packed") and not (part == "weight" and tensor.dtype in _BYTES):
            found[name] = tensor
            continue
        parts = _Parts(tensors, linear, where)
        shape = parts.checked(partial(_shape, quantisation, part, parts))
        make = partial(parts.checked, partial(_weight, quantisation, part, parts, dtype))
        found[f"{linear}.weight"] = Lazy(shape, dtype, make)
    return LazyTensors(found)


def idle_biases(tensors: Mapping[str, Tensor], wanted: Container[str]) -> set[str]:
    """Biases of zeros that are not among `wanted`, which AutoGPTQ wrote for each linear."""
    biases = (name for name in tensors if name.endswith(".bias") and name not in wanted)
    return {name for name in biases if not tensors[name].any()}


def _shape(quantisation: Quantisation, kind: str, parts: _Parts) -> tuple[int, ...]:
    """[out, in] of the weight, of which nothing is computed. Raises ValueError for one of another method."""
    if kind not in _KINDS[quantisation.method]:
        raise ValueError(f"{quantisation.method} has no {kind} of {parts[kind].dtype}")
    if kind == "weight_packed":
        outputs, inputs = parts["weight_shape"].tolist()
        return outputs, inputs
    rows, columns = parts[kind].shape
    if kind == "weight":
        return rows, columns
    return (8 * columns, rows) if quantisation.method == "awq" else (columns, rows * 32 // (quantisation.bits or 4))


def _weight(quantisation: Quantisation, kind: str, parts: _Parts, dtype: torch.dtype) -> Tensor:
    """[out, in], contiguous. Raises KeyError for a missing part, and others for shapes that do not fit."""
    match kind:
        case "weight":
            codes = _of_bytes(parts, quantisation.block)
        case "weight_packed":
            codes = _packed(parts)
        case _ if quantisation.method == "awq":
            codes = _awq(parts)
        case _:
            codes = _gptq(parts, quantisation.bits or 4, plus_one=quantisation.plus_one)
    return codes.numbers(dtype)


@dataclass(frozen=True, slots=True)
class _Codes:
    """codes [out, in] of a byte each; zero, scale [rows, groups] of blocks (outputs, inputs), None: as shapes say it;
    group_of: of each input, None or -1: in order."""

    codes: Tensor
    zero: Tensor
    scale: Tensor
    block: tuple[int, int] | None = None
    group_of: Tensor | None = None

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """scale * (code - zero), computed in float32 for a few rows at a time, which stay in the caches."""
        outputs, inputs = self.codes.shape
        found = torch.empty(outputs, inputs, dtype=dtype)
        zero, scale = (self._of_rows(values) for values in (self.zero, self.scale))
        step = max(1, _AT_ONCE // inputs)
        for first in range(0, outputs, step):
            rows = slice(first, first + step)
            values = self.codes[rows].float()
            self._grouped(values, zero).sub_(zero[rows, :, None])
            self._grouped(values, scale).mul_(scale[rows, :, None])
            found[rows] = values
        return found

    def _of_rows(self, values: Tensor) -> Tensor:
        """A value of each output and group, float32: [out, groups]; of each input where their groups are not even."""
        values = values.float()
        values = values.reshape(-1, 1) if values.dim() < 2 else values
        outputs, inputs = self.codes.shape
        if len(values) not in (1, outputs):
            values = values[_blocks(len(values), outputs, None if self.block is None else self.block[0])]
        values = values.expand(outputs, -1)
        groups = values.shape[1]
        if groups > 1 and self.group_of is not None and not (self.group_of < 0).all():
            return values[:, self.group_of.long()]
        if groups not in (1, inputs) and (self.block is not None or inputs % groups):
            return values[:, _blocks(groups, inputs, None if self.block is None else self.block[1])]
        return values

    @staticmethod
    def _grouped(values: Tensor, of_groups: Tensor) -> Tensor:
        """[n, in] -> [n, groups, in of each], a view."""
        grouped: Tensor = values.unflatten(1, (of_groups.shape[1], -1))
        return grouped


def _of_bytes(parts: _Parts, block: tuple[int, int] | None) -> _Codes:
    """weight [out, in] of a byte each; weight_scale or weight_scale_inv of all, of outputs, groups or blocks;
    weight_g_idx [in], the group of each input."""
    scale, zero = parts.get("weight_scale_inv"), parts.get("weight_zero_point")
    scale = parts["weight_scale"] if scale is None else scale
    zero = torch.zeros(1) if zero is None else zero
    return _Codes(parts["weight"], zero, scale, block, group_of=parts.get("weight_g_idx"))


def _packed(parts: _Parts) -> _Codes:
    """weight_packed int32 [out, words] of codes that are more than what they stand for by half of their range;
    weight_scale [out, groups]; weight_zero_point, packed along outputs, or as it is [out, groups]; weight_g_idx [in],
    the group of each input."""
    packed, zero = parts["weight_packed"], parts.get("weight_zero_point")
    outputs, inputs = parts["weight_shape"].tolist()
    bits = 4 if packed.shape[1] == -(-inputs // 8) else 8
    half = 1 << (bits - 1)
    if zero is None:
        zero = torch.tensor([half])
    elif zero.dtype == torch.int32:
        zero = _unpacked(zero.T, bits)[:, :outputs].T
    else:
        zero = zero.float() + half
    codes = _unpacked(packed, bits)[:, :inputs]
    return _Codes(codes, zero, parts["weight_scale"], group_of=parts.get("weight_g_idx"))


def _gptq(parts: _Parts, bits: int, *, plus_one: bool) -> _Codes:
    """qweight int32 [words of in, out], qzeros [groups, words of out], scales [groups, out], g_idx [in]."""
    scale, zeros = parts["scales"].T, parts["qzeros"]
    if plus_one:  # of whole words, as it was subtracted: a zero of 0 had borrowed from its neighbour
        zeros = zeros + sum(1 << shift for shift in range(0, 32, bits))
    zero = _unpacked(zeros, bits).T[: len(scale)]
    return _Codes(_unpacked(parts["qweight"].T, bits), zero, scale, group_of=parts.get("g_idx"))


def _awq(parts: _Parts) -> _Codes:
    """qweight int32 [in, words of out], qzeros [groups, words of out], scales [groups, out]. Of 8 outputs a word has
    those of even places first: 0, 2, 4, 6, 1, 3, 5, 7."""
    codes, zero = (
        torch.stack([((words >> shift) & 15).to(torch.uint8) for shift in (0, 16, 4, 20, 8, 24, 12, 28)], 1)
        for words in (_words(parts[part].T) for part in ("qweight", "qzeros"))
    )
    return _Codes(codes.flatten(0, 1), zero.flatten(0, 1), parts["scales"].T)


def _blocks(number: int, size: int, length: int | None) -> Tensor:
    """int64 [size]: which of `number` blocks each is in. Raises ValueError where they do not fit."""
    length = size // number if length is None else length
    if length < 1 or -(-size // length) != number:
        raise ValueError(f"{number} scales or zeros for {size} inputs or outputs")
    return torch.arange(size) // length


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """int32 [n, words] -> uint8 [n, words * 32 / bits], the lowest bits of a word first. Raises ValueError."""
    found = _words(words).view(torch.uint8)
    parts = [(found >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, dim=-1).flatten(-2)


def _words(found: Tensor) -> Tensor:
    """Contiguous. Raises ValueError."""
    if found.dtype != torch.int32 or found.dim() != 2:
        raise ValueError(f"codes are words of int32 in two dimensions, not {found.dtype} in {found.dim()}")
    return found.contiguous()
