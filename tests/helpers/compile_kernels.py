"""Compiles every Triton kernel down to machine code for NVIDIA GPUs, without one: the interpreter checks no types.

    python tests/helpers/compile_kernels.py 80,86,89,90 bfloat16,float16,float32 [PATTERN OF NAMES]

One line for each kernel, compute capability and dtype. Ends with 1 where one wants more shared memory than a program
may have there. Run without TRITON_INTERPRET, so in a process of its own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from hamburger.model.gpu import attention as triton_attention
from hamburger.model.gpu import chunk_attention as triton_chunks
from hamburger.model.gpu import int8_product
from hamburger.model.gpu import layers as triton_layers
from hamburger.model.gpu import micro_attention as triton_micro
from hamburger.model.kv_cache import KVLayer, Lending

MODULES = triton_attention, triton_chunks, int8_product, triton_layers, triton_micro
# Bytes of shared memory that a program may have, by compute capability.
SHARED = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
_TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int64: "*i64", torch.int8: "*i8",
}  # fmt: skip
# (query heads, KV heads, head_dim, window)
GROUPS, SINGLE = (32, 8, 64, None), (8, 8, 80, 128)  # one query head for a KV head
WIDE = (32, 4, 128, None), (8, 4, 256, 512)
EMBEDDED = (9, 3, 64, None)  # the default model's
Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]  # kernel, its arguments, its constants and options


class _Recorder:
    """In place of a kernel: keeps what it is launched with."""

    def __init__(self, kernel: Any, found: list[Launch]) -> None:
        self._kernel, self._found = kernel, found

    def __getitem__(self, grid: object) -> _Recorder:
        return self

    def __call__(self, *args: Any, **named: Any) -> None:
        self._found.append((self._kernel, args, named))


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """All launches in this context, none of which runs."""
    found: list[Launch] = []
    kernels = [
        (module, name, value) for module in MODULES for name, value in vars(module).items() if hasattr(value, "fn")
    ]
    for module, name, kernel in kernels:
        setattr(module, name, _Recorder(kernel, found))
    try:
        yield found
    finally:
        for module, name, kernel in kernels:
            setattr(module, name, kernel)


def launch_all(dtype: torch.dtype) -> Iterator[str]:
    """Call what launches kernels, as for a model of that dtype; yields a name after each call."""

    def new(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    def whole(*shape: int) -> Tensor:
        return new(*shape, of=torch.int64)

    def layers(*heads: int) -> Iterator[tuple[str, KVLayer]]:
        """Of a cache, and what its kind is called."""
        scales = new(9, 32, 2, heads[0], of=torch.float32)
        lending = Lending(whole(2, heads[0]), whole(heads[0]), whole(heads[0]), kept=16, lent=12)
        for kind, lends in (("", None), (", lent places", lending)):
            yield kind, KVLayer(new(9, 32, 2, *heads), None, lends)
            yield f", int8 KV{kind}", KVLayer(new(9, 32, 2, *heads, of=torch.int8), scales, lends)

    for heads, kv_heads, head_dim, window in (GROUPS, SINGLE, *WIDE):
        shape = f"{heads}/{kv_heads} heads of {head_dim}"
        tables, tokens, settled = whole(2, 4), new(8, heads, head_dim), (whole(2), whole(2))
        for kind, layer in layers(kv_heads, head_dim):
            for splits in (1, 8):
                triton_attention.attend_singles(tokens, layer, tables, whole(2), tokens, splits, window, settled)
                yield f"decode {shape}, {splits} splits{kind}"
            tiles = whole(3, triton_chunks.TILE_FIELDS)
            triton_chunks.attend_chunks(tokens, layer, tables, tiles, tokens, window, settled)
            yield f"chunks {shape}{kind}"
    for heads, kv_heads, head_dim, window in (GROUPS, SINGLE, EMBEDDED):
        shape, normed = f"{heads}/{kv_heads} heads of {head_dim}", window is not None
        turns = new(64, head_dim), new(64, head_dim)
        norms = (new(head_dim), new(head_dim)) if normed else None
        qkv = new(10, (heads + 2 * kv_heads) * head_dim)
        for kind, layer in layers(kv_heads, head_dim):
            triton_layers.rotate_into_cache(qkv, turns, whole(10), norms, 1e-5, layer, whole(10), whole(2), 2, heads)
            yield f"rotary {shape}{kind}"
        kv = new(2, 8, 2, kv_heads, head_dim)
        for length, positions in ((0, 5), (5, 1)):
            triton_micro.micro_attention(
                qkv[: 2 * positions], turns, norms, 1e-5, kv, whole(2), length, positions, heads, last_only=length == 0
            )
            yield f"micro {shape}, {positions} positions"
    triton_layers.add_rms_norm(new(2, 2048), new(2, 2048), new(2048), 1e-5)
    yield "norm"
    for activation in ("silu", "gelu_tanh"):
        triton_layers.gated(new(2, 2 * 8192), activation)
        yield f"gated {activation}"
    for rows in int8_product.ROWS_OF_ALL:
        int8_product.multiply_into(
            new(rows, 2048), new(rows, 8192), new(2048, 8192, of=torch.int8), new(2048, 1, of=torch.float32),
            new(2048) if rows == 1 else None, 132,
        )  # fmt: skip
        yield f"int8 for {rows} rows"


def cases(dtype: torch.dtype) -> list[tuple[str, Launch]]:
    """Every launch that is compiled anew, by name."""
    cases: dict[tuple[object, ...], tuple[str, Launch]] = {}
    with recorded() as found:
        for name in launch_all(dtype):
            for kernel, args, named in found:
                key = kernel.__name__, *map(_kind, args), *named.items()
                cases.setdefault(key, (f"{kernel.__name__.strip('_')}: {name}", (kernel, args, named)))
            found.clear()
    return list(cases.values())


def _kind(argument: object) -> str:
    if isinstance(argument, Tensor):
        return _TYPES[argument.dtype]
    return "i32" if isinstance(argument, int) else "fp32"


def compiled(launch: Launch, capability: int) -> tuple[int, int]:
    """Bytes of code, and of shared memory."""
    kernel, args, named = launch
    constants = {name: named[name] for name in kernel.arg_names if name in named}
    options = {name: value for name, value in named.items() if name not in constants}
    given = dict(zip([name for name in kernel.arg_names if name not in constants], args, strict=True))
    signature = {name: _kind(given[name]) if name in given else "constexpr" for name in kernel.arg_names}
    aligned = {}
    for parameter in kernel.params:  # as torch's memory is
        argument = given.get(parameter.name)
        if isinstance(argument, Tensor):
            is_aligned = not parameter.do_not_specialize_on_alignment
        else:
            is_aligned = isinstance(argument, int) and not parameter.do_not_specialize and argument % 16 == 0
        if is_aligned:
            aligned[(parameter.num,)] = [["tt.divisibility", 16]]
    made = compile(
        ASTSource(kernel, signature, constants, aligned), target=GPUTarget("cuda", capability, 32), options=options
    )
    return len(made.asm["cubin"]), made.metadata.shared


def main(capabilities: str, dtypes: str = "bfloat16", names: str = "") -> int:
    too_large = 0
    for dtype in dtypes.split(","):
        for name, launch in cases(getattr(torch, dtype)):
            for capability in map(int, capabilities.split(",")):
                if not re.search(names, name):
                    continue
                code, shared = compiled(launch, capability)
                too_large += shared > SHARED[capability]
                remark = "" if shared <= SHARED[capability] else ": TOO MUCH"
                print(f"sm_{capability} {dtype} {name}: {code} bytes of code, {shared} shared{remark}", flush=True)
    return int(too_large > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
