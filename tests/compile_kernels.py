"""Compiles every Triton kernel down to machine code for NVIDIA GPUs, without one: the interpreter checks no types.

    python tests/compile_kernels.py 80 90     # compute capabilities; one line for each kernel

Run without TRITON_INTERPRET, so in a process of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from hamburger.model import triton_attention, triton_int8, triton_layers, triton_micro, triton_micro_step

_INTEGERS = {
    "at": "*i64", "write_slots": "*i64", "context_slots": "*i64", "tables": "*i64", "contexts": "*i64",
    "tiles": "*i64", "rows": "*i64", "table_width": "i32", "singles": "i32", "splits": "i32", "length": "i32",
    "eps": "fp32", "scale": "fp32", "partial": "*fp32", "sums": "*fp32",
    "arrived": "*i64", "places": "i32", "first": "i32", "last": "i32",
    "codes": "*i8", "scales": "*fp32", "num_rows": "i32", "outputs": "i32", "inputs": "i32", "steps": "i32",
}  # fmt: skip
_MULTIPLES_OF_16 = ("outputs", "inputs")  # which kernels are compiled for where they are


def cases() -> Iterator[tuple[str, Any, dict[str, int], dict[str, int]]]:
    """(name, kernel, constants, options of the launch), as the wrappers launch them for bfloat16."""
    for group, head_dim, window, splits, norms, new in (
        (4, 64, 0, 8, False, 5),
        (1, 80, 128, 1, True, 1),
    ):
        half, block_d = 1 << (head_dim // 2 - 1).bit_length(), 1 << (head_dim - 1).bit_length()
        block_g = 1 << (group - 1).bit_length()
        name = f"groups of {group}, head_dim {head_dim}"
        heads = {"KV_HEADS": 8, "GROUP": group, "HEAD_DIM": head_dim}
        paged = {"WINDOW": window, "BLOCK_SIZE": 32, **heads, "BLOCK_D": block_d, "BLOCK_N": 64}
        decode = {**paged, "IS_SPLIT": splits > 1, "BLOCK_G": 1 if group == 1 else 16}
        yield f"decode {name}", triton_attention._decode, decode, {"num_warps": 4, "num_stages": 3}
        chunks = {**paged, "FIELDS": triton_attention.TILE_FIELDS, "BLOCK_M": 64}
        yield f"chunks {name}", triton_attention._chunks, chunks, {"num_warps": 4, "num_stages": 2}
        merge = {"WINDOW": window, "HEADS": 8 * group, "HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_N": 64,
                 "MOST": triton_attention.MAX_SPLITS}  # fmt: skip
        yield f"merge {name}", triton_attention._merge, merge, {"num_warps": 4}
        rotary = {"HEADS": 8 * group, "KV_HEADS": 8, "HEAD_DIM": head_dim, "BLOCK_HEADS": 16, "BLOCK_HALF": half,
                  "NORMS": norms}  # fmt: skip
        yield f"rotary {name}", triton_layers._rotary, rotary, {"num_warps": 2}
        micro = {"NEW": new, "FIRST": new - 1, "POSITIONS": 8, **heads, "BLOCK_G": block_g, "BLOCK_P": 8,
                 "BLOCK_HALF": half, "NORMS": norms}  # fmt: skip
        yield f"micro {name}", triton_micro._micro, micro, {"num_warps": 2}
        fused = new == 1
        whole = {"SIZE": 2048, "WIDE": 8192, **{k: v for k, v in micro.items() if k not in ("NEW", "FIRST", "NORMS")},
                 "FUSED": fused, "QK_NORMS": norms, "QKV_BIAS": norms, "O_BIAS": norms, "MLP_BIAS": norms,
                 "WAITS": True, "STAGES": 5, "BLOCK_R": triton_micro_step.MOST_ROWS, "BLOCK_N": 16,
                 "BLOCK_K": 256}  # fmt: skip
        together = {"num_warps": 4, "num_stages": 4, "launch_cooperative_grid": True}
        yield f"micro-step {name}", triton_micro_step._micro_step, whole, together
    whole |= {"SIZE": 576, "WIDE": 1536, "KV_HEADS": 3, "GROUP": 3, "HEAD_DIM": 64, "POSITIONS": 3, "BLOCK_G": 4,
              "BLOCK_P": 4, "BLOCK_HALF": 32, "QK_NORMS": False, "QKV_BIAS": False, "O_BIAS": False,
              "MLP_BIAS": False}  # fmt: skip
    yield "micro-step of the embedded default", triton_micro_step._micro_step, whole, together
    norm = {"SIZE": 2048, "BLOCK": 2048, "WEIGHTS": 1, "ADDS": True}
    yield "norm", triton_layers._add_rms_norm, norm, {"num_warps": 4}
    yield "gated", triton_layers._gated, {"SIZE": 8192, "BLOCK": 1024}, {}
    for form, split in zip(triton_int8.FORMS, (True, False, False), strict=True):
        multiply = {"IS_SPLIT": split, "HAS_BIAS": not split, "BLOCK_R": form.block_rows,
                    "BLOCK_N": form.block_outputs, "BLOCK_K": form.block_inputs}  # fmt: skip
        options = {"num_warps": form.num_warps, "num_stages": form.num_stages}
        yield f"int8 for {form.rows} rows", triton_int8._multiply, multiply, options
    yield "int8 parts", triton_int8._add_parts, {"HAS_BIAS": True, "BLOCK_N": 256}, {"num_warps": 2}


def main(capabilities: list[str]) -> None:
    for capability in map(int, capabilities):
        for name, kernel, constants, options in cases():
            signature = {
                parameter: "constexpr" if parameter in constants else _INTEGERS.get(parameter, "*bf16")
                for parameter in kernel.arg_names
            }
            aligned = {
                (i,): [["tt.divisibility", 16]]  # as torch's memory is
                for i, (parameter, kind) in enumerate(signature.items())
                if kind.startswith("*") or parameter in _MULTIPLES_OF_16
            }
            source = ASTSource(kernel, signature, constants, aligned)
            compiled = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            shared, code = compiled.metadata.shared, len(compiled.asm["cubin"])
            print(f"sm_{capability} {name}: {code} bytes of code, {shared} bytes shared")


if __name__ == "__main__":
    main(sys.argv[1:])
