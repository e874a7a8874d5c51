"""The models that gpu.py measures: published shapes with random weights, and the bytes that a step of them reads.

Speed does not depend on what the weights say, but for how long groups are. So the graft has a max_group of g and a
default confidence of 0: at 0 every group goes on to its end, so each has exactly g tokens. One graft keeps the
published max_group; whoever measures it ends its groups earlier (peers/our_engine.py).
Started as a program (start.py) it writes the folders, so that the driver never imports torch.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comparison.limits import WeightBytes
from hamburger.engine.plan.known_shapes import PRESETS, GraftName, with_graft
from hamburger.model.checkpoints.config.hf import trunk_config_json
from hamburger.model.config import ModelConfig, TrunkConfig
from hamburger.model.tensor_shapes import tensor_shapes

if TYPE_CHECKING:
    from torch import Tensor

TINY = TrunkConfig(
    vocab_size=16384,
    hidden_size=64,
    intermediate_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_word_embeddings=True,
    max_position_embeddings=2048,
)
GEOMETRIES: dict[str, TrunkConfig] = {"llama-3.2-1b": PRESETS["llama-3.2-1b"], "tiny": TINY}
BASE = "base"
WIDE_GRAFT = "published-4"
GRAFTS: dict[str, GraftName] = {"published": "published", "fused": "fused", WIDE_GRAFT: "published"}
MADE = "made.json"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def shapes(geometry: str, group: int) -> dict[str, ModelConfig]:
    """The plain base, and a HAMburger for each kind of graft, with groups of `group` tokens; WIDE_GRAFT has 4."""
    trunk = GEOMETRIES[geometry]
    found = {BASE: ModelConfig(trunk=trunk)}
    for name, kind in GRAFTS.items():
        graft = with_graft(trunk, kind).graft
        assert graft is not None
        most = 4 if name == WIDE_GRAFT else group
        forced = replace(graft, max_group=most, default_confidence=0.0, expected_tokens_per_kv=float(most))
        found[name] = ModelConfig(trunk=trunk, graft=forced)
    return found


def weight_bytes(config: ModelConfig, number_bytes: int, *, eight_bits: bool = False) -> WeightBytes:
    """What a macro-step reads of weights held in numbers of that size; eight_bits: as `quantization` int8 holds
    them, without scales."""
    trunk, graft = config.trunk, config.graft
    sizes = {
        name: prod(shape) * (1 if eight_bits and name.endswith("_proj.weight") and "layers." in name else number_bytes)
        for name, shape in tensor_shapes(config).items()
        if name != "short_list"
    }
    embedding = sizes["model.embed_tokens.weight"]
    head = embedding if trunk.tie_word_embeddings else sizes["lm_head.weight"]
    step = sum(size for name, size in sizes.items() if name.startswith(("model.", "lm_head.")))
    if not trunk.tie_word_embeddings:
        step -= embedding  # only rows of it are read
    if graft is None:
        return WeightBytes(step)
    part = {
        prefix: sum(size for name, size in sizes.items() if name.startswith(prefix))
        for prefix in ("embedder.", "adapter.", "micro_decoder.", "stop_head.")
    }
    head = head // number_bytes if eight_bits else head
    listed = head * (graft.short_list_size or trunk.vocab_size) // trunk.vocab_size
    return WeightBytes(
        step=step + part["stop_head."],
        composed=part["embedder."] + part["adapter."],
        micro_step=part["micro_decoder."] + part["stop_head."] + listed,
    )


def write_models(folder: Path, geometry: str, group: int, dtype: str, device: str) -> None:
    """Write the base's folder and those of the grafts, which name the base beside them."""
    from safetensors.torch import save_file

    from hamburger.model.checkpoints.load import save_checkpoint

    configs = shapes(geometry, group)
    base = tensor_shapes(configs[BASE])
    (folder / BASE).mkdir(parents=True, exist_ok=True)
    tensors = {name: _draw(name, shape, configs[BASE], dtype, device) for name, shape in base.items()}
    save_file(tensors, folder / BASE / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(trunk_config_json(configs[BASE].trunk))
    (folder / BASE / "config.json").write_text(text, encoding="utf-8")
    for name in GRAFTS:
        config = configs[name]
        own = {key: shape for key, shape in tensor_shapes(config).items() if key not in base}
        drawn = {key: _draw(key, shape, config, dtype, device) for key, shape in own.items()}
        save_checkpoint(folder / name, config, drawn, base=f"../{BASE}")
    settings = _settings(geometry, group, dtype)
    (folder / MADE).write_text(json.dumps(settings), encoding="utf-8")


def is_made(folder: Path, geometry: str, group: int, dtype: str) -> bool:
    """Whether the folder already holds these models, whole."""
    file = folder / MADE
    return file.is_file() and json.loads(file.read_text(encoding="utf-8")) == _settings(geometry, group, dtype)


def _settings(geometry: str, group: int, dtype: str) -> dict[str, Any]:
    return {"geometry": geometry, "group": group, "dtype": dtype, "folders": [BASE, *GRAFTS]}


def _draw(name: str, shape: tuple[int, ...], config: ModelConfig, dtype: str, device: str) -> Tensor:
    import torch

    if name == "short_list":
        return torch.randperm(config.trunk.vocab_size)[: shape[0]].sort().values
    kind = getattr(torch, dtype)
    if "norm" in name:
        return torch.ones(shape, dtype=kind)
    drawn: Tensor = torch.randn(shape, dtype=kind, device=device) * float(shape[-1]) ** -0.5
    return drawn.cpu()


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description="Writes models of a published shape with random weights.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--geometry", choices=GEOMETRIES, required=True)
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--dtype", choices=DTYPE_BYTES, required=True)
    parser.add_argument("--device", required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    write_models(args.folder, args.geometry, args.group, args.dtype, args.device)


if __name__ == "__main__":
    main()
