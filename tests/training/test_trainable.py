"""From a base or a checkpoint to a module and back: what is written is what was trained, and it can be served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hamburger.model.assemble import assemble, model_of
from hamburger.model.checkpoints.load import load_checkpoint
from hamburger.model.checkpoints.sources import resolve_source
from hamburger.model.modules.layers import RMSNorm
from hamburger.model.tensor_shapes import tensor_shapes
from hamburger.training.errors import TrainingError
from hamburger.training.forward.grafts import likeliest_ids
from hamburger.training.forward.network import Slots, micro_states, trunk_states
from hamburger.training.forward.origin import read_base, read_hamburger, with_graft
from hamburger.training.forward.trainable import Trainable, build, canonical_tensors
from hamburger.training.recipe import Recipe
from small_models import CPU, random_tensors, teacher_forced
from training_runs import FUSED, GRAFT, recipe, write_base
from trunk_shapes import SHAPES

ADAPTER: dict[str, Any] = {"mode": "adapter", "rank": 2, "alpha": 8}
MODES = [{"mode": "full"}, {"mode": "frozen"}, {"mode": "merges", "rank": 32}, ADAPTER]


def short_list(size: int) -> torch.Tensor:
    return likeliest_ids([torch.arange(96)], size, 96)


def trainable(made: Recipe) -> Trainable:
    origin = read_hamburger(made.init) if made.init else read_base(made.base)
    return build(with_graft(origin, made, short_list), made, device=CPU, compute=torch.float32, max_positions=32)


def shake(made: Trainable) -> None:
    """Move every trained weight, as training would."""
    draw = torch.Generator().manual_seed(5)
    for parameter in made.model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=draw)


@pytest.mark.parametrize("trunk", MODES, ids=lambda trunk: trunk["mode"])
@pytest.mark.parametrize(
    "graft",
    [GRAFT, {**FUSED, "short_list_size": 60}],
    ids=["positions", "fused"],
)
def test_the_served_model_computes_what_was_trained(
    tmp_path: Path, trunk: dict[str, Any], graft: dict[str, Any]
) -> None:
    check_that_served_is_trained(trainable(recipe(write_base(tmp_path / "base"), trunk=trunk, graft=graft)), tmp_path)


@pytest.mark.parametrize("trunk", MODES, ids=lambda trunk: trunk["mode"])
@pytest.mark.parametrize(
    "shape", ["llama_with_biases", "mistral", "qwen2_sliding", "qwen3_sliding_yarn", "smollm3", "olmo2", "gemma3"]
)
def test_every_architecture_carries_a_graft(tmp_path: Path, shape: str, trunk: dict[str, Any]) -> None:
    changes = {**SHAPES[shape], "num_layers": 4}
    if "sliding_window" in changes:
        changes["sliding_window"] = 5
    base = write_base(tmp_path / "base", **changes)
    check_that_served_is_trained(trainable(recipe(base, trunk=trunk, graft=GRAFT)), tmp_path)


@pytest.mark.parametrize("shape", ["qwen3", "olmo2"])
def test_norms_behind_a_projection_keep_to_float32_under_autocast(tmp_path: Path, shape: str) -> None:
    made = trainable(recipe(write_base(tmp_path / "base", **SHAPES[shape]), graft=GRAFT))
    norms = [m for m in made.model.trunk.modules() if isinstance(m, RMSNorm)]
    found: list[torch.dtype] = []
    for norm in norms:
        norm.register_forward_hook(lambda module, given, out: found.append(out.dtype))
    slots = Slots(torch.arange(5, 25)[:, None], torch.ones(20, dtype=torch.int64), torch.arange(20), [20])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # torch warns of a norm of two dtypes
        trunk_states(made.model, slots)
    assert found == [torch.float32] * len(norms)


def check_that_served_is_trained(made: Trainable, tmp_path: Path) -> None:
    shake(made)
    made.save(tmp_path / "saved", made.model.state_dict())
    checkpoint = load_checkpoint(resolve_source(str(tmp_path / "saved")), torch.float32)
    served = assemble(checkpoint.config, checkpoint.tensors, dtype=torch.float32, device=CPU, max_positions=64)
    ids, first, sizes = list(range(5, 25)), 6, [1, 4, 2, 3, 1, 3]
    logits, stops = teacher_forced(served, ids, first, sizes)
    with torch.no_grad():
        ours, our_stops = _training_forward(made, ids, first, sizes)
    assert torch.allclose(logits, ours, atol=2e-5)
    assert torch.allclose(stops, our_stops, atol=2e-5)


def _training_forward(
    made: Trainable, ids: list[int], num_prompt: int, sizes: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [n, V] and stop logits [n] of each token after the prompt."""
    starts = [*range(num_prompt), *(num_prompt + sum(sizes[:i]) for i in range(len(sizes)))]
    widths = [1] * num_prompt + sizes
    tokens = torch.zeros(len(starts), 4, dtype=torch.int64)
    for row, (start, width) in enumerate(zip(starts, widths, strict=True)):
        tokens[row, :width] = torch.tensor(ids[start : start + width])
    last = torch.tensor([s + w - 1 for s, w in zip(starts, widths, strict=True)])
    model, graft = made.model, made.model.config.graft
    assert graft is not None
    hidden, features = trunk_states(
        model, Slots(tokens, torch.tensor(widths), last, [len(starts)]), graft.feature_layers
    )
    states = []
    for row, size in enumerate(sizes):
        before = num_prompt - 1 + row
        states.append(hidden[before : before + 1])
        if size > 1:
            inside = tokens[before + 1 : before + 2, : size - 1]
            states.append(micro_states(model, features[before : before + 1], inside)[0])
    joined = torch.cat(states)
    return joined @ model.head_weight.T, model.stop_head(joined)[:, 0]


@pytest.mark.parametrize("graft", [GRAFT, FUSED], ids=["positions", "fused"])
def test_micro_steps_at_once_are_those_one_by_one(tmp_path: Path, graft: dict[str, Any]) -> None:
    made = trainable(recipe(write_base(tmp_path / "base"), graft=graft))
    shake(made)
    model, shape = made.model, made.model.config.graft
    assert shape is not None
    features = torch.randn(5, len(shape.feature_layers), model.config.trunk.hidden_size)
    ids = torch.arange(15).view(5, 3)
    cache = model.micro_decoder.start(features)
    each = [model.micro_decoder(e, cache, model.rotary) for e in model.embed_tokens(ids).unbind(1)]
    assert torch.allclose(micro_states(model, features, ids), torch.stack(each, dim=1), atol=1e-5)


@pytest.mark.parametrize("trunk", MODES, ids=lambda trunk: trunk["mode"])
def test_a_checkpoint_is_gone_on_with_bit_for_bit(tmp_path: Path, trunk: dict[str, Any]) -> None:
    base = write_base(tmp_path / "base")
    made = trainable(recipe(base, trunk=trunk))
    shake(made)
    made.save(tmp_path / "saved", made.model.state_dict())
    again = trainable(recipe(base, trunk=trunk, init=str(tmp_path / "saved")))
    before, after = made.model.state_dict(), again.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert again.base == made.base


def test_what_was_measured_on_the_weights_to_begin_from_is_forgotten(tmp_path: Path) -> None:
    base, saved = write_base(tmp_path / "base"), tmp_path / "saved"
    made = trainable(recipe(base))
    made.save(saved, made.model.state_dict())
    settings = json.loads((saved / "config.json").read_text())
    settings["graft"] |= {"stop_scale": [2.0] * 4, "stop_bias": [1.0] * 4, "expected_tokens_per_kv": 1.7}
    (saved / "config.json").write_text(json.dumps(settings))
    graft = trainable(recipe(base, init=str(saved))).model.config.graft
    assert graft is not None
    assert (graft.stop_scale, graft.stop_bias, graft.expected_tokens_per_kv) == (None, None, 1.0)


@pytest.mark.parametrize(
    ("trunk", "trained"),
    [
        ({"mode": "frozen"}, {"embedder", "micro_decoder", "stop_head"}),
        (ADAPTER, {"embedder", "micro_decoder", "stop_head", "lora"}),
        ({"mode": "full"}, {"embedder", "micro_decoder", "stop_head", "trunk", "embed_tokens"}),
    ],
)
def test_what_is_trained(tmp_path: Path, trunk: dict[str, Any], trained: set[str]) -> None:
    made = trainable(recipe(write_base(tmp_path / "base"), trunk=trunk))
    found = {
        "lora" if ".lora_" in name else name.split(".")[0]
        for name, parameter in made.model.named_parameters()
        if parameter.requires_grad
    }
    assert found == trained


def test_canonical_tensors_are_the_inverse_of_assemble(tmp_path: Path) -> None:
    made = trainable(recipe(write_base(tmp_path / "base", tie_word_embeddings=False)))
    config = made.model.config
    tensors = random_tensors(config, seed=3)
    model = model_of(config, tensors, dtype=torch.float32, device=CPU, max_positions=32)
    back = canonical_tensors(config, model.state_dict())
    assert back.keys() == tensor_shapes(config).keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_the_adapter_of_a_checkpoint_stays_when_only_the_graft_is_trained(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    made = trainable(recipe(base, trunk=ADAPTER))
    shake(made)
    made.save(tmp_path / "saved", made.model.state_dict())
    frozen = trainable(recipe(base, trunk={"mode": "frozen"}, init=str(tmp_path / "saved")))
    assert not any(p.requires_grad for name, p in frozen.model.named_parameters() if "lora" in name)
    frozen.save(tmp_path / "frozen", frozen.model.state_dict())
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("saved", "frozen"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    full = trainable(recipe(base, init=str(tmp_path / "saved")))
    full.save(tmp_path / "full", full.model.state_dict())
    ours = load_checkpoint(resolve_source(str(tmp_path / "saved")), torch.float32).tensors
    merged = load_checkpoint(resolve_source(str(tmp_path / "full")), torch.float32).tensors
    assert all(torch.allclose(ours[name], merged[name], atol=1e-6) for name in ours)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    made = trainable(recipe(base, trunk=ADAPTER))
    made.save(tmp_path / "saved", made.model.state_dict())
    begin = {"init": str(tmp_path / "saved")}
    with pytest.raises(TrainingError, match=r"trunk.rank and trunk.alpha are 4 and 8.0"):
        trainable(recipe(base, trunk={**ADAPTER, "rank": 4}, **begin))
    with pytest.raises(TrainingError, match=r"graft.micro_layers is 2 in the recipe, but 1"):
        trainable(recipe(base, trunk=ADAPTER, graft={**GRAFT, "micro_layers": 2}, **begin))
    with pytest.raises(TrainingError, match="has 2 layers"):
        trainable(recipe(base, graft={**GRAFT, "feature_layers": 3}))
    with pytest.raises(TrainingError, match="must be a folder of our format"):
        trainable(recipe(base, init=str(base)))
    with pytest.raises(TrainingError, match="must be `builtin`, or a base"):
        trainable(recipe(tmp_path / "saved"))
    path = tmp_path / "saved" / "model.safetensors"
    tensors = load_file(path)
    tensors["adapter.model.layers.0.self_attn.k_proj.lora_A"] += 1
    save_file(tensors, path)
    with pytest.raises(TrainingError, match="do not share one lora_A"):
        trainable(recipe(base, trunk=ADAPTER, **begin))
