"""Milliseconds of one linear in bfloat16 and int8, by the number of rows, over random weights.

    python benchmarks/start.py gpu_suite.linear --shapes 3072x2048,2048x8192 --rows 1,16,64,256,512,1024

A shape is outputs x inputs (these are Llama-3.2-1B's). `kernels` reads the codes, `written out` writes the weight in
bfloat16 and lets cuBLAS multiply: where they meet, model/gpu/int8_product.py should change from the first to the other
(MOST_ROWS). The GPU's cache is emptied between calls, since a model's weights do not fit into it. On a CPU the product
is spelt out, which proves this script and no speed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hamburger.model.gpu.int8 import Int8Linear

SHAPES = "3072x2048,2048x2048,16384x2048,2048x8192"
ROWS = "1,2,4,8,16,32,64,128,256,512,1024,2048,4096"
REPEATS = 5  # on a CPU


def forms_of(weight: Tensor, rows: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """What is timed with so many rows, by name."""
    eight_bits = {f"int8 {how}": form for how, form in products(Int8Linear.of(weight, None), rows).items()}
    return {"bfloat16": lambda x: F.linear(x, weight), **eight_bits}


def products(linear: Int8Linear, rows: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """What could compute a linear of 8 bits."""
    codes, scales = linear.codes, linear.scales
    if not codes.is_cuda:
        return {"spelt out": linear}
    from hamburger.model.gpu.int8_product import MOST_ROWS, multiply_into, written_out

    processors = torch.cuda.get_device_properties(codes.device).multi_processor_count

    def by_kernels(x: Tensor) -> Tensor:
        y = x.new_empty(len(x), len(codes))
        multiply_into(y, x, codes, scales, None, processors)
        return y

    found: dict[str, Callable[[Tensor], Tensor]] = {"written out": lambda x: written_out(x, codes, scales, None)}
    if rows <= MOST_ROWS:
        found["kernels"] = by_kernels
    return found


def milliseconds(work: Callable[[], Tensor], on_gpu: bool) -> float:
    """The median of one call."""
    if on_gpu:
        import triton.testing

        return float(triton.testing.do_bench(work, return_mode="median"))
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return 1000 * statistics.median(times)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES, help="OUTPUTSxINPUTS, with commas between them")
    parser.add_argument("--rows", default=ROWS, help="with commas between them")
    args = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    for shape in args.shapes.split(","):
        outputs, inputs = map(int, shape.split("x"))
        weight = (torch.randn(outputs, inputs, device=device) * inputs**-0.5).bfloat16()
        for rows in map(int, args.rows.split(",")):
            x = torch.randn(rows, inputs, device=device).bfloat16()
            found = {
                name: round(milliseconds(lambda form=form, x=x: form(x), device.type == "cuda"), 4)  # type: ignore[misc]
                for name, form in forms_of(weight, rows).items()
            }
            print(json.dumps({"device": device.type, "shape": shape, "rows": rows, "milliseconds": found}), flush=True)


if __name__ == "__main__":
    main()
