"""The compiled kernels against torch: exactly what their number format says, then whole models against plain ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from hamburger.model.batch import ForwardBatch, Reads, empty_sampling
from hamburger.model.config import ModelConfig
from hamburger.model.cpu import library
from hamburger.model.cpu.backend import CpuBackend
from hamburger.model.cpu.emission import CpuEmission
from hamburger.model.cpu.graft import CpuEmbedding, CpuGraft, PackedHead, merger_fits
from hamburger.model.cpu.library import InstructionSet, Kernels, load_kernels
from hamburger.model.cpu.weights import PackedWeight
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.modules import attention
from hamburger.model.modules.embedder import CompositionalEmbedder
from hamburger.model.modules.linear import weights_of
from hamburger.model.steps import EagerSteps
from native_models import SETS, WIDE, RoundedLinear, dequantized, models
from slow_cases import slow_but
from small_models import (
    CPU,
    core_of,
    grafted,
    one_sequence,
    params,
    run_core,
    trunk_config,
)
from trunk_shapes import MIXTURES, SHAPES

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="built without a compiler, or for another processor")


def first_states(
    model: EagerSteps, prompts: list[list[int]], kv_dtype: torch.dtype | None = None
) -> dict[str, list[float]]:
    """The log-probabilities of each first token's rivals: how far the whole step is off."""
    found = run_core(
        core_of(model, max_num_batched_slots=48, max_model_len=200, kv_dtype=kv_dtype),
        {str(i): (ids, params(max_tokens=1, logprobs=5)) for i, ids in enumerate(prompts)},
    )
    return {name: [value for _, value in (groups[0].logprobs or [])[0].top] for name, groups in found.items()}


@pytest.mark.parametrize("shape", [*SHAPES, *MIXTURES])
@pytest.mark.parametrize("bits", slow_but([4], [8, 4]))
def test_every_kind_of_trunk_is_near_the_plain_one(shape: str, bits: int, kernels: Kernels) -> None:
    changes = {**SHAPES, **MIXTURES}[shape] | WIDE
    plain, native = models(ModelConfig(trunk=trunk_config(**changes)), kernels=kernels, bits=bits)
    assert native.quantization == f"int{bits}"
    # Chunks of 48 slots cut the long prompts; the short ones are less than a tile.
    short, long = [*range(1, 9), 17, 31, 33, 47], [*range(62, 68), *range(90, 98)]
    prompts = [[(7 * n + j) % 90 + 2 for j in range(n)] for n in (*short, *long)]
    wanted, found = first_states(plain, prompts), first_states(native, prompts)
    off = [max(abs(a - b) for a, b in zip(wanted[name], found[name], strict=True)) for name in wanted]
    # An input between two steps may be rounded to either side, which all later layers see: often so in a long prompt.
    assert all(value < 0.5 for value in off)
    near = [value < 1e-4 for value in off]
    assert sum(near[: len(short)]) >= len(short) / 2
    assert any(near[len(short) :])


@pytest.mark.parametrize("shape", [*SHAPES, "heads of 32", "heads of 96"])
@pytest.mark.parametrize("instructions", SETS)
def test_keys_and_values_in_8_bits_are_those_of_the_plain_cache(shape: str, instructions: InstructionSet) -> None:
    """Of one layer, whose inputs are the same: codes differ only where rounding decides them."""
    if (kernels := load_kernels(instructions)) is None:
        pytest.skip("built without a compiler, or for another processor")
    head_dim = int(shape.removeprefix("heads of ")) if shape.startswith("heads of ") else 64
    changes: dict[str, Any] = {**SHAPES.get(shape, {}), **WIDE, "num_layers": 1, "head_dim": head_dim}
    plain, native = models(ModelConfig(trunk=trunk_config(**changes)), kernels=kernels)
    # Chunks of 48 slots cut the long prompts, whose queries are many at once; a last chunk of few slots has few.
    prompts = [[(7 * n + j) % 90 + 2 for j in range(n)] for n in (*range(1, 9), 17, 31, 33, 47, 49, 50, 97, 98, 150)]
    wanted, found = first_states(plain, prompts, torch.int8), first_states(native, prompts, torch.int8)
    exact = first_states(native, prompts)
    off = [max(abs(a - b) for a, b in zip(wanted[name], found[name], strict=True)) for name in wanted]
    assert sum(value < 1e-3 for value in off) >= len(prompts) / 2
    assert max(off) < 0.5  # an input between two steps
    assert found != exact  # it is another cache


def rounded_attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    """What kernels/attention/dots.h computes: queries and weights are rounded to bfloat16, sums are float."""
    scores = q.bfloat16().float() @ k.mT * q.shape[-1] ** -0.5
    scores = scores if attn_mask is None else scores + attn_mask
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    attended: Tensor = weights.bfloat16().float() @ v / weights.sum(-1, keepdim=True)
    return attended


@pytest.mark.parametrize("shape", [*SHAPES, "heads of 32", "heads of 96", "one KV head"])
def test_products_of_bfloat16_are_those_of_the_rounded(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one layer, whose inputs are the same: weights differ only where rounding decides them."""
    if (kernels := load_kernels("avx512bf16")) is None:
        pytest.skip("built without a compiler, or for another processor")
    head_dim = int(shape.removeprefix("heads of ")) if shape.startswith("heads of ") else 64
    changes: dict[str, Any] = {**SHAPES.get(shape, {}), **WIDE, "num_layers": 1, "head_dim": head_dim}
    if shape == "one KV head":
        changes |= {"num_heads": 12, "num_kv_heads": 1}
    plain, native = models(ModelConfig(trunk=trunk_config(**changes)), kernels=kernels)
    # Chunks of 48 slots cut the long prompts, whose queries are many at once; a last chunk of few slots has few.
    prompts = [[(7 * n + j) % 90 + 2 for j in range(n)] for n in (*range(1, 9), 17, 31, 33, 47, 49, 50, 97, 98, 150)]
    found, float_pool = first_states(native, prompts, torch.bfloat16), first_states(native, prompts)
    far = first_states(plain, prompts, torch.bfloat16)
    monkeypatch.setattr(attention, "F", SimpleNamespace(scaled_dot_product_attention=rounded_attention))
    wanted = first_states(plain, prompts, torch.bfloat16)
    assert found != float_pool
    assert sum(off(wanted, found, name) < 1e-3 for name in wanted) >= len(prompts) / 2
    assert sum(off(far, found, name) < 1e-3 for name in wanted) < len(prompts) / 2
    assert max(off(wanted, found, name) for name in wanted) < 0.5  # an input between two steps


def off(wanted: dict[str, list[float]], found: dict[str, list[float]], name: str) -> float:
    return max(abs(a - b) for a, b in zip(wanted[name], found[name], strict=True))


def test_slots_of_several_tokens_pass_their_adapter(kernels: Kernels) -> None:
    config = grafted(trunk_config(**WIDE), adapter_rank=32)
    off = []
    for seed in range(12):
        plain, native = models(config, seed=seed, kernels=kernels)
        slots = [[5 + seed, 6, 7], [8], [9 + seed, 10], [11, 12, 13, 14]]
        batch = one_sequence(slots, [2, 3, 5, 9], emit=[0, 1, 2, 3])
        states = []
        for model in (plain, native):
            cache = PagedKVCache(config.trunk, 1, len(slots), torch.float32, CPU)
            with torch.inference_mode():
                hidden, features = model.backend.trunk(batch, cache, Reads(batch.emit, 4))
            states.append(torch.stack([hidden, *features]))
        off.append(float((states[0] - states[1]).abs().max()))
    assert all(value < 0.5 for value in off)  # an input between two steps may be rounded to either side
    assert sum(value < 1e-3 for value in off) >= 4


@pytest.mark.parametrize("heads", [1, 4, 32])
@pytest.mark.parametrize("groups", [1, 2, 9])
def test_groups_are_composed_as_the_plain_embedder_does(heads: int, groups: int, kernels: Kernels) -> None:
    torch.manual_seed(heads + groups)
    plain = CompositionalEmbedder(64, 4, heads).requires_grad_(False)
    plain.pos.normal_()
    table, tokens = torch.randn(4 * groups, 64), torch.arange(4 * groups).view(groups, 4)
    native = CpuEmbedding(kernels, table, plain)
    for name in ("q", "k", "v", "out"):
        weight, bias = weights_of(getattr(plain, f"{name}_proj"))
        rounded = RoundedLinear.of(weight)
        if bias is not None:
            rounded.take("bias", bias)
        setattr(plain, f"{name}_proj", rounded)
    sizes = torch.arange(groups) % 4 + 1
    sizes[0] = 3
    rows = (sizes > 1).nonzero().squeeze(-1)
    wanted = plain(table[tokens], sizes, rows)
    found, composed = native(tokens, sizes)
    assert composed is not None
    assert torch.equal(composed, rows)
    off = (wanted - found).abs()
    assert off.max() < 0.02
    assert (off < 1e-5).double().mean() > 0.5
    assert torch.equal(found[sizes == 1], table[tokens[sizes == 1, 0]])
    assert torch.equal(found[:1], native(tokens[:1], sizes[:1])[0])
    assert torch.equal(found[:1], native(tokens[:1, :3].contiguous(), sizes[:1])[0])  # what pads a group is not seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_single_tokens_are_their_embeddings(dtype: torch.dtype, kernels: Kernels) -> None:
    table = torch.randn(11, 64, dtype=dtype)
    tokens = torch.tensor([[3], [0], [10]])
    found, composed = CpuEmbedding(kernels, table, None)(tokens, torch.ones(3, dtype=torch.int64))
    assert torch.equal(found, table[tokens[:, 0]].float())
    assert composed is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_embeddings_are_the_rows_of_the_head(dtype: torch.dtype, kernels: Kernels) -> None:
    table = torch.randn(37, 64, dtype=dtype)
    head = PackedWeight(kernels, table, None, 8)
    tokens = torch.tensor([[3, 36], [0, 17], [15, 16]])
    assert torch.equal(CpuEmbedding(kernels, head, None).lookup(tokens), dequantized(table, 8)[tokens])
    tied, apart = (
        cast(CpuBackend, models(ModelConfig(trunk=trunk_config(**{**WIDE, "tie_word_embeddings": on})))[1].backend)
        for on in (True, False)
    )
    assert tied._embedding._table is tied._head.packed  # no second copy
    assert isinstance(apart._embedding._table, Tensor)


def test_a_merger_of_other_widths_stays_plain() -> None:
    assert merger_fits(CompositionalEmbedder(64, 4, 4))
    assert not merger_fits(CompositionalEmbedder(96, 4, 4))  # positions of 48
    assert not merger_fits(CompositionalEmbedder(64, 65, 4))


def test_what_the_one_call_chooses_is_what_torch_would(kernels: Kernels) -> None:
    """Equal logits, and logits that are no numbers."""
    _, native = models(ModelConfig(trunk=trunk_config(**WIDE)), kernels=kernels)
    weight = torch.randn(100, 64)
    weight[[17, 40, 41, 99]] = 4 * torch.sign(torch.randn(64))
    head = PackedHead(kernels, weight)
    emitter = CpuGraft(kernels, native.config, head, None)
    hidden = torch.cat((weight[17:18], -weight[17:18], torch.randn(3, 64), torch.full((1, 64), float("nan"))))
    logits = PackedWeight(kernels, weight, None, 8).multiply(hidden)
    batch = SimpleNamespace(
        max_group_limit=1,
        confidence=torch.ones(6),
        group_limits=torch.ones(6).long(),
        checks=None,
        sampling=empty_sampling(6, CPU),
    )
    output = CpuEmission(emitter).emit(hidden, [], cast(ForwardBatch, batch))
    assert output.token_ids[:, 0].tolist() == logits.argmax(-1).tolist()
    assert output.token_ids[0] == 17
    assert output.stop_probs.tolist() == [[1.0]] * 6


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_the_coarse_head_hides_no_likeliest_token(kernels: Kernels, rows: int) -> None:
    """Many outputs are all but equal, so that 4 bits alone choose wrongly."""
    _, native = models(ModelConfig(trunk=trunk_config(**WIDE)), kernels=kernels)
    weight = torch.randn(40, 64).repeat_interleave(80, 0) + 0.02 * torch.randn(3200, 64)
    packed = PackedWeight(kernels, weight, None, 8)
    emitter = CpuGraft(kernels, native.config, PackedHead(kernels, weight), None)
    num_wrong = 0
    for scale in (1.0, 30.0, 1e-3, 0.0):
        hidden = torch.randn(rows, 64) * scale
        hidden[:, 5] *= 20
        logits = packed.multiply(hidden)
        batch = SimpleNamespace(
            max_group_limit=1,
            checks=None,
            confidence=torch.ones(rows),
            group_limits=torch.ones(rows).long(),
            sampling=empty_sampling(rows, CPU),
        )
        chosen = CpuEmission(emitter).emit(hidden, [], cast(ForwardBatch, batch)).token_ids[:, 0]
        assert torch.equal(chosen, logits.argmax(-1))
        num_wrong += int((PackedWeight(kernels, weight, None, 4).multiply(hidden).argmax(-1) != chosen).sum())
    assert num_wrong > rows  # else nothing was tried


def test_the_errors_of_a_coarse_head_are_those_of_its_weights(kernels: Kernels) -> None:
    weight = torch.randn(70, 64)
    unit = torch.eye(64)
    fine, coarse = (PackedWeight(kernels, weight, None, bits).multiply(unit).T for bits in (8, 4))
    head = PackedHead(kernels, weight)
    torch.testing.assert_close(head.errors[:70], (fine - coarse).norm(dim=1), rtol=1e-4, atol=1e-5)
    assert not head.errors[70:].any()


def test_kernels_of_another_version_are_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "_FORMAT", 0)
    assert load_kernels() is None
    assert "is of another version of this package" in caplog.text
    assert "install the package again" in caplog.text


def test_a_package_without_kernels_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    assert load_kernels() is None
    assert "plain torch serves, several times slower" in caplog.text
    assert "C++ compiler" in caplog.text
