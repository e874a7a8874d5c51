"""Adapters over a referenced base: merged into its weights, or kept for slots of several tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from checkpoints import GRAFTED, PLAIN, Tensors, assert_equal, edit_config, graft_only, load, save_hf
from hamburger.model.checkpoints.config.folder import Adapter
from hamburger.model.checkpoints.load import save_checkpoint
from hamburger.model.checkpoints.sources import CheckpointError
from hamburger.model.tensor_shapes import tensor_shapes
from small_models import grafted, random_tensors

LINEAR = "model.layers.1.self_attn.k_proj"


def grafts_on_base(tmp_path: Path, extra: Tensors, adapter: tuple[int, float] | None) -> tuple[Path, Tensors]:
    tensors = random_tensors(GRAFTED)
    save_hf(tmp_path / "base", PLAIN, {n: t for n, t in tensors.items() if n in tensor_shapes(PLAIN)})
    given = None if adapter is None else Adapter(*adapter)
    save_checkpoint(tmp_path / "grafts", GRAFTED, graft_only(tensors) | extra, base="../base", adapter=given)
    return tmp_path / "grafts", tensors


def test_an_adapter_for_merged_slots_is_kept_apart(tmp_path: Path) -> None:
    config = grafted(adapter_rank=32)
    tensors = random_tensors(config)
    save_hf(tmp_path / "base", PLAIN, {n: t for n, t in tensors.items() if n in tensor_shapes(PLAIN)})
    own = {n: t for n, t in tensors.items() if n not in tensor_shapes(PLAIN)}
    folder = tmp_path / "grafts"
    save_checkpoint(folder, config, own, base="../base")
    settings = json.loads((folder / "config.json").read_text())
    assert settings["adapter"] == {"rank": 32, "alpha": 32, "slots": "composed"}
    loaded = load(folder)
    assert loaded.config == config
    assert_equal(loaded.tensors, tensors)
    edit_config(folder, adapter={"rank": 32, "alpha": 64.0, "slots": "composed"})
    pair = "adapter.model.layers.1.mlp.down_proj"
    scaled = load(folder).tensors
    assert torch.equal(scaled[f"{pair}.lora_B"], 2 * tensors[f"{pair}.lora_B"])
    assert torch.equal(scaled[f"{pair}.lora_A"], tensors[f"{pair}.lora_A"])
    assert torch.equal(scaled["model.layers.1.mlp.down_proj.weight"], tensors["model.layers.1.mlp.down_proj.weight"])
    edit_config(folder, adapter={"rank": 32, "alpha": 64.0, "slots": "all"})
    assert load(folder).config == grafted()  # in the weights of all slots
    edit_config(folder, adapter={"rank": 32, "alpha": 64.0, "slots": "some"})
    with pytest.raises(CheckpointError, match=r"adapter\.slots is 'some': it must be all or composed"):
        load(folder)
    other = {**own, "adapter.model.layers.2.self_attn.v_proj.lora_A": torch.randn(32, 32)}
    save_checkpoint(folder, config, other, base="../base")
    with pytest.raises(CheckpointError, match=r"layers.2.self_attn.q_proj.lora_A and .* differ"):
        load(folder)
    del other["adapter.model.layers.2.self_attn.v_proj.lora_A"]
    with pytest.raises(CheckpointError, match=r"missing.*v_proj.lora_A"):
        save_checkpoint(folder, config, other, base="../base")


def adapter_pair(name: str = LINEAR, rank: int = 3, rows: int = 16) -> Tensors:
    generator = torch.Generator().manual_seed(5)
    return {
        f"adapter.{name}.lora_A": torch.randn(rank, 32, generator=generator),
        f"adapter.{name}.lora_B": torch.randn(rows, rank, generator=generator),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_is_merged_in_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    pair = adapter_pair()
    folder, tensors = grafts_on_base(tmp_path, pair, (3, 6.0))
    a, b = pair.values()
    expected = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    expected[f"{LINEAR}.weight"] = (tensors[f"{LINEAR}.weight"] + 2.0 * b @ a).to(dtype)
    assert_equal(load(folder, dtype).tensors, expected)


@pytest.mark.parametrize(
    ("extra", "adapter", "named"),
    [
        (adapter_pair(rank=2), (3, 6.0), "misshaped.*lora_A"),
        (adapter_pair(rows=15), (3, 6.0), "misshaped.*lora_B"),
        (adapter_pair(), None, "unknown.*lora_A"),
        ({}, (3, 6.0), "no tensors adapter"),
        (dict(list(adapter_pair().items())[:1]), (3, 6.0), "missing.*lora_B"),
        (dict(list(adapter_pair().items())[1:]), (3, 6.0), "missing.*lora_A"),
        (adapter_pair("model.embed_tokens", rows=96), (3, 6.0), "unknown.*embed_tokens"),
        (adapter_pair("micro_decoder.layers.0.self_attn.k_proj"), (3, 6.0), "unknown.*micro_decoder"),
        (adapter_pair("model.layers.9.self_attn.k_proj"), (3, 6.0), r"unknown.*layers\.9"),
        ({"model.norm.weight": torch.ones(32)}, None, r"unknown.*model\.norm\.weight"),
    ],
)
def test_what_does_not_fit_a_base_is_refused_at_saving_and_at_loading(
    tmp_path: Path, extra: Tensors, adapter: tuple[int, float] | None, named: str
) -> None:
    with pytest.raises(CheckpointError, match=named):
        grafts_on_base(tmp_path, extra, adapter)
    folder, tensors = grafts_on_base(tmp_path, {}, None)
    if adapter is not None:
        edit_config(folder, adapter={"rank": adapter[0], "alpha": adapter[1]})
    save_file(graft_only(tensors) | extra, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=named):
        load(folder)
