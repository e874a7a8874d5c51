"""Triton kernel of a whole micro-step: all micro layers of a group's next position in one launch, for few rows.

A micro layer of one position is five stages, each of which reads what all programs of the one before have written:

    q, k, v = norm(x) W ──► attention ──► x += o W ──► silu(gate) * up of norm(x) W ──► x += h W

As many programs as the device has multiprocessors stay for all stages and wait for each other in between (a
cooperative launch, so all of them run at once). Triton's interpreter runs programs one after the other, so there every
stage is a launch of its own. micro_decoder.py is the plain reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from hamburger.model.gpu.attention import LOG2_E, dot
from hamburger.model.gpu.micro_attention import attend_position
from hamburger.model.layers import DecoderLayer

_INTERPRETED = triton.knobs.runtime.interpret
MOST_ROWS = 16  # of one tile: more rows are the matrix kernels' own
_OUTPUTS = 16  # of a tile: tensor cores' least, so that as many multiprocessors as can be have one
_INPUT_BYTES = 512  # of a row that a step of the loop over inputs reads
_STAGES = 5  # of a layer


@triton.jit
def _wait_for_all(arrived, programs):
    """Until all programs are here; then everybody sees what anybody wrote before. arrived: int64, never set back."""
    tl.debug_barrier()
    before = tl.atomic_add(arrived, 1, sem="release", scope="gpu")
    wanted = (before // programs + 1) * programs
    while tl.atomic_add(arrived, 0, sem="acquire", scope="gpu") < wanted:
        pass
    tl.debug_barrier()


@triton.jit
def _wide(number):
    """int64 of a loop's number, which is no tensor in the interpreter."""
    return tl.full([], 0, tl.int64) + number


@triton.jit
def _held(x, row, columns, num_rows, SIZE: tl.constexpr):
    """Columns of rows that other programs wrote -> [columns, rows]; nothing of them comes again, so no L1."""
    inside = (row < num_rows)[None, :] & (columns < SIZE)[:, None]
    return tl.load(x + row[None, :] * SIZE + columns[:, None], mask=inside, other=0.0, cache_modifier=".cg")


@triton.jit
def _scales(x, row, num_rows, eps, SIZE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr):
    """1 / rms of rows x [R, SIZE] -> [BLOCK_R]."""
    squares = tl.zeros([BLOCK_K, BLOCK_R], tl.float32)
    for start in tl.static_range(0, SIZE, BLOCK_K):
        value = _held(x, row, start + tl.arange(0, BLOCK_K), num_rows, SIZE).to(tl.float32)
        squares += value * value
    return tl.rsqrt(tl.sum(squares, 0) / SIZE + eps)


@triton.jit
def _states(x, norm, scales, row, column, num_rows, SIZE: tl.constexpr, NORMS: tl.constexpr):
    """Columns of rows, normed where NORMS -> [columns, rows]."""
    states = _held(x, row, column, num_rows, SIZE)
    if NORMS:
        weights = tl.load(norm + column, mask=column < SIZE, other=0.0).to(tl.float32)
        states = (states.to(tl.float32) * scales[None, :] * weights[:, None]).to(x.dtype.element_ty)
    return states


@triton.jit
def _tile(weight, output, column, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr):
    inside = (output < OUTPUTS)[:, None] & (column < INPUTS)[None, :]
    return tl.load(weight + output.to(tl.int64)[:, None] * INPUTS + column[None, :], mask=inside, other=0.0)


@triton.jit
def _biased(sums, bias, output, y, OUTPUTS: tl.constexpr, HAS_BIAS: tl.constexpr):
    """A linear's result, rounded as it would be written, in float32."""
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)[:, None]
    return sums.to(y.dtype.element_ty).to(tl.float32)


@triton.jit
def _product(
    x, weight, bias, norm, added, y, num_rows, eps, program, programs,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, NORMS: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y = norm(x) weight + bias + added, each part where it is asked for; added may be y."""
    row = tl.arange(0, BLOCK_R)
    scales = tl.zeros([BLOCK_R], tl.float32)
    if NORMS:
        scales = _scales(x, row, num_rows, eps, INPUTS, BLOCK_R, BLOCK_K)
    for tile in range(program, tl.cdiv(OUTPUTS, BLOCK_N), programs):
        output = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        sums = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
        for start in range(0, INPUTS, BLOCK_K):
            column = start + tl.arange(0, BLOCK_K)
            states = _states(x, norm, scales, row, column, num_rows, INPUTS, NORMS)
            sums += dot(_tile(weight, output, column, OUTPUTS, INPUTS), states)
        result = _biased(sums, bias, output, y, OUTPUTS, HAS_BIAS)
        if ADDS:
            result += _held(added, row, output, num_rows, OUTPUTS).to(tl.float32)
        inside = (row < num_rows)[None, :] & (output < OUTPUTS)[:, None]
        tl.store(y + row[None, :] * OUTPUTS + output[:, None], result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _gated_product(
    x, weight, bias, norm, y, num_rows, eps, program, programs, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y = silu(gate) * up of norm(x), where weight [2 * OUTPUTS, INPUTS] has gate first."""
    row = tl.arange(0, BLOCK_R)
    scales = _scales(x, row, num_rows, eps, INPUTS, BLOCK_R, BLOCK_K)
    for tile in range(program, tl.cdiv(OUTPUTS, BLOCK_N), programs):
        output = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        gate, up = tl.zeros([BLOCK_N, BLOCK_R], tl.float32), tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
        for start in range(0, INPUTS, BLOCK_K):
            column = start + tl.arange(0, BLOCK_K)
            states = _states(x, norm, scales, row, column, num_rows, INPUTS, True)
            gate += dot(_tile(weight, output, column, OUTPUTS, INPUTS), states)
            up += dot(_tile(weight + OUTPUTS * INPUTS, output, column, OUTPUTS, INPUTS), states)
        gate = _biased(gate, bias, output, y, OUTPUTS, HAS_BIAS)
        up = _biased(up, bias + OUTPUTS, output, y, OUTPUTS, HAS_BIAS)
        inside = (row < num_rows)[None, :] & (output < OUTPUTS)[:, None]
        result = (gate * tl.sigmoid(gate) * up).to(y.dtype.element_ty)
        tl.store(y + row[None, :] * OUTPUTS + output[:, None], result, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "places", "length", "first", "last"])
def _micro_step(
    embedding, context, embedding_norm, embedding_proj,
    attn_norm, qkv_proj, qkv_bias, q_norm, k_norm, o_proj, o_bias, mlp_norm, gate_up_proj, gate_up_bias, down_proj,
    down_bias, x, qkv, attended, hidden, rows, kv, cos, sin, arrived,
    num_rows, places, length, first, last, eps, scale,
    SIZE: tl.constexpr, WIDE: tl.constexpr, POSITIONS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, FUSED: tl.constexpr, QK_NORMS: tl.constexpr, QKV_BIAS: tl.constexpr, O_BIAS: tl.constexpr,
    MLP_BIAS: tl.constexpr, WAITS: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Stages first to last - 1: 0 makes x of the embedding, then five for each layer."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    heads: tl.constexpr = KV_HEADS * GROUP * HEAD_DIM
    width: tl.constexpr = heads + 2 * KV_HEADS * HEAD_DIM
    for stage in range(first, last):
        layer = _wide((stage - 1) // STAGES)
        part = (stage - 1) % STAGES
        if stage == 0:
            if FUSED:
                _product(
                    embedding, embedding_proj, embedding, embedding_norm, context, x, num_rows, eps, program, programs,
                    SIZE, SIZE, True, False, True, BLOCK_R, BLOCK_N, BLOCK_K,
                )  # fmt: skip
        elif part == 0:
            _product(
                x, qkv_proj + layer * width * SIZE, qkv_bias + layer * width * QKV_BIAS, attn_norm + layer * SIZE, x,
                qkv, num_rows, eps, program, programs,
                width, SIZE, True, QKV_BIAS, False, BLOCK_R, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        elif part == 1:
            for one in range(program, num_rows * KV_HEADS, programs):
                attend_position(
                    qkv, cos, sin, q_norm + layer * HEAD_DIM * QK_NORMS, k_norm + layer * HEAD_DIM * QK_NORMS, rows,
                    kv + layer * places * (POSITIONS * 2 * KV_HEADS * HEAD_DIM), attended,
                    _wide(one // KV_HEADS), one % KV_HEADS, 0, length, eps, scale,
                    1, 0, POSITIONS, KV_HEADS, GROUP, HEAD_DIM, BLOCK_G, BLOCK_P, BLOCK_HALF, QK_NORMS,
                )  # fmt: skip
        elif part == 2:
            _product(
                attended, o_proj + layer * SIZE * heads, o_bias + layer * SIZE * O_BIAS, x, x, x, num_rows, eps,
                program, programs, SIZE, heads, False, O_BIAS, True, BLOCK_R, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        elif part == 3:
            _gated_product(
                x, gate_up_proj + layer * 2 * WIDE * SIZE, gate_up_bias + layer * 2 * WIDE * MLP_BIAS,
                mlp_norm + layer * SIZE, hidden, num_rows, eps, program, programs,
                WIDE, SIZE, MLP_BIAS, BLOCK_R, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            _product(
                hidden, down_proj + layer * SIZE * WIDE, down_bias + layer * SIZE * MLP_BIAS, x, x, x, num_rows, eps,
                program, programs, SIZE, WIDE, False, MLP_BIAS, True, BLOCK_R, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        if WAITS and stage + 1 < last:
            _wait_for_all(arrived, programs)


class MicroStepKernel:
    """The layers of a micro decoder for that kernel, their weights one behind the other.

    The layers' own parameters become views of these, so that no memory is taken twice.
    """

    def __init__(self, layers: Sequence[DecoderLayer], eps: float, processors: int) -> None:
        """processors: multiprocessors of the device, each of which gets one program."""
        one = layers[0]
        present = dict(one.named_parameters())
        self.weights = [_joined(layers, name) if name in present else None for name in _PARTS]
        self._num_layers, self._eps, self.programs = len(layers), eps, processors
        self._heads, self._kv_heads, self._head_dim = one.num_heads, one.num_kv_heads, one.head_dim
        self._wide = one.down_proj.in_features
        # Every launch adds as many for each of its waits: it stays a multiple of `processors`, and is never set back.
        self.arrived = torch.zeros(1, dtype=torch.int64, device=one.qkv_proj.weight.device)

    def __call__(
        self,
        embedding: Tensor,
        fusion: tuple[Tensor, Tensor, Tensor] | None,
        tables: tuple[Tensor, Tensor],
        kv: Tensor,
        rows: Tensor,
        length: int,
    ) -> Tensor:
        """One position of each of 1 to MOST_ROWS rows through all layers -> [R, D], before the last norm.

        embedding: [R, D] of the newest tokens. fusion: where features are fused, the norm's weight [D] and the
        projection [D, D] of embeddings, and what is added to it [R, D]; else None. tables: cos and sin [positions,
        head_dim]. kv: [layers, places, positions, 2, kv_heads, head_dim], in which row r has place rows[r] (int64 [R])
        and `length` positions; the next is written. Raises ValueError for more rows.
        """
        num_rows, size = embedding.shape
        if not 0 < num_rows <= MOST_ROWS:
            raise ValueError(f"{num_rows} rows: this kernel takes 1 to {MOST_ROWS}.")
        embedding, fused = embedding.contiguous(), fusion is not None
        x = torch.empty_like(embedding) if fused else embedding.clone()
        norm, projection, context = fusion or (x, x, x)
        heads = self._heads * self._head_dim
        qkv = x.new_empty(num_rows, heads + 2 * self._kv_heads * self._head_dim)
        attended, hidden = x.new_empty(num_rows, heads), x.new_empty(num_rows, self._wide)
        group, positions = self._heads // self._kv_heads, kv.shape[2]
        _, _, qkv_bias, q_norm, _, _, o_bias, _, _, mlp_bias, _, _ = self.weights
        begin, end = 0 if fused else 1, 1 + _STAGES * self._num_layers
        for last in range(begin + 1, end + 1) if _INTERPRETED else (end,):
            _micro_step[(self.programs,)](
                embedding, context.contiguous(), norm, projection,
                *(x if weight is None else weight for weight in self.weights),
                x, qkv, attended, hidden, rows, kv, *tables, self.arrived,
                num_rows, kv.shape[1], length, last - 1 if _INTERPRETED else begin, last, self._eps,
                self._head_dim**-0.5 * LOG2_E,
                SIZE=size, WIDE=self._wide, POSITIONS=positions, KV_HEADS=self._kv_heads, GROUP=group,
                HEAD_DIM=self._head_dim, FUSED=fused, QK_NORMS=q_norm is not None, QKV_BIAS=qkv_bias is not None,
                O_BIAS=o_bias is not None, MLP_BIAS=mlp_bias is not None, WAITS=not _INTERPRETED,
                STAGES=_STAGES,
                BLOCK_R=MOST_ROWS, BLOCK_N=_OUTPUTS, BLOCK_K=_INPUT_BYTES // x.element_size(),
                BLOCK_G=triton.next_power_of_2(group), BLOCK_P=triton.next_power_of_2(positions),
                BLOCK_HALF=triton.next_power_of_2(self._head_dim // 2),
                num_warps=4, num_stages=4, launch_cooperative_grid=not _INTERPRETED,
            )  # fmt: skip
        return x


_PARTS = (
    "attn_norm.weight", "qkv_proj.weight", "qkv_proj.bias", "q_norm.weight", "k_norm.weight", "o_proj.weight",
    "o_proj.bias", "mlp_norm.weight", "gate_up_proj.weight", "gate_up_proj.bias", "down_proj.weight", "down_proj.bias",
)  # fmt: skip


def _joined(layers: Sequence[DecoderLayer], name: str) -> Tensor:
    """One parameter of all layers [layers, ...], of which theirs are views from now on."""
    joined = torch.stack([layer.get_parameter(name) for layer in layers]).detach()
    owner, _, kind = name.rpartition(".")
    for layer, part in zip(layers, joined, strict=True):
        setattr(layer.get_submodule(owner), kind, nn.Parameter(part, requires_grad=False))
    return joined
