"""Triton kernels for products with weights of 8 bits, whose plain reference is int8.py's.

Few rows: a program reads a tile of codes once for all rows, turns them into the inputs' dtype, which holds them all,
and multiplies on tensor cores; the scale comes after the sum. Where the tiles alone would leave a part of the device
idle, the inputs are split, and a second kernel adds the parts in order: no atomics, so a product is the same each time.
Many rows: arithmetic is the limit, so the weight is written out in the inputs' dtype, and cuBLAS multiplies.

Which of them runs follows from shapes alone, and nothing waits for the device (CUDA graphs).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from hamburger.model.gpu.keys import dot

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_LEAST_INPUTS = 256  # of a part
_MERGED_OUTPUTS = 256  # that a program adds up


@dataclass(frozen=True, slots=True)
class Form:
    """How up to `rows` rows are multiplied: in tiles of rows, outputs and inputs (of 16 bits). programs: fill a
    multiprocessor."""

    rows: int
    block_rows: int
    block_outputs: int
    block_inputs: int
    programs: int
    num_warps: int
    num_stages: int


# Beyond the last, writing the weight out (5 bytes read and written for each number) is less than what cuBLAS gains. An
# estimate: benchmarks/gpu_suite/linear.py measures it.
FORMS = (
    Form(16, 16, 64, 128, 2, 4, 4),
    Form(64, 64, 64, 128, 2, 4, 3),
    Form(512, 128, 128, 64, 1, 8, 3),
)
MOST_ROWS = FORMS[-1].rows
# Numbers of rows that between them launch all that any number launches: more tiles of rows may need no parts.
ROWS_OF_ALL = (*(form.rows for form in FORMS), FORMS[-2].rows + 1)


@triton.jit
def _as_numbers(codes, dtype: tl.constexpr):
    """int8 tiles as numbers of that dtype."""
    if _INTERPRETED:  # the interpreter would take whole numbers for the bits of bfloat16
        codes = codes.to(tl.float32)
    return codes.to(dtype)


# The number of rows is any: each would be compiled anew, while others wait.
@triton.jit(do_not_specialize=["num_rows", "steps"])
def _multiply(
    x, codes, scales, bias, y, partial, num_rows, outputs, inputs, steps,
    IS_SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)  # first: tiles of rows share their codes
    output = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    has_row, has_output = (row < num_rows)[None, :], (output < outputs)[:, None]
    sums = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    for step in range(split * steps, tl.minimum((split + 1) * steps, tl.cdiv(inputs, BLOCK_K))):
        column = step * BLOCK_K + tl.arange(0, BLOCK_K)
        tile = tl.load(
            codes + output[:, None] * inputs + column[None, :], mask=has_output & (column < inputs)[None, :], other=0
        )
        states = tl.load(
            x + row[None, :] * inputs + column[:, None], mask=has_row & (column < inputs)[:, None], other=0.0
        )
        sums += dot(_as_numbers(tile, states.dtype), states)
    inside = has_row & has_output
    if IS_SPLIT:
        tl.store(partial + (split * num_rows + row[None, :]) * outputs + output[:, None], sums, mask=inside)
    else:
        sums *= tl.load(scales + output, mask=output < outputs, other=0.0)[:, None]
        if HAS_BIAS:
            sums += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
        tl.store(y + row[None, :] * outputs + output[:, None], sums.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "splits"])
def _add_parts(
    partial, scales, bias, y, num_rows, outputs, splits, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = output < outputs
    sums = tl.zeros([BLOCK_N], tl.float32)
    for split in range(splits):
        sums += tl.load(partial + (split * num_rows + row) * outputs + output, mask=inside, other=0.0)
    sums *= tl.load(scales + output, mask=inside, other=0.0)
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * outputs + output, sums.to(y.dtype.element_ty), mask=inside)


def scaled_product(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, processors: int) -> Tensor:
    """x [R, in], codes int8 [out, in], scales float32 [out, 1], bias [out] or None -> [R, out] of x's dtype.

    processors: multiprocessors of the device, which the inputs are split for.
    """
    if len(x) > MOST_ROWS:
        return written_out(x, codes, scales, bias)
    y = x.new_empty(len(x), len(codes))
    if len(x):
        multiply_into(y, x, codes, scales, bias, processors)
    return y


def written_out(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """The same with the weight in x's dtype for as long as that takes, so its numbers are rounded once more."""
    weight = torch.mul(codes, scales, out=x.new_empty(codes.shape))
    return F.linear(x, weight, bias)


def multiply_into(y: Tensor, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, processors: int) -> None:
    """scaled_product of up to MOST_ROWS rows by the kernels, written to y [R, out]."""
    rows, (outputs, inputs) = len(x), codes.shape
    form = form_for(rows, x.dtype)
    tiles = triton.cdiv(rows, form.block_rows), triton.cdiv(outputs, form.block_outputs)
    steps = steps_of_part(form, tiles[0] * tiles[1], inputs, processors)
    splits = triton.cdiv(inputs, steps * form.block_inputs)
    partial = scales if splits == 1 else scales.new_empty(splits, rows, outputs)
    other = codes if bias is None else bias  # not read
    _multiply[(*tiles, splits)](
        x.contiguous(), codes, scales, other, y, partial, rows, outputs, inputs, steps,
        IS_SPLIT=splits > 1, HAS_BIAS=bias is not None,
        BLOCK_R=form.block_rows, BLOCK_N=form.block_outputs, BLOCK_K=form.block_inputs,
        num_warps=form.num_warps, num_stages=form.num_stages,
    )  # fmt: skip
    if splits > 1:
        _add_parts[(rows, triton.cdiv(outputs, _MERGED_OUTPUTS))](
            partial, scales, other, y, rows, outputs, splits,
            HAS_BIAS=bias is not None, BLOCK_N=_MERGED_OUTPUTS, num_warps=2,
        )  # fmt: skip


def form_for(rows: int, dtype: torch.dtype) -> Form:
    """For 1 to MOST_ROWS rows. Tiles of any dtype take the same bytes: they must fit into shared memory."""
    form = next(form for form in FORMS if rows <= form.rows)
    return replace(form, block_inputs=form.block_inputs * 2 // dtype.itemsize)


def steps_of_part(form: Form, tiles: int, inputs: int, processors: int) -> int:
    """Steps of the loop over inputs that a program takes: all of them where `tiles` programs fill the device."""
    wanted = triton.cdiv(form.programs * processors, tiles) if tiles < processors else 1
    steps = triton.cdiv(inputs, form.block_inputs)
    least = triton.cdiv(_LEAST_INPUTS, form.block_inputs)
    return int(max(triton.cdiv(steps, wanted), min(least, steps)))
