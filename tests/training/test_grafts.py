"""A new graft starts as what is said of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hamburger.model.assemble import model_of
from hamburger.model.config import ModelConfig
from hamburger.model.tensor_shapes import layer_shapes, tensor_shapes
from hamburger.training.errors import TrainingError
from hamburger.training.forward.grafts import likeliest_ids, new_graft
from small_models import CPU, graft_config, random_tensors, trunk_config
from trunk_shapes import GEMMA3

FUSED = {"features": "fused", "micro_norm": True, "short_list_size": 5}
LIST = torch.tensor([9, 3, 5, 7, 2])


def test_a_merge_starts_near_its_last_token_and_the_dial_at_one_half() -> None:
    config = ModelConfig(trunk=trunk_config(), graft=graft_config(**FUSED))
    base = random_tensors(ModelConfig(trunk=trunk_config()))
    graft = new_graft(config, base, LIST, seed=1)
    assert {n: tuple(t.shape) for n, t in (base | graft).items()} == tensor_shapes(config)
    model = model_of(config, base | graft, dtype=torch.float32, device=CPU, max_positions=64)
    embeddings = model.embed_tokens(torch.tensor([[5, 70, 31, 8], [5, 31, 70, 8], [9, 9, 0, 0]]))
    sizes = torch.tensor([3, 3, 2])
    with torch.inference_mode():
        merged = model.embedder(embeddings, sizes, torch.arange(3))
        stop = model.stop_head(torch.randn(6, 32))
    mean = torch.stack([e[:n].mean(0) for e, n in zip(embeddings, sizes, strict=True)])
    last = embeddings[torch.arange(3), sizes - 1]
    strongest = torch.linalg.svd(base["model.embed_tokens.weight"].float()).Vh[:24]  # three heads in four of 32
    torch.testing.assert_close(merged - mean, last @ strongest.T @ strongest, rtol=0.1, atol=0.1)
    assert (merged[0] - merged[1]).norm() > 0.5 * (last[0] - last[1]).norm()  # their order tells them apart
    assert stop.abs().max() == 0
    assert graft["short_list"].tolist() == sorted(LIST.tolist())
    last = base["model.layers.3.mlp.up_proj.weight"]
    assert torch.equal(graft["micro_decoder.layers.1.mlp.up_proj.weight"], last)
    assert torch.equal(graft["micro_decoder.norm.weight"], base["model.norm.weight"])
    with torch.inference_mode():
        features = model.micro_decoder.feature_proj(torch.cat((torch.zeros(64), torch.ones(32))))
    assert (features - 1).abs().max() < 0.6  # the last feature, and a little noise


@pytest.mark.parametrize(
    ("trunk", "damped"),
    [({}, "mlp.down_proj.weight"), (GEMMA3, "post_feedforward_layernorm.weight")],
    ids=["norms before", "norms around"],
)
def test_what_the_layers_add_to_a_fused_input_is_damped(trunk: dict[str, Any], damped: str) -> None:
    config = ModelConfig(trunk=trunk_config(**trunk), graft=graft_config(**FUSED))
    base = random_tensors(ModelConfig(trunk=config.trunk))
    graft = new_graft(config, base, LIST, seed=1)
    changed = [
        part
        for part in layer_shapes(config.trunk)
        if not torch.equal(graft[f"micro_decoder.layers.1.{part}"], base[f"model.layers.3.{part}"])
    ]
    assert len(changed) == 2
    torch.testing.assert_close(graft[f"micro_decoder.layers.1.{damped}"], 0.1 * base[f"model.layers.3.{damped}"])


def test_the_seed_decides_and_a_wrong_list_is_an_error() -> None:
    config = ModelConfig(trunk=trunk_config(), graft=graft_config())
    base = random_tensors(ModelConfig(trunk=trunk_config()))
    once, again, other = (new_graft(config, base, None, seed=s) for s in (1, 1, 2))
    assert all(torch.equal(once[n], again[n]) for n in once)
    assert not torch.equal(once["embedder.q_proj.weight"], other["embedder.q_proj.weight"])
    with pytest.raises(TrainingError, match="short_list_size is None"):
        new_graft(config, base, LIST, seed=1)
    with pytest.raises(TrainingError, match="no graft"):
        new_graft(ModelConfig(trunk=trunk_config()), base, None, seed=1)


def test_the_likeliest_ids_are_those_seen_most() -> None:
    seen = [torch.tensor([7, 7, 3]), torch.tensor([[3, 7], [9, 1]])]
    assert likeliest_ids(iter(seen), 3, 12).tolist() == [1, 3, 7]
