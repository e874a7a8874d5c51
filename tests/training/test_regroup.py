"""A data set in the groups that a model would make of it."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hamburger.model.checkpoints.load import save_checkpoint
from hamburger.model.config import ModelConfig
from hamburger.model.modules.hamburger import HamburgerModel
from hamburger.training.cli.data import add_regroup_arguments
from hamburger.training.corpus.dataset import Example, SegmentedDataset
from hamburger.training.corpus.dataset_writer import DatasetWriter
from hamburger.training.errors import TrainingError
from hamburger.training.prepare import regroup
from hamburger.training.prepare.regroup import own_groups, regrouped
from small_models import (
    core_of,
    graft_config,
    params,
    plain_model,
    random_tensors,
    run_core,
    steps_of,
    tokens_of,
    trunk_config,
)
from training_runs import dataset_meta, words_tokenizer, write_base

NO = -math.inf


def test_groups_follow_the_dial_and_end_with_it() -> None:
    response = torch.tensor([False, True, True, True, True, True, False, True])
    dial = torch.tensor([[3.0, 3, 0.5], [9, 9, 9], [9, 9, 9], [1, NO, 9], [NO, NO, NO], [NO, NO, NO]])
    assert own_groups(response, dial, 0.5).tolist() == [1, 4, 0, 0, 0, 1, 1, 1]
    assert own_groups(response, dial, 0.9).tolist() == [1, 3, 0, 0, 1, 1, 1, 1]
    assert own_groups(response, dial, 1.0).tolist() == [1] * 8
    # At 0 the dial stops nothing, but what the model would not have given is no part of a group.
    none = torch.full((6, 3), NO)
    assert own_groups(response, none, 0.0).tolist() == [1] * 8


@given(st.lists(st.lists(st.floats(-5, 5), min_size=3, max_size=3), max_size=12), st.floats(0, 1))
def test_groups_tile_the_answer(values: list[list[float]], confidence: float) -> None:
    n = len(values)
    dial = torch.tensor(values).reshape(n, 3)
    place = torch.arange(3) + torch.arange(n)[:, None]
    dial = dial.masked_fill(place >= n - 1, NO)  # nothing after the end
    response = torch.tensor([False] + [True] * n)
    sizes = own_groups(response, dial, confidence).tolist()
    at = 0
    while at < len(sizes):
        assert 1 <= sizes[at] <= 4
        assert sizes[at + 1 : at + sizes[at]] == [0] * (sizes[at] - 1)
        at += sizes[at]
    assert at == len(sizes)


CONFIG = ModelConfig(trunk=trunk_config(), graft=graft_config(features="fused", short_list_size=60))


def served(model: HamburgerModel, number: int, confidence: float) -> tuple[list[Example], list[int]]:
    """Greedy answers as examples of one-token groups, and the size of the first group that was served of each."""
    examples, firsts = [], []
    for i in range(number):
        prompt = [2 + i, 3 + 2 * i, 5]
        sampling = params(confidence=confidence, ignore_eos=True, max_tokens=12)
        outputs = run_core(core_of(steps_of(model)), {"r": (prompt, sampling)})["r"]
        ids = prompt + tokens_of(outputs)
        fields = torch.arange(len(ids)) >= 3, torch.rand(len(ids)), torch.ones(len(ids), dtype=torch.uint8)
        examples.append(Example(f"e{i}", f"k{i}", torch.tensor(ids, dtype=torch.int32), *fields))
        firsts.append(len(outputs[0].token_ids))
    return examples, firsts


@pytest.mark.parametrize("calibration", [{}, {"stop_scale": (2.0,) * 4, "stop_bias": (-1.0,) * 4}])
@pytest.mark.parametrize("confidence", [0.3, 0.6, 1.0])
def test_the_first_group_is_the_one_that_is_served(calibration: dict[str, Any], confidence: float) -> None:
    graft = graft_config(features="fused", short_list_size=60, **calibration)
    model = plain_model(ModelConfig(trunk=trunk_config(), graft=graft), seed=5)
    examples, firsts = served(model, 12, confidence)
    made = list(regrouped(model, examples, (confidence, confidence), seed=0))
    assert [e.group_sizes[3].item() for e in made] == firsts
    assert (confidence == 1) == (max(firsts) == 1)
    for before, after in zip(examples, made, strict=True):
        assert after.id == before.id
        assert torch.equal(after.token_ids, before.token_ids)
        assert torch.equal(after.entropy, before.entropy)


def command(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    add_regroup_arguments(parser)
    return regroup.run(parser.parse_args([*map(str, arguments), "--device", "cpu", "--dtype", "float32"]))


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "burger", CONFIG, random_tensors(CONFIG, seed=5))
    words_tokenizer(96).save(str(tmp_path / "burger" / "tokenizer.json"))
    return tmp_path / "burger"


def write(folder: Path, examples: list[Example], **meta: Any) -> Path:
    with DatasetWriter(folder, dataset_meta(top_k=0, **meta)) as writer:
        writer.write(examples)
    return folder


def test_the_command_goes_on_where_it_was_ended(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = plain_model(CONFIG, seed=5)
    examples, _ = served(model, 8, 0.3)
    first, second = write(tmp_path / "a", examples[:5]), write(tmp_path / "b", examples[4:])  # one in both
    whole = (first, second, "--model", model_folder, "--confidence", "0.2,0.7", "--part-size", 3)
    assert command(*whole, "--out", tmp_path / "whole") == 0
    assert "Groups by their number of tokens" in capsys.readouterr().out
    part = tmp_path / "part"
    assert command(*whole, "--out", part) == 0
    sorted(part.glob("part-*"))[-1].unlink()  # as if it had been killed before
    assert command(*whole, "--out", part) == 0
    made, again = (list(SegmentedDataset(tmp_path / name).examples()) for name in ("whole", "part"))
    assert [e.key for e in made] == [e.key for e in again] == [e.key for e in examples]
    assert all(torch.equal(a.group_sizes, b.group_sizes) for a, b in zip(made, again, strict=True))
    wanted = list(regrouped(model, examples, (0.2, 0.7), seed=0))
    assert [e.group_sizes.tolist() for e in made] == [e.group_sizes.tolist() for e in wanted]
    assert max(int(e.group_sizes.max()) for e in made) > 1
    with pytest.raises(TrainingError, match="was made with strategy"):
        command(*whole[:-3], "0.5", "--out", part)


def test_what_cannot_be_regrouped_is_named(model_folder: Path, tmp_path: Path) -> None:
    examples, _ = served(plain_model(CONFIG, seed=5), 2, 0.3)
    data, other = write(tmp_path / "a", examples), write(tmp_path / "b", examples, floor=0.1)
    with pytest.raises(TrainingError, match="different floor"):
        command(data, other, "--model", model_folder, "--out", tmp_path / "o")
    wide = write(tmp_path / "c", examples, vocab_size=97)
    with pytest.raises(TrainingError, match="vocabulary of 96"):
        command(wide, "--model", model_folder, "--out", tmp_path / "o")
    base = write_base(tmp_path / "base")
    words_tokenizer(96).save(str(base / "tokenizer.json"))
    with pytest.raises(TrainingError, match="has no graft"):
        command(data, "--model", base, "--out", tmp_path / "o")


def test_another_checkpoint_of_the_same_name_is_another_model(model_folder: Path, tmp_path: Path) -> None:
    examples, _ = served(plain_model(CONFIG, seed=5), 2, 0.3)
    data = write(tmp_path / "a", examples)
    assert command(data, "--model", model_folder, "--out", tmp_path / "o") == 0
    (model_folder / "settle.safetensors").write_bytes(b"")  # no part of the model
    assert command(data, "--model", model_folder, "--out", tmp_path / "o") == 0
    save_checkpoint(model_folder, CONFIG, random_tensors(CONFIG, seed=6))
    with pytest.raises(TrainingError, match=r"o was made with strategy 'burger \(\w{16}, float32\) at .*: repeat"):
        command(data, "--model", model_folder, "--out", tmp_path / "o")


def test_another_model_s_data_are_told(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write_base(tmp_path / "base", num_layers=CONFIG.trunk.num_layers)
    words_tokenizer(96).save(str(base / "tokenizer.json"))
    graft = {name: t for name, t in random_tensors(CONFIG).items() if not name.startswith(("model.", "lm_head."))}
    save_checkpoint(tmp_path / "over", CONFIG, graft, base=str(base))
    examples, _ = served(plain_model(CONFIG, seed=5), 2, 0.3)
    for scored_by, model, is_told in (("base", "over", False), ("tiny", "over", True), ("tiny", "burger", False)):
        data = write(tmp_path / f"by-{scored_by}-{model}", examples, model=scored_by)
        assert command(data, "--model", tmp_path / model, "--out", tmp_path / f"own-{scored_by}-{model}") == 0
        assert ("was scored by tiny, and the base is base" in capsys.readouterr().err) == is_told
