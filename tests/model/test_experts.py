"""Trunks of experts: how they are configured and named in files, what is refused, and that a slot's sum is its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hamburger.engine.core.pool import lora_bytes
from hamburger.engine.plan.shape import shape_of
from hamburger.model.assemble import model_of
from hamburger.model.checkpoints.config.hf import read_trunk_config
from hamburger.model.checkpoints.load import load_checkpoint, save_checkpoint
from hamburger.model.checkpoints.lora_folder import read_lora
from hamburger.model.checkpoints.sources import CheckpointError, resolve_source
from hamburger.model.config import ConfigError, ExpertsConfig, ModelConfig
from hamburger.model.modules.layers import Expert, Experts
from hamburger.model.modules.linear import plain_linear, weights_of
from hamburger.model.parallel.step_shape import shard_trunk
from hamburger.model.tensor_shapes import layer_shapes
from lora_folders import lora_folder
from peer import saved, with_joined_experts
from same_groups import assert_same_groups
from small_models import CPU, core_of, graft_config, params, random_model, random_tensors, run_core, trunk_config
from trunk_shapes import MIXTRAL, MIXTURES, QWEN3_MOE

QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip


def experts(number: int = 7, per_token: int = 3, seed: int = 0) -> Experts:
    config = ExpertsConfig(number=number, per_token=per_token, width=24, sum_to_one=True)
    torch.manual_seed(seed)
    return Experts(config, 16, "silu", plain_linear).requires_grad_(False)


def test_the_likeliest_experts_are_summed_by_their_chances() -> None:
    """Of two numbers the router of the identity knows which is larger; expert n gives n + 1 times silu(1)."""
    config = ExpertsConfig(number=2, per_token=1, width=1, sum_to_one=False)
    layer = Experts(config, 2, "silu", plain_linear).requires_grad_(False)
    layer.router.weight.copy_(torch.eye(2))
    for n, expert in enumerate(layer.each):
        assert isinstance(expert, Expert)
        weights_of(expert.gate_up_proj)[0].copy_(torch.ones(2, 2))
        weights_of(expert.down_proj)[0].copy_(torch.tensor([[n + 1.0], [0.0]]))
    x = torch.tensor([[1.0, 0.0], [-1.0, 2.0]])
    chance = torch.tensor([1.0, 3.0]).sigmoid()
    silu = torch.tensor(1.0).sigmoid()
    expected = torch.stack((chance * torch.tensor([1.0, 2.0]) * silu, torch.zeros(2)), dim=1)
    torch.testing.assert_close(layer(x), expected)
    one = Experts(ExpertsConfig(number=2, per_token=1, width=1, sum_to_one=True), 2, "silu", plain_linear)
    one.load_state_dict(layer.state_dict())
    torch.testing.assert_close(one(x), expected / chance[:, None])


def test_a_slot_has_the_same_sum_beside_any_others() -> None:
    """To torch's rounding, as in any linear: products of several rows are added up in another order."""
    layer, x = experts(), torch.randn(40, 16)
    together = layer(x)
    for row in range(40):
        torch.testing.assert_close(layer(x[row : row + 1])[0], together[row], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(layer(x.view(5, 8, 16)).view(40, 16), together, atol=0, rtol=0)


def test_a_slot_that_is_no_number_harms_no_other() -> None:
    layer, x = experts(), torch.randn(6, 16)
    wanted = layer(x)
    x[2, 3] = float("nan")
    found = layer(x)
    assert found[2].isnan().all()
    torch.testing.assert_close(found[[0, 1, 3, 4, 5]], wanted[[0, 1, 3, 4, 5]], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("told", "dense"),
    [
        ({}, ()),
        ({"mlp_only_layers": [0, 2]}, (0, 2)),
        ({"decoder_sparse_step": 2}, (0, 2)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, (0, 1, 2)),
    ],
)
def test_which_layers_have_experts(tmp_path: Path, told: dict[str, Any], dense: tuple[int, ...]) -> None:
    peer = saved(tmp_path, **QWEN, **told)
    trunk = read_trunk_config(tmp_path)
    assert trunk.experts == ExpertsConfig(number=6, per_token=2, width=32, sum_to_one=False, dense_layers=dense)
    has_router = tuple(not hasattr(layer.mlp, "gate") for layer in peer.model.layers)
    assert has_router == tuple(layer in dense for layer in range(3))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9: it must be in 1..6"),
        ({"num_local_experts": None}, "num_experts is missing"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"mlp_only_layers": ["1"]}, "mlp_only_layers is"),
        ({"model_type": "qwen2_moe"}, "model_type 'qwen2_moe' is not supported"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    saved(tmp_path, **QWEN)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=named):
        read_trunk_config(tmp_path)


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("kind", [QWEN, {"model_type": "mixtral", "num_local_experts": 5}], ids=["qwen3", "mixtral"])
def test_every_form_of_a_checkpoint_is_one_model(tmp_path: Path, kind: dict[str, Any]) -> None:
    """As transformers saves it, in shards, with the experts of a layer in one tensor, and in our own format."""
    peer = saved(tmp_path, **kind)
    loaded = load_checkpoint(resolve_source(str(tmp_path)), torch.float32)
    joined = with_joined_experts(loaded.config, loaded.tensors)
    assert same(joined, dict(peer.state_dict()))
    sharded = tmp_path / "sharded"
    peer.save_pretrained(sharded, max_shard_size="20KB")
    assert len([*sharded.glob("*.safetensors")]) > 1
    assert same(load_checkpoint(resolve_source(str(sharded)), torch.float32).tensors, loaded.tensors)
    fused = tmp_path / "fused"
    peer.save_pretrained(fused)
    save_file({name: tensor.contiguous() for name, tensor in joined.items()}, fused / "model.safetensors")
    assert same(load_checkpoint(resolve_source(str(fused)), torch.float32).tensors, loaded.tensors)
    own = tmp_path / "own"
    save_checkpoint(own, loaded.config, loaded.tensors)
    again = load_checkpoint(resolve_source(str(own)), torch.float32)
    assert again.config == loaded.config
    assert same(again.tensors, loaded.tensors)


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    saved(tmp_path, **QWEN)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.4.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing tensors: model\.layers\.1\.mlp\.experts\.4\.up_proj\.weight\."):
        load_checkpoint(resolve_source(str(tmp_path)), torch.float32)


def test_experts_are_held_once_and_counted() -> None:
    config = ModelConfig(trunk=trunk_config(**QWEN3_MOE))
    tensors = random_tensors(config)
    model = model_of(config, tensors, dtype=torch.float32, device=CPU, max_positions=64)
    total = sum(tensor.numel() for tensor in tensors.values())
    assert sum(parameter.numel() for parameter in model.parameters()) == total
    assert shape_of("here", config, "float32").parameters == total
    of_layer = 3 * 32 * 32 * 6
    assert sum(tensor.numel() for name, tensor in tensors.items() if ".experts." in name) == 3 * of_layer


def test_what_is_not_known_with_experts_is_refused_by_name() -> None:
    trunk = trunk_config(**QWEN3_MOE)
    with pytest.raises(ConfigError, match="a graft on qwen3_moe"):
        ModelConfig(trunk=trunk, graft=graft_config())
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2, but the experts of qwen3_moe"):
        shard_trunk(trunk, 2)
    with pytest.raises(ConfigError, match="experts are known in layers with norms before"):
        trunk_config(**{**QWEN3_MOE, "norms": "after"})


def test_adapters_are_of_attention_and_dense_layers_alone(tmp_path: Path) -> None:
    config = ModelConfig(trunk=trunk_config(**QWEN3_MOE))
    found = read_lora(lora_folder(tmp_path / "all", config, seed=1), config.trunk, 64)
    assert {name for layer, name in found.pairs if layer == 0} == {f"self_attn.{n}_proj" for n in "qkvo"}
    assert {name for layer, name in found.pairs if layer == 1} >= {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    most = lora_bytes(config.trunk, 8, 4)
    dense = lora_bytes(trunk_config(**{**QWEN3_MOE, "experts": None}), 8, 4)
    assert 0 < most < dense
    folder = tmp_path / "all"
    tensors = load_file(folder / "adapter_model.safetensors")
    for module in ("mlp.gate_proj", "mlp.experts.0.gate_proj"):
        pair = {
            f"base_model.model.model.layers.0.{module}.lora_{side}.weight": torch.zeros(shape)
            for side, shape in (("A", (8, 32)), ("B", (48, 8)))
        }
        save_file(tensors | pair, folder / "adapter_model.safetensors")
        with pytest.raises(CheckpointError, match="experts and their router have none"):
            read_lora(folder, config.trunk, 64)


@pytest.mark.parametrize("shape", MIXTURES)
def test_groups_in_static_shapes_are_the_same(shape: str) -> None:
    """As a GPU makes them, behind a trunk that runs eagerly."""
    config = ModelConfig(trunk=trunk_config(**MIXTURES[shape]))
    asked = {str(n): ([*range(2, n + 2)], params(max_tokens=6, logprobs=2, ignore_eos=True)) for n in (1, 9, 30)}
    found, wanted = (
        run_core(core_of(random_model(config, packed=False, static_shapes=static)), asked) for static in (True, False)
    )
    assert_same_groups(found, wanted)


@pytest.mark.parametrize("shape", MIXTURES)
def test_a_layer_has_the_tensors_that_its_kind_says(shape: str) -> None:
    trunk = trunk_config(**MIXTURES[shape])
    for layer in range(trunk.num_layers):
        has = {name for name in layer_shapes(trunk, layer) if name.startswith("mlp.")}
        mixture = trunk.experts_of(layer)
        assert len(has) == (3 if mixture is None else 1 + 3 * mixture.number)
    assert MIXTRAL["experts"].sum_to_one
