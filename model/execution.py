"""Execution: what computes a model's numbers, beside plain torch. What is chosen here changes rounding, not meaning."""

from __future__ import annotations

from dataclasses import dataclass

from hamburger.model.cpu.library import Kernels
from hamburger.model.gpu.availability import AttentionBackend


@dataclass(frozen=True, slots=True)
class Execution:
    """Plain torch unless told otherwise.

    packed: linear weights laid out for CPU inference (cpu/onednn.py); None means wherever that can be had and nothing
        else has a form for them.
    kernels: run on these compiled ones instead (cpu/); states are float32 then. bits: of the trunk's weights with them,
        4 or 8; None takes 4 for those that have no more. draft_bits: of the micro decoder's; 4 where its tokens are
        only drafts, which the trunk checks: a micro-step reads a quarter less then.
    static_shapes: groups are made in them (emission/static.py); None means on a GPU, which would wait for its host
        otherwise.
    attention: what attention and the rest between the matrices run on, where no kernels do (gpu/availability.py).
    int8: linears of trunk and micro decoder and the micro-steps' head in 8 bits on a GPU (gpu/int8.py); first tokens,
        stop head and embedder keep the dtype.
    """

    packed: bool | None = None
    kernels: Kernels | None = None
    bits: int | None = None
    draft_bits: int = 8
    static_shapes: bool | None = None
    attention: AttentionBackend = "torch"
    int8: bool = False


DEFAULT = Execution()
