"""The merge adapter: its formula written down once more, and that slots of one token never see it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hamburger.model.assemble import assemble
from hamburger.model.config import ConfigError, ModelConfig, tensor_shapes
from hamburger.model.hamburger import HamburgerModel
from hamburger.model.merge_adapter import MergeAdapter
from small_models import (
    ADAPTED,
    CPU,
    core_of,
    graft_config,
    params,
    random_model,
    random_tensors,
    run_core,
    trunk_config,
)

CONFIG = ModelConfig(trunk=trunk_config(), graft=graft_config(**ADAPTED))
WITHOUT = ModelConfig(trunk=trunk_config(), graft=graft_config())
EPS = CONFIG.trunk.rms_norm_eps


def normed(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def by_hand(tensors: dict[str, Tensor], tokens: Tensor, layer: int, x: Tensor) -> Tensor:
    """One slot: the embeddings of its tokens [n, D] and its state x [D] before the layer."""
    t = {name.removeprefix("merge_adapter."): tensor for name, tensor in tensors.items()}
    places = torch.zeros(4, tokens.shape[1])
    places[4 - len(tokens) :] = normed(tokens)
    inside = F.silu(t["code_in.weight"] @ places.flatten() + t["code_in.bias"])
    code = normed(t["code_out.weight"] @ inside + t["code_out.bias"])
    width = ADAPTED["merge_adapter_width"]
    shift = t["shift.weight"][layer * width : (layer + 1) * width] @ code
    return x + t[f"layers.{layer}.up.weight"] @ F.silu(t[f"layers.{layer}.down.weight"] @ normed(x) + shift)


@pytest.fixture
def model() -> HamburgerModel:
    return random_model(CONFIG, seed=4)


def adapter_of(model: HamburgerModel) -> MergeAdapter:
    assert isinstance(model.merge_adapter, MergeAdapter)
    return model.merge_adapter


@pytest.mark.parametrize("is_masked", [False, True])
def test_it_is_what_its_formula_says(model: HamburgerModel, is_masked: bool) -> None:
    torch.manual_seed(1)
    sizes = torch.tensor([1, 2, 3, 4, 1, 2])
    tokens, x = torch.randn(6, 4, 32), torch.randn(6, 32)
    rows = None if is_masked else (sizes > 1).nonzero().squeeze(-1)
    with torch.inference_mode():
        merged = adapter_of(model)(tokens, sizes, rows)
        for layer in range(4):
            found = merged.enter(layer, x)
            for row, size in enumerate(sizes.tolist()):
                wanted = by_hand(random_tensors(CONFIG, 4), tokens[row, :size], layer, x[row]) if size > 1 else x[row]
                torch.testing.assert_close(found[row], wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(found[sizes == 1], x[sizes == 1])


def test_a_batch_of_narrow_groups_gives_what_a_wide_one_does(model: HamburgerModel) -> None:
    torch.manual_seed(2)
    tokens, sizes = torch.randn(5, 4, 32), torch.tensor([2, 1, 2, 2, 1])
    with torch.inference_mode():
        wide, narrow = (adapter_of(model).shifts(tokens[:, :width], sizes) for width in (4, 2))
    assert torch.equal(wide, narrow)


def test_slots_of_one_token_are_the_base_to_the_bit() -> None:
    """Prompts, scored text and all answers at confidence 1; a model that merges beside them changes nothing."""
    tensors = random_tensors(CONFIG, 6)
    adapted, plain = (
        assemble(config, {name: tensors[name] for name in tensor_shapes(config)}, dtype=torch.float32, device=CPU,
                 max_positions=512)
        for config in (CONFIG, WITHOUT)
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


def test_merged_slots_go_another_way_with_it() -> None:
    model = random_model(CONFIG, seed=4, packed=False)
    requests = {str(i): ([3 + i, 7], params(confidence=0.0, max_tokens=24, ignore_eos=True)) for i in range(4)}
    with_it = run_core(core_of(model), requests)
    for layer in adapter_of(model).layers:
        layer.get_submodule("up").get_parameter("weight").data.zero_()
    without = run_core(core_of(model), requests)
    assert any(
        [output.token_ids for output in with_it[name]] != [output.token_ids for output in without[name]]
        for name in requests
    )
    for name in requests:  # the first group follows a prompt
        assert with_it[name][0].token_ids == without[name][0].token_ids


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"merge_adapter_width": 48, "merge_code_size": 32}, "merge_adapter_width is 48 and merge_code_size 32"),
        ({"merge_adapter_width": 32}, "merge_adapter_width is 32 and merge_code_size 0"),
        ({"merge_code_size": 64}, "both 0"),
        ({"merge_adapter_width": -32, "merge_code_size": 32}, "multiples of 32"),
    ],
)
def test_sizes_that_do_not_fit(sizes: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ModelConfig(trunk=trunk_config(), graft=graft_config(**sizes))
