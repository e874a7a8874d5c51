"""What this machine can do at best: products of bytes, of floats, and bytes read from memory, a second.

Measured by a small program (rates.cpp) that is compiled for the processor at hand: the best of some repeats, on as many
threads as the model has.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parent / "rates.cpp"
READ_BYTES = 1 << 30  # far beyond any cache
REPEATS = 7


class NoRates(Exception):
    """They cannot be measured here; its text says why."""


@dataclass(frozen=True, slots=True)
class Rates:
    """A second, by all threads: products of bytes that are summed (VNNI, or AVX2's multiply and add), of 4-bit codes
    with bytes (the same for VNNI; AVX2 sums them in 16 bits, at twice the rate), of floats (of bfloat16, summed in
    floats, where the processor has AVX512-BF16), and bytes that are read in order from memory."""

    byte_products: float
    code_products: float
    float_products: float
    bytes_read: float

    def seconds(
        self,
        num_bytes: float,
        byte_products: float = 0.0,
        code_products: float = 0.0,
        float_products: float = 0.0,
    ) -> float:
        """The roofline: what such work takes at least, the larger of its bytes' and its operations' time."""
        computed = byte_products / self.byte_products + code_products / self.code_products
        computed += float_products / self.float_products
        return max(num_bytes / self.bytes_read, computed)


def measure_rates(threads: int, read_bytes: int = READ_BYTES, repeats: int = REPEATS) -> Rates:
    """Some seconds. Raises NoRates where there is no C++ compiler, or another kind of processor."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise NoRates("the machine's rates are measured by a C++ program, and no compiler (c++, g++) was found.")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rates.so"
        command = [compiler, "-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", str(SOURCE)]
        made = subprocess.run([*command, "-o", str(path)], capture_output=True, text=True)
        if made.returncode:
            raise NoRates(f"the program that measures the machine's rates was not compiled: {made.stderr[-400:]}")
        library = ctypes.CDLL(str(path))
    for name in ("byte_products", "code_products", "float_products", "bytes_read"):
        getattr(library, name).restype = ctypes.c_double
    library.bytes_read.argtypes = (ctypes.c_int, ctypes.c_int64)
    return Rates(
        max(library.byte_products(threads) for _ in range(repeats)),
        max(library.code_products(threads) for _ in range(repeats)),
        max(library.float_products(threads) for _ in range(repeats)),
        max(library.bytes_read(threads, read_bytes) for _ in range(repeats)),
    )
