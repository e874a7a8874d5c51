"""`hamburger fit-settle`, and where the probe that it writes is looked for."""

from __future__ import annotations

import argparse
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import hamburger.training.settling.fit as fitting
from hamburger.engine.device.load import resolve, slot_choice
from hamburger.engine.types.config import EngineArgs
from hamburger.model.checkpoints.hf_config import trunk_config_json
from hamburger.model.checkpoints.load import save_checkpoint
from hamburger.model.checkpoints.settle_probe import load_probe, read_probe
from hamburger.model.checkpoints.sources import BUILTIN, PROBE_FILE, CheckpointError, resolve_source
from hamburger.model.config import ModelConfig
from hamburger.training.cli.settle import add_fit_settle_arguments
from hamburger.training.errors import TrainingError
from hamburger.training.settling.fit import Chunks, fit, kept, scored
from small_models import graft_config, random_tensors, trunk_config

TRUNK = trunk_config(vocab_size=49152, hidden_size=32, eos_token_ids=(2,), max_position_embeddings=512)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A base, and answers that are said to be its own."""
    folder = tmp_path / "base"
    config = ModelConfig(trunk=TRUNK)
    save_checkpoint(folder, config, random_tensors(config, seed=1))
    (folder / "config.json").write_text(json.dumps(trunk_config_json(TRUNK)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN / name, folder / name)
    draw = random.Random(1)
    rows = [
        {"id": str(i), "sample": 0, "category": "a", "model": "m", "sampling": "greedy", "finish_reason": "length",
         "messages": [{"role": "user", "content": "Hi"}], "prompt_ids": [5, 6], "response": "",
         "token_ids": [draw.randrange(3, 49152) for _ in range(260)]}
        for i in range(3)
    ]  # fmt: skip
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def arguments(folder: Path, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_fit_settle_arguments(parser)
    given = ["--model", folder, "--answers", folder.parent / "answers.jsonl", "--min-tokens", "200", "--steps", "5"]
    return parser.parse_args([*map(str, given), "--device", "cpu", "--out", str(folder / PROBE_FILE), *more])


def test_serve_finds_what_was_fitted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = EngineArgs(model=str(folder), device="cpu", dtype="float32", settle=True, groups="verified")
    assert not slot_choice(resolve(args)).is_fitted
    assert fitting.run(arguments(folder)) == 0
    told = capsys.readouterr().err
    assert "fitted: 4 chunks" in told
    assert "held-out: 2 chunks" in told
    assert slot_choice(resolve(args)).is_fitted
    probe = read_probe(folder / PROBE_FILE, TRUNK)
    assert probe.shape == (TRUNK.num_layers, TRUNK.num_kv_heads, TRUNK.head_dim + 1)
    assert probe.abs().min() > 0


def test_a_probe_is_no_weight_of_a_checkpoint_of_ours_and_that_of_its_base_serves(folder: Path) -> None:
    assert fitting.run(arguments(folder)) == 0
    config = ModelConfig(trunk=TRUNK, graft=graft_config())
    own = {
        name: t
        for name, t in random_tensors(config, 1).items()
        if name not in random_tensors(ModelConfig(trunk=TRUNK), 1)
    }
    save_checkpoint(folder.parent / "burger", config, own, base="../base")
    source = resolve_source(str(folder.parent / "burger"))
    of_base = load_probe(source, TRUNK)
    assert of_base is not None
    other = {"probe": torch.ones(TRUNK.num_layers, TRUNK.num_kv_heads, TRUNK.head_dim + 1)}
    save_file(other, folder.parent / "burger" / PROBE_FILE)
    nearest = load_probe(source, TRUNK)
    assert nearest is not None
    assert torch.equal(nearest, other["probe"])
    resolve(EngineArgs(model=str(folder.parent / "burger"), device="cpu"))  # which reads the weights


def test_a_probe_of_another_model_is_named(folder: Path) -> None:
    file = folder / PROBE_FILE
    for tensors in (
        {"probe": torch.ones(1, 1, 3)},
        {"other": torch.ones(1)},
        {"probe": torch.full((2, 2, 9), torch.nan)},
    ):
        save_file(tensors, file)
        with pytest.raises(CheckpointError, match=r"settle.safetensors is no probe of this model, which is `probe` \["):
            read_probe(file, TRUNK)


def test_mistakes_are_named(folder: Path) -> None:
    with pytest.raises(TrainingError, match="fewer than two answers are as long as --min-tokens 400"):
        fitting.run(arguments(folder, "--min-tokens", "400"))
    rows = (folder.parent / "answers.jsonl").read_text().replace('"token_ids"', '"ids"')
    (folder.parent / "answers.jsonl").write_text(rows)
    with pytest.raises(TrainingError, match="it needs token_ids and prompt_ids"):
        fitting.run(arguments(folder))


def test_a_fit_finds_what_decides() -> None:
    """Attention goes where the first dimension of a key is large, in one head, and where a value is, in the other."""
    draw = torch.Generator().manual_seed(1)
    features = torch.randn(80, 1, 64, 2, 9, generator=draw)
    features[..., 3] *= 50  # a dimension that varies much must not drown the others
    deciding = torch.stack((features[:, :, :, 0, 0], features[:, :, :, 1, 8]), dim=-1)
    chunks = Chunks(features.half(), (2 * deciding).softmax(2))
    probe = fit(chunks, steps=300, seed=0)
    assert probe[0, 0].abs().argmax() == 0
    assert probe[0, 1].abs().argmax() == 8
    assert kept(chunks, scored(probe, chunks)) > 0.95 * kept(chunks, chunks.shares)
    assert torch.equal(probe, fit(chunks, steps=300, seed=0))
