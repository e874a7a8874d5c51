"""Export: what comes out loads and answers as what went in, and nothing is lost on the way when it fails."""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from exported_runs import CONFIG, TRUNK_NAMES, assert_equal, loaded_model, options, tensors_of, write_step
from hamburger.engine import LLM, SamplingParams
from hamburger.model.checkpoints.load import load_checkpoint, save_checkpoint
from hamburger.model.checkpoints.settle_probe import SettleProbe, equal_shares, save_probe
from hamburger.model.checkpoints.settle_settings import settle_settings
from hamburger.model.checkpoints.sources import PROBE_FILE, CheckpointError, resolve_source
from hamburger.model.config import ConfigError, ModelConfig
from hamburger.training.cli.export import add_export_arguments
from hamburger.training.errors import TrainingError
from hamburger.training.export.export import ExportOptions, export, latest_checkpoint, run
from small_models import core_of, grafted, params, random_tensors, run_core, steps_of
from training_runs import words_tokenizer

DATA = Path(__file__).parent.parent / "data" / "golden-tiny"
GOLDEN = json.loads((DATA / "golden.json").read_text())["generate"]


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """The published checkpoint's base: configuration and tokenizer."""
    base = tmp_path / "base"
    base.mkdir()
    shutil.copyfile(DATA / "base_config.json", base / "config.json")
    (base / "generation_config.json").write_text('{"eos_token_id": 7}')
    words_tokenizer(512).save(str(base / "tokenizer.json"))
    return base


@pytest.fixture
def step(tmp_path: Path) -> Path:
    return write_step(tmp_path)


@pytest.mark.parametrize("is_whole", [False, True])
def test_an_adapter_for_merged_slots_keeps_its_scale(step: Path, tmp_path: Path, is_whole: bool) -> None:
    config = grafted(CONFIG.trunk, adapter_rank=32)
    own = {name: t for name, t in random_tensors(config).items() if name not in TRUNK_NAMES}
    save_checkpoint(step, config, own, base="../../base")
    settings = json.loads((step / "config.json").read_text())
    settings["adapter"]["alpha"] = 64.0
    (step / "config.json").write_text(json.dumps(settings))
    out = tmp_path / "exported"
    export(options(step, out, merge=is_whole))
    assert_equal(tensors_of(out), tensors_of(step))
    assert json.loads((out / "config.json").read_text())["adapter"]["slots"] == "composed"
    assert "passed by slots of several tokens alone" in (out / "MODEL_CARD.md").read_text()


def test_the_published_checkpoint_gives_the_reference_groups(published: Path, tmp_path: Path) -> None:
    out = tmp_path / "exported"
    export(options(DATA / "reference-tiny.ckpt", out, base=str(published), confidence=0.5))
    model = loaded_model(out)
    for case in GOLDEN:
        sampling = params(confidence=case["confidence"], ignore_eos=True, max_tokens=100)
        outputs = run_core(
            core_of(steps_of(model)), {"r": (case["prompt_ids"], sampling)}, max_groups=len(case["groups"])
        )
        assert [output.token_ids for output in outputs["r"]] == case["groups"]
    config = load_checkpoint(resolve_source(str(out)), torch.float32).config
    assert config.graft is not None
    assert config.graft.default_confidence == 0.5
    assert config.trunk.eos_token_ids == (7,)  # generation_config.json came along
    assert sorted(p.name for p in out.iterdir()) == [
        "MODEL_CARD.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    with pytest.raises(CheckpointError, match="--base"):
        export(options(DATA / "reference-tiny.ckpt", tmp_path / "other"))


@pytest.mark.parametrize("merge", [False, True])
def test_a_checkpoint_over_a_base_answers_as_before(step: Path, tmp_path: Path, merge: bool) -> None:
    out = tmp_path / "there" / "exported"
    export(options(step.parent, out, merge=merge))
    assert_equal(tensors_of(out), tensors_of(step))
    settings = json.loads((out / "config.json").read_text())
    assert ("base" in settings, "adapter" in settings, "trunk" in settings) == (not merge, not merge, merge)
    assert not (out / "training").exists()
    prompts, sampling = [[5, 6, 7], [9, 8]], SamplingParams(temperature=0, max_tokens=20, confidence=0.4)
    answers = [
        [
            result.groups
            for result in LLM(str(folder), dtype="float32", max_model_len=64, kv_cache_memory=2**24).generate(
                prompts, sampling, progress=False
            )
        ]
        for folder in (step, out)
    ]
    assert answers[0] == answers[1]
    assert max(len(group) for group in answers[0][0]) > 1


@pytest.mark.parametrize("is_of_base", [True, False])
@pytest.mark.parametrize("merge", [False, True])
def test_the_probe_of_the_base_or_of_the_model_itself_serves_on(
    step: Path, tmp_path: Path, merge: bool, is_of_base: bool
) -> None:
    trunk = load_checkpoint(resolve_source(str(step)), torch.float32).config.trunk
    weights = torch.ones(trunk.num_layers, trunk.num_kv_heads, trunk.head_dim + 1)
    base = resolve_source(str(step)).base_path
    assert base is not None
    settings = {"settle_window": 64, "settle_growth": 0, "settle_keep": 0.5}
    save_probe((base if is_of_base else step) / PROBE_FILE, SettleProbe(weights, equal_shares(trunk)), settings)
    out = tmp_path / "exported"
    export(options(step, out, merge=merge))
    assert (out / PROBE_FILE).exists() == (merge or not is_of_base)
    assert settle_settings(resolve_source(str(out))) == settings
    assert_equal(tensors_of(out), tensors_of(step))


def test_a_base_folder_is_named_by_its_way_from_the_new_folder(step: Path, tmp_path: Path) -> None:
    export(options(step, tmp_path / "all" / "exported"))
    assert json.loads((tmp_path / "all" / "exported" / "config.json").read_text())["base"] == "../../base"
    moved = tmp_path / "moved"
    (moved / "all").mkdir(parents=True)
    (tmp_path / "all" / "exported").rename(moved / "all" / "exported")
    shutil.copytree(tmp_path / "base", moved / "base")
    assert_equal(tensors_of(moved / "all" / "exported"), tensors_of(step))


def test_a_card_calls_a_base_folder_by_its_name(step: Path, tmp_path: Path) -> None:
    for given, name in (({}, "base"), ({"base": str(tmp_path / "other")}, "other")):
        shutil.copytree(tmp_path / "base", tmp_path / "other", dirs_exist_ok=True)
        export(options(step, tmp_path / f"of-{name}", **given))
        card = (tmp_path / f"of-{name}" / "MODEL_CARD.md").read_text()
        assert f": a {name} that emits" in card
        assert f"| base model | {name} |" in card


def test_another_base_may_be_named(step: Path, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "base", tmp_path / "copy")
    export(options(step, tmp_path / "exported", base=str(tmp_path / "copy")))
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["base"] == "../copy"


def test_bfloat16_halves_the_files(step: Path, tmp_path: Path) -> None:
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        export(options(step, tmp_path / dtype, dtype=dtype))
        sizes[dtype] = (tmp_path / dtype / "model.safetensors").stat().st_size
    parameters = sum(t.numel() for n, t in random_tensors(CONFIG).items() if n not in TRUNK_NAMES) + 2 * (48 + 32)
    assert 2 * parameters < sizes["bfloat16"] < 2 * parameters + 8 * 1024  # the short list and the names
    assert sizes["bfloat16"] < 0.6 * sizes["float32"]
    graft = {name: t for name, t in tensors_of(step).items() if name not in TRUNK_NAMES and name != "short_list"}
    ours = tensors_of(tmp_path / "bfloat16")
    assert all(torch.equal(ours[name], t.bfloat16().float()) for name, t in graft.items())


def test_the_default_confidence_and_what_was_measured_there(step: Path, tmp_path: Path) -> None:
    def dial(name: str, source: Path = step, **changes: Any) -> tuple[float, float]:
        export(options(source, tmp_path / name, **changes))
        graft = load_checkpoint(resolve_source(str(tmp_path / name)), torch.float32).config.graft
        assert graft is not None
        return graft.default_confidence, graft.expected_tokens_per_kv

    assert dial("a") == (0.8, 1.0)
    assert dial("b", confidence=0.65, expected_tokens_per_kv=1.6) == (0.65, 1.6)
    assert dial("c", tmp_path / "b") == (0.65, 1.6)
    assert dial("d", tmp_path / "b", confidence=0.7) == (0.7, 1.0)  # what was measured at another is void
    with pytest.raises(ConfigError, match="default_confidence"):
        dial("e", confidence=1.5)


def test_a_folder_that_is_there_is_not_touched(step: Path, tmp_path: Path) -> None:
    out = tmp_path / "exported"
    out.mkdir()
    export(options(step, out))  # empty is free
    (out / "mine.txt").write_text("keep")
    with pytest.raises(TrainingError, match="--overwrite"):
        export(options(step, out))
    export(options(step, out, overwrite=True, confidence=0.3))
    assert not (out / "mine.txt").exists()
    assert json.loads((out / "config.json").read_text())["graft"]["default_confidence"] == 0.3
    for holds, named in ((tmp_path / "base", "is or holds"), (step, "is or holds"), (tmp_path, "is or holds")):
        with pytest.raises(TrainingError, match=named):
            export(options(step, holds, overwrite=True))
    shutil.copytree(step, tmp_path / "run2" / "step-000010")
    with pytest.raises(TrainingError, match=r"step-000010 is a training run's checkpoint, so --overwrite leaves it"):
        export(options(step, tmp_path / "run2" / "step-000010", overwrite=True))
    other = tmp_path / "photos"
    other.mkdir()
    (other / "a.jpg").write_bytes(b"")
    with pytest.raises(TrainingError, match="no checkpoint of our format"):
        export(options(step, other, overwrite=True))
    with pytest.raises(TrainingError, match="is a file"):
        export(options(step, other / "a.jpg"))
    assert (other / "a.jpg").exists()
    assert (step / "training" / "state.pt").exists()


@pytest.mark.parametrize("change", ["nan", "calibrate", "notes"])
def test_a_failed_export_changes_nothing(step: Path, tmp_path: Path, change: str) -> None:
    out = tmp_path / "exported"
    export(options(step, out))
    before = {path: path.read_bytes() for path in out.iterdir()}
    places = set(tmp_path.iterdir())
    changes: dict[str, Any] = {}
    if change == "nan":
        tensors = random_tensors(CONFIG)
        tensors["stop_head.0.bias"][3] = float("nan")
        own = {name: t for name, t in tensors.items() if name not in TRUNK_NAMES}
        save_checkpoint(step, CONFIG, own, base="../../base")
    else:
        changes = {"calibrate": tmp_path / "none"} if change == "calibrate" else {"card_notes": tmp_path / "none"}
    with pytest.raises((CheckpointError, TrainingError, OSError), match=r"stop_head\.0\.bias.*not finite|none"):
        export(options(step, out, overwrite=True, **changes))
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    assert set(tmp_path.iterdir()) == places


@pytest.mark.parametrize("option", ["calibrate", "data", "card_notes", "calibrate_tokens", "held_back"])
def test_what_the_options_name_is_opened_before_the_work(step: Path, tmp_path: Path, option: str) -> None:
    none = tmp_path / "none"
    values = {"data": [none], "calibrate_tokens": 5, "held_back": True}
    told: list[str] = []
    with pytest.raises((TrainingError, OSError), match="none"):
        export(options(step, tmp_path / "exported", **{option: values.get(option, none)}), told.append)
    assert told == []


def test_what_has_no_graft_is_refused(step: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="plain base model"):
        export(options(tmp_path / "base", tmp_path / "exported"))
    plain = ModelConfig(trunk=CONFIG.trunk)
    save_checkpoint(tmp_path / "plain", plain, random_tensors(plain))
    with pytest.raises(TrainingError, match="no graft"):
        export(options(tmp_path / "plain", tmp_path / "exported"))
    assert not (tmp_path / "exported").exists()


def test_a_run_names_its_latest_checkpoint(step: Path) -> None:
    assert latest_checkpoint(step.parent) == step
    assert latest_checkpoint(step) == step
    for wrong in ("", "step-000030", "../base"):
        (step.parent / "latest").write_text(wrong)
        with pytest.raises(TrainingError, match="latest names no checkpoint"):
            latest_checkpoint(step.parent)


def test_the_command(step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_export_arguments(parser)
    args = parser.parse_args(
        [str(step), "--out", str(tmp_path / "exported"), "--dtype", "float32", "--confidence", "0.6"]
    )
    assert {field.name for field in fields(ExportOptions)} == set(vars(args))
    assert run(args) == 0
    assert f"hamburger serve {tmp_path / 'exported'}" in capsys.readouterr().out
    defaults = parser.parse_args([str(step), "--out", "x"])
    assert ExportOptions(**{**vars(defaults), "data": ()}) == ExportOptions(checkpoint=step, out=Path("x"))


@pytest.mark.parametrize("wrong", [["--confidence", "1.1"], ["--expected-tokens-per-kv", "nan"],
                                   ["--calibrate-tokens", "0"], ["--dtype", "int8"]])  # fmt: skip
def test_wrong_arguments(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_export_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["a", "--out", "b", *wrong])
    assert wrong[0] in capsys.readouterr().err
