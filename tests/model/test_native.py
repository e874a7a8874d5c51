"""The compiled kernels against torch: exactly what their number format says, then whole models against plain ones."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hamburger.model.assemble import assemble
from hamburger.model.batch import ForwardBatch, empty_sampling
from hamburger.model.config import ModelConfig
from hamburger.model.embedder import CompositionalEmbedder
from hamburger.model.execution import Execution
from hamburger.model.hamburger import HamburgerModel
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.native import GROUP, InstructionSet, Kernels, PackedWeight, has_4_bits, load_kernels
from hamburger.model.native_embedder import NativeEmbedding, merger_fits
from hamburger.model.native_graft import NativeEmitter
from hamburger.model.native_head import PackedHead
from small_models import (
    CPU,
    core_of,
    graft_config,
    grafted,
    one_sequence,
    params,
    random_tensors,
    run_core,
    trunk_config,
)
from trunk_shapes import SHAPES

SETS: tuple[InstructionSet, ...] = ("avx512", "avx2")
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
pytestmark = pytest.mark.skipif(load_kernels() is None, reason="built without a compiler, or for another processor")


@pytest.fixture(params=SETS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    loaded = load_kernels(request.param)
    if loaded is None:
        pytest.skip(f"this processor has no {request.param}")
    return loaded


def half(x: Tensor) -> Tensor:
    return x.half().float()


def dequantized(weight: Tensor, bits: int) -> Tensor:
    """What kernels/common.h says a packed weight stands for."""
    groups = weight.float().unflatten(-1, (-1, GROUP))
    if bits == 8:
        scales = half(groups.abs().amax(-1, keepdim=True) / 127)
        codes = (groups / scales.clamp_min(1e-30)).round().clamp(-127, 127)
        of_8_bits: Tensor = (codes * scales).flatten(-2)
        return of_8_bits
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scales, zeros = half((high - low) / 15), half(low)
    codes = ((groups - zeros) / scales.clamp_min(1e-30)).round().clamp(0, 15)
    of_4_bits: Tensor = (codes * scales + zeros).flatten(-2)
    return of_4_bits


def rounded(x: Tensor) -> Tensor:
    """Inputs as the kernels see them."""
    groups = x.unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(-1, keepdim=True) / 127
    values: Tensor = ((groups / scales.clamp_min(1e-30)).round() * scales).flatten(-2)
    return values


def on_grid(outputs: int, inputs: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (outputs, inputs // GROUP, GROUP), generator=generator).float()
    codes[..., 0], codes[..., 1] = 0, 15
    scales = torch.rand(outputs, inputs // GROUP, 1, generator=generator) / 50 + 0.01
    weight: Tensor = half(scales).mul(codes).sub(half(8 * scales)).flatten(1)
    return weight


@settings(max_examples=40, deadline=None)
@given(
    bits=st.sampled_from((4, 8)),
    outputs=st.integers(1, 70),
    groups=st.integers(1, 4),
    rows=st.integers(1, 19),
    seed=st.integers(0, 1000),
    is_bf16=st.booleans(),
    instructions=st.sampled_from(SETS),
)
def test_a_linear_is_the_product_of_the_rounded(
    bits: int, outputs: int, groups: int, rows: int, seed: int, is_bf16: bool, instructions: InstructionSet
) -> None:
    kernels = load_kernels(instructions)
    if kernels is None:
        return
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, groups * GROUP, generator=generator) / 8
    weight = weight.bfloat16() if is_bf16 else weight
    bias = torch.randn(outputs, generator=generator) if seed % 2 else None
    x = torch.randn(rows, groups * GROUP, generator=generator)
    x[0, :GROUP] = 0
    y = kernels.linear(PackedWeight(kernels, weight, bias, bits), x)
    exact = rounded(x).double() @ dequantized(weight, bits).double().T + (0 if bias is None else bias)
    assert y.shape == exact.shape
    # A code or an input that lies between two steps may fall to either side.
    off = (y - exact).abs()
    assert off.max() <= 0.3
    assert (off <= 1e-4).double().mean() >= 0.5


def test_weights_that_have_4_bits_are_kept_exactly(kernels: Kernels) -> None:
    weight = on_grid(40, 96)
    assert has_4_bits(weight)
    assert has_4_bits(weight.bfloat16())
    packed = PackedWeight(kernels, weight, None, 4)
    torch.testing.assert_close(kernels.linear(packed, torch.eye(96)).T, weight, rtol=0, atol=1e-6)
    assert packed.nbytes == 3 * 3 * (16 * 32 // 2 + 64)  # blocks, groups, bytes


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("fault", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(kernels: Kernels, bits: int, fault: float) -> None:
    x = torch.randn(3, 64)
    x[1, 40] = fault
    y = kernels.linear(PackedWeight(kernels, torch.randn(5, 64), None, bits), x)
    assert y[[0, 2]].isfinite().all()
    assert y[1].isnan().all()


def test_only_an_even_grid_has_4_bits() -> None:
    assert not has_4_bits(torch.randn(100, 128))
    assert not has_4_bits(on_grid(100, 128)[:, :40])
    mixed = torch.cat((on_grid(100, 128), torch.randn(30, 128)))  # q and k of 4 bits, v of more
    assert not has_4_bits(mixed)
    uneven = torch.tensor([0.0, 0.02, 0.11, 1.0]).repeat(100, 32)  # few values, as of NF4
    assert not has_4_bits(uneven)
    assert has_4_bits(torch.full((16, 32), 0.5))


class RoundedLinear(nn.Module):
    """What a packed linear computes, spelled out in torch."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, bits: int = 8) -> None:
        super().__init__()
        self.weight, self.bias = dequantized(weight, bits), bias

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = nn.functional.linear(rounded(x), self.weight, self.bias)
        return y


def models(
    config: ModelConfig, seed: int = 3, kernels: Kernels | None = None, bits: int = 8
) -> tuple[HamburgerModel, HamburgerModel]:
    """A plain model with its linears rounded in torch, and one on the kernels. bits: of the trunk."""
    tensors = random_tensors(config, seed)
    length = max(config.trunk.max_position_embeddings, 200)
    plain = assemble(
        config, tensors, dtype=torch.float32, device=CPU, max_positions=length, how=Execution(packed=False)
    )
    trunk = set(plain.trunk.modules())
    for parent in list(plain.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, RoundedLinear(child.weight, child.bias, bits if child in trunk else 8))
    plain.head = RoundedLinear(plain.head_weight)
    if "short_list" in plain._buffers:
        plain.short_head = RoundedLinear(plain.head_weight[plain.short_list])
    native = assemble(
        config,
        tensors,
        dtype=torch.float32,
        device=CPU,
        max_positions=length,
        how=Execution(kernels=kernels or load_kernels(), bits=bits),
    )
    return plain, native


def first_states(model: HamburgerModel, prompts: list[list[int]]) -> dict[str, list[float]]:
    """The log-probabilities of each first token's rivals: how far the whole step is off."""
    found = run_core(
        core_of(model, max_num_batched_slots=48, max_model_len=200),
        {str(i): (ids, params(max_tokens=1, logprobs=5)) for i, ids in enumerate(prompts)},
    )
    return {name: [value for _, value in (groups[0].logprobs or [])[0].top] for name, groups in found.items()}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_every_kind_of_trunk_is_near_the_plain_one(shape: str, bits: int, kernels: Kernels) -> None:
    changes = {**SHAPES[shape], **WIDE}
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


def test_slots_of_several_tokens_pass_their_adapter(kernels: Kernels) -> None:
    config = grafted(trunk_config(**WIDE), merge_rank=32)
    off = []
    for seed in range(12):
        plain, native = models(config, seed=seed, kernels=kernels)
        slots = [[5 + seed, 6, 7], [8], [9 + seed, 10], [11, 12, 13, 14]]
        batch = one_sequence(slots, [2, 3, 5, 9], emit=[0, 1, 2, 3])
        states = []
        for model in (plain, native):
            cache = PagedKVCache(config.trunk, 1, len(slots), torch.float32, CPU)
            with torch.inference_mode():
                hidden, features = model.trunk(model.embed(batch), batch, cache, model.rotary, (1, 2))
            states.append(torch.stack([hidden, *features]))
        off.append(float((states[0] - states[1]).abs().max()))
    assert all(value < 0.5 for value in off)  # an input between two steps may be rounded to either side
    assert sum(value < 1e-3 for value in off) >= 4


@pytest.mark.parametrize("features", ["positions", "fused"])
@pytest.mark.parametrize("short_list", [None, 40])
@pytest.mark.parametrize("merge_rank", [0, 32])
def test_groups_are_those_of_the_plain_model(features: str, short_list: int | None, merge_rank: int) -> None:
    config = grafted(trunk_config(**WIDE), merge_rank, features=features, short_list_size=short_list)
    plain, native = models(config, seed=11)
    prompts = {str(i): ([5 + i, 6, 7], params(max_tokens=12, confidence=0.3)) for i in range(6)}
    wanted, found = (run_core(core_of(m), prompts) for m in (plain, native))
    first = [(wanted[name][0].token_ids, found[name][0].token_ids) for name in prompts]
    assert any(len(group) > 1 for group, _ in first)
    assert all(a == b for a, b in first)
    probs = [(wanted[n][0].stop_probs, found[n][0].stop_probs) for n in prompts]
    assert all(a[0] == pytest.approx(b[0], abs=0.01) for a, b in probs)


def greedy(i: int) -> dict[str, Any]:
    return {}


def sampled(i: int) -> dict[str, Any]:
    """Request i of many: each fourth is greedy, and the others filter in every way."""
    filters: tuple[dict[str, Any], ...] = (
        {},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 9, "top_p": 0.9, "min_p": 0.01},
    )
    return {"temperature": (0.3, 0.6, 1.2, 0.0)[i % 4], "seed": i, **filters[i % 5]}


@pytest.mark.parametrize("features", ["positions", "fused"])
@pytest.mark.parametrize("micro_norm", [False, True])
@pytest.mark.parametrize("short_list", [None, 40])
@pytest.mark.parametrize("how", [greedy, sampled])
def test_one_call_and_its_parts_agree_to_the_bit(
    features: str, micro_norm: bool, short_list: int | None, how: Callable[[int], dict[str, Any]], kernels: Kernels
) -> None:
    calibration = {"stop_scale": (0.9, 1.1, 1.3, 1.0), "stop_bias": (0.2, -0.1, 0.3, 0.0)}
    graft = graft_config(features=features, micro_norm=micro_norm, short_list_size=short_list, **calibration)
    config = ModelConfig(trunk=trunk_config(**WIDE, eos_token_ids=(9, 11)), graft=graft)
    _, native = models(config, seed=11, kernels=kernels)
    confidences = (1.0, 0.6, 0.5, 0.4, 0.3, 0.2, 0.0)
    for asked in (0, 3):  # log-probabilities: such a batch goes by parts
        prompts = {
            str(i): ([5 + i] * (1 + i), params(max_tokens=25, confidence=c, logprobs=asked or None, **how(i)))
            for i, c in enumerate(confidences)
        }
        groups = run_core(core_of(native), prompts)
        found = {name: [(group.token_ids, group.stop_probs) for group in of] for name, of in groups.items()}
        if not asked:
            in_one_call = found
    assert found == in_one_call
    sizes = {len(tokens) for of in found.values() for tokens, _ in of}
    assert len(sizes) > 2  # rows leave after different tokens


@pytest.mark.parametrize("heads", [1, 4, 32])
@pytest.mark.parametrize("groups", [1, 2, 9])
def test_groups_are_merged_as_the_plain_embedder_does(heads: int, groups: int, kernels: Kernels) -> None:
    torch.manual_seed(heads + groups)
    plain = CompositionalEmbedder(64, 4, heads).requires_grad_(False)
    plain.pos.normal_()
    table, tokens = torch.randn(4 * groups, 64), torch.arange(4 * groups).view(groups, 4)
    native = NativeEmbedding(kernels, table, plain)
    for name in ("q", "k", "v", "out"):
        linear = getattr(plain, f"{name}_proj")
        setattr(plain, f"{name}_proj", RoundedLinear(linear.weight, linear.bias))
    sizes = torch.arange(groups) % 4 + 1
    sizes[0] = 3
    rows = (sizes > 1).nonzero().squeeze(-1)
    wanted = plain(table[tokens], sizes, rows)
    found, merged = native(tokens, sizes)
    assert torch.equal(merged, rows)
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
    found, merged = NativeEmbedding(kernels, table, None)(tokens, torch.ones(3, dtype=torch.int64))
    assert torch.equal(found, table[tokens[:, 0]].float())
    assert not len(merged)


def test_a_merger_of_other_widths_stays_plain() -> None:
    assert merger_fits(CompositionalEmbedder(64, 4, 4))
    assert not merger_fits(CompositionalEmbedder(96, 4, 4))  # positions of 48
    assert not merger_fits(CompositionalEmbedder(64, 65, 4))


def test_what_the_one_call_chooses_is_what_torch_would(kernels: Kernels) -> None:
    """Equal logits, and logits that are no numbers."""
    _, native = models(ModelConfig(trunk=trunk_config(**WIDE)), kernels=kernels)
    weight = torch.randn(100, 64)
    weight[[17, 40, 41, 99]] = 4 * torch.sign(torch.randn(64))
    head = PackedHead(kernels, PackedWeight(kernels, weight, None, 8), weight)
    emitter = NativeEmitter(kernels, native.config, head, None)
    hidden = torch.cat((weight[17:18], -weight[17:18], torch.randn(3, 64), torch.full((1, 64), float("nan"))))
    logits = kernels.linear(PackedWeight(kernels, weight, None, 8), hidden)
    batch = SimpleNamespace(
        max_group_limit=1, confidence=torch.ones(6), group_limits=torch.ones(6).long(), sampling=empty_sampling(6, CPU)
    )
    output = emitter.emit(hidden, [], cast(ForwardBatch, batch))
    assert output.token_ids[:, 0].tolist() == logits.argmax(-1).tolist()
    assert output.token_ids[0] == 17
    assert output.stop_probs.tolist() == [[1.0]] * 6


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_the_coarse_head_hides_no_likeliest_token(kernels: Kernels, rows: int) -> None:
    """Many outputs are all but equal, so that 4 bits alone choose wrongly."""
    _, native = models(ModelConfig(trunk=trunk_config(**WIDE)), kernels=kernels)
    weight = torch.randn(40, 64).repeat_interleave(80, 0) + 0.02 * torch.randn(3200, 64)
    packed = PackedWeight(kernels, weight, None, 8)
    emitter = NativeEmitter(kernels, native.config, PackedHead(kernels, packed, weight), None)
    num_wrong = 0
    for scale in (1.0, 30.0, 1e-3, 0.0):
        hidden = torch.randn(rows, 64) * scale
        hidden[:, 5] *= 20
        logits = kernels.linear(packed, hidden)
        batch = SimpleNamespace(
            max_group_limit=1,
            confidence=torch.ones(rows),
            group_limits=torch.ones(rows).long(),
            sampling=empty_sampling(rows, CPU),
        )
        chosen = emitter.emit(hidden, [], cast(ForwardBatch, batch)).token_ids[:, 0]
        assert torch.equal(chosen, logits.argmax(-1))
        num_wrong += int((kernels.linear(PackedWeight(kernels, weight, None, 4), hidden).argmax(-1) != chosen).sum())
    assert num_wrong > rows  # else nothing was tried


def test_the_errors_of_a_coarse_head_are_those_of_its_weights(kernels: Kernels) -> None:
    weight = torch.randn(70, 64)
    unit = torch.eye(64)
    fine, coarse = (kernels.linear(PackedWeight(kernels, weight, None, bits), unit).T for bits in (8, 4))
    head = PackedHead(kernels, PackedWeight(kernels, weight, None, 8), weight)
    torch.testing.assert_close(head.errors[:70], (fine - coarse).norm(dim=1), rtol=1e-4, atol=1e-5)
    assert not head.errors[70:].any()


def prompts_of(number: int, asked: int | None) -> dict[str, tuple[list[int], Any]]:
    return {
        str(i): ([5 + i] * (3 + 9 * i), params(max_tokens=20, confidence=0.5, logprobs=asked, **sampled(i)))
        for i in range(number)
    }


@pytest.mark.parametrize("asked", [None, 3])  # log-probabilities: without them a batch goes in one call
def test_the_batch_changes_no_bit(asked: int | None) -> None:
    _, native = models(grafted(trunk_config(**WIDE), merge_rank=32))
    prompts = prompts_of(5, asked)
    together = run_core(core_of(native), prompts)
    for name, prompt in prompts.items():
        alone = run_core(core_of(native, max_num_seqs=4, max_num_batched_slots=7), {name: prompt})
        for ours, theirs in zip(alone[name], together[name], strict=True):
            assert (ours.token_ids, ours.stop_probs, ours.logprobs) == (
                theirs.token_ids,
                theirs.stop_probs,
                theirs.logprobs,
            )


@pytest.mark.parametrize("asked", [None, 3])
def test_the_number_of_threads_changes_no_bit(asked: int | None) -> None:
    """So engine/threads.py may change it between two steps."""
    _, native = models(grafted(trunk_config(**WIDE), merge_rank=32))
    prompts = prompts_of(5, asked)
    found, before = [], torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found.append(run_core(core_of(native), prompts))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]
