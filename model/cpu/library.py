"""The library of compiled kernels (kernels/) for x86-64 processors: found, checked and called.

A group of 32 weights of an output shares a scale (8 bits) or a scale and a zero (4 bits), in half precision. Inputs are
rounded to 8 bits in groups of 32, sums are exact, everything else is float32; but attention multiplies bfloat16 where
the cache holds that and the processor has AVX512-BF16. `TorchBackend` is the plain reference.
The package builds the kernels where it finds a C++ compiler; without them the reference serves.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from hamburger.model.cpu.structs import check_layouts
from hamburger.model.device.host_memory import Arena
from hamburger.model.kernel_shapes import packed_bytes

logger = logging.getLogger(__name__)

InstructionSet = Literal["avx512bf16", "avx512", "avx2"]

_AGAIN = "install the package again (`make setup`, or `pip install -e .`)"
_FORMAT = 20  # of what is passed and packed; supports.cpp says the same
_SETS: tuple[InstructionSet, ...] = ("avx512bf16", "avx512", "avx2")
STAGES = ("norms and rounding", "linears", "attention", "head", "micro-steps")  # kernels/clock.h
_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64


class Kernels:
    """The compiled functions for one instruction set, and the memory they work in. For one thread at a time; `pack`,
    whose memory is its own, may run in another meanwhile.

    clock: int64 of STAGES, to which steps add their nanoseconds; None: none are measured.
    """

    def __init__(self, path: str, instructions: InstructionSet) -> None:
        library = ctypes.CDLL(path)  # finds the OpenMP of torch, which is loaded for all: one pool of threads
        self.instructions = instructions
        self._library = library
        self._pack = self.function("pack", ctypes.c_int, ctypes.c_int, _pointer, _int64, _int64, _pointer)
        self._weights = Arena()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.clock: Tensor | None = None

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
        packed = self._weights.take(packed_bytes(outputs, inputs, bits))
        is_float = weight.dtype == torch.float32
        self._pack(bits, is_float, weight.data_ptr(), outputs, inputs, packed.data_ptr())
        return packed

    def clock_address(self) -> int | None:
        return None if self.clock is None else self.clock.data_ptr()

    def working_memory(self, size: int) -> int:
        """The address of so many bytes, until the next call."""
        if self._memory.numel() < size:
            self._memory = torch.empty(size, dtype=torch.uint8)
        return self._memory.data_ptr()


def load_kernels(instructions: InstructionSet | None = None) -> Kernels | None:
    """The kernels for the best instruction set that this processor has, or for the one named; None, and a warning that
    says why, where they were not built, cannot run, or are of another version. Raises RuntimeError where this version's
    structs are not ours."""
    spec = find_spec("hamburger.model.cpu._kernels")
    if spec is None or spec.origin is None:
        _tell_none(f"the package was built without them; with a C++ compiler {_AGAIN}")
        return None
    try:
        library = ctypes.CDLL(spec.origin)
        if (built := library.hb_format()) != _FORMAT:
            _tell_none(f"{spec.origin} is of another version of this package ({built}, not {_FORMAT}); {_AGAIN}")
            return None
    except (OSError, AttributeError) as error:  # torch without GNU OpenMP; a file that is not our library
        _tell_none(str(error))
        return None
    check_layouts(library)
    for name in _SETS if instructions is None else (instructions,):
        if library.hb_supports(name.encode()):
            return Kernels(spec.origin, name)
    _tell_none(f"this processor has none of the instructions that they need ({instructions or ', '.join(_SETS)})")
    return None


def _tell_none(why: str) -> None:
    logger.warning("No compiled kernels, so plain torch serves, several times slower: %s.", why)
