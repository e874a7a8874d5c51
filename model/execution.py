"""Execution: what computes a model's numbers, beside plain torch. What is chosen here changes rounding, not meaning."""

from __future__ import annotations

from dataclasses import dataclass

from hamburger.model.cpu.library import Kernels
from hamburger.model.gpu.availability import Backend


@dataclass(frozen=True, slots=True)
class Execution:
    """Plain torch unless told otherwise.

    packed: linear weights laid out for CPU inference (onednn.py), the parameters are then gone; None means wherever
        that can be had.
    kernels: run on these compiled ones instead (library.py); states are float32 then. bits: of the trunk's weights with
        them, 4 or 8; None takes 4 for those that have no more.
    masked: emit in static shapes (masked.py); None means on a GPU, which would wait for its host otherwise.
    backend: what attention and the rest between the matrices run on, where no kernels do (availability.py).
    eight_bits: int8 linears of trunk and micro decoder and micro-steps' head on a GPU (int8.py); first
        tokens, stop head and embedder keep the dtype.
    """

    packed: bool | None = None
    kernels: Kernels | None = None
    bits: int | None = None
    masked: bool | None = None
    backend: Backend = "torch"
    eight_bits: bool = False


DEFAULT = Execution()
