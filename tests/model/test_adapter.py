"""Adapters of composed slots: what they add, and that slots of one token never see them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hamburger.model.assemble import assemble, model_of
from hamburger.model.config import ConfigError, ModelConfig
from hamburger.model.modules.adapter import ComposedSlots, LowRank
from hamburger.model.modules.layers import DecoderLayer
from hamburger.model.modules.linear import weights_of
from hamburger.model.tensor_shapes import tensor_shapes
from small_models import (
    CPU,
    core_of,
    graft_config,
    grafted,
    params,
    plain_model,
    random_tensors,
    run_core,
    steps_of,
    trunk_config,
)

CONFIG = grafted(adapter_rank=32)


@pytest.mark.parametrize("is_masked", [False, True])
def test_composed_slots_get_more_and_others_nothing(is_masked: bool) -> None:
    torch.manual_seed(1)
    adapter = LowRank(16, 24, 32)
    sizes, x, y = torch.tensor([1, 2, 4, 1, 3]), torch.randn(5, 16), torch.randn(5, 24)
    rows = (sizes > 1).nonzero().squeeze(-1)
    composed = ComposedSlots(None, (sizes > 1)[:, None]) if is_masked else ComposedSlots(rows, None)
    with torch.inference_mode():
        found = composed.add(adapter, x, y)
        (up, _), (down, _) = weights_of(adapter.up), weights_of(adapter.down)
        wanted = y + (up @ (down @ x.T)).T
    torch.testing.assert_close(found[rows], wanted[rows])
    assert torch.equal(found[sizes == 1], y[sizes == 1])


def test_a_layers_linears_are_those_of_merged_weights() -> None:
    """For slots that pass them, as if alpha / rank B A had been added to the weights."""
    tensors = random_tensors(CONFIG, 3)
    model = plain_model(CONFIG, seed=3)
    whole = dict(tensors)
    for name in tensors:
        if name.endswith(".lora_A"):
            pair = name.removesuffix(".lora_A")
            target = pair.removeprefix("adapter.") + ".weight"
            whole[target] = tensors[target] + tensors[f"{pair}.lora_B"] @ tensors[name]
    plain = grafted()
    other = model_of(plain, {name: whole[name] for name in tensor_shapes(plain)}, dtype=torch.float32, device=CPU,
                     max_positions=64)  # fmt: skip
    x, everyone = torch.randn(3, 32), ComposedSlots(torch.arange(3), None)
    cos, sin = other.rotary(torch.arange(3))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q + torch.cat((k, v), dim=1)).flatten(1)

    with torch.inference_mode():
        for ours, theirs in zip(model.trunk.layers, other.trunk.layers, strict=True):
            assert isinstance(ours, DecoderLayer)
            found, wanted = ours(x, cos, sin, attend, composed=everyone), theirs(x, cos, sin, attend)
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_slots_of_one_token_are_the_base_to_the_bit() -> None:
    """Prompts, scored text and all answers at confidence 1; requests that merge beside them change nothing."""
    tensors = random_tensors(CONFIG, 6)
    adapted, plain = (
        assemble(config, {name: tensors[name] for name in tensor_shapes(config)}, dtype=torch.float32, device=CPU,
                 max_positions=512)
        for config in (CONFIG, grafted())
    )  # fmt: skip
    sure = {str(i): ([3 + i, 7, 40 + i], params(confidence=1.0, max_tokens=12, logprobs=3)) for i in range(4)}
    merging = {f"m{i}": ([50 + i, 9], params(confidence=0.0, max_tokens=24)) for i in range(4)}
    found = run_core(core_of(adapted), sure | merging)
    wanted = run_core(core_of(plain), sure)
    assert max(len(output.token_ids) for name in merging for output in found[name]) > 1
    for name in sure:
        assert [output.token_ids for output in found[name]] == [output.token_ids for output in wanted[name]]
        for a, b in zip(found[name], wanted[name], strict=True):
            assert a.logprobs == b.logprobs


def test_composed_slots_go_another_way_with_it() -> None:
    model = plain_model(CONFIG, seed=4)
    requests = {str(i): ([3 + i, 7], params(confidence=0.0, max_tokens=24, ignore_eos=True)) for i in range(4)}
    with_it = run_core(core_of(steps_of(model)), requests)
    for name, parameter in model.named_parameters():
        if "_adapter.up" in name:
            parameter.data.zero_()
    without = run_core(core_of(steps_of(model)), requests)
    assert any(
        [output.token_ids for output in with_it[name]] != [output.token_ids for output in without[name]]
        for name in requests
    )
    for name in requests:  # the first group follows a prompt
        assert with_it[name][0].token_ids == without[name][0].token_ids


@pytest.mark.parametrize("rank", [8, -32, 48])
def test_ranks_that_the_kernels_cannot_take(rank: int) -> None:
    with pytest.raises(ConfigError, match=f"is {rank}: it must be a multiple of 32"):
        ModelConfig(trunk=trunk_config(), graft=graft_config(), adapter_rank=rank)


def test_without_a_graft_nothing_is_merged() -> None:
    with pytest.raises(ConfigError, match="needs a graft"):
        ModelConfig(trunk=trunk_config(), adapter_rank=32)
