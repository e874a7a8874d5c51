"""The command, on a data set on disk, and what it leaves in the run's folder."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from hamburger.training.cli.train import add_train_arguments
from hamburger.training.corpus.dataset import Example as Record
from hamburger.training.corpus.dataset_writer import DatasetWriter
from hamburger.training.errors import TrainingError
from hamburger.training.recipe import parse_recipe
from hamburger.training.run.folder import RunFolder, read_state
from hamburger.training.run.journal import Journal, was_validated
from hamburger.training.run.train import run
from training_runs import FUSED, dataset_meta, losses, random_source, recipe, validations, write_base

META = dataset_meta(top_k=4, max_length=512, loops="keep")


def write_data(folder: Path, number: int, **meta: Any) -> Path:
    records = random_source(number).records
    with DatasetWriter(folder, replace(META, **meta)) as writer:
        writer.write(
            [
                Record(r.id, r.id, r.token_ids, r.response, r.entropy, r.group_sizes, r.top_ids, r.top_logprobs)
                for r in records
            ]
        )
    return folder


def command(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    add_train_arguments(parser)
    return run(parser.parse_args([*map(str, arguments), "--device", "cpu"]))


def write_recipe(path: Path, base: Path) -> Path:
    made = recipe(base, validation_share=0.4, validation_every=2, graft=FUSED)
    path.write_text(yaml.safe_dump(made.model_dump(mode="json")))
    return path


def test_a_run_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, made = write_data(tmp_path / "data", 12), write_recipe(tmp_path / "r.yaml", write_base(tmp_path / "base"))
    first, second = tmp_path / "first", tmp_path / "second"
    assert command(made, "--data", data, "--out", first, "--set", "max_steps=3") == 0
    assert "step 3/3" in capsys.readouterr().err
    assert [len(losses(first)), len(validations(first))] == [3, 2]
    assert (first / "step-000003" / "config.json").is_file()
    assert list((first / "tensorboard").iterdir())
    values = yaml.safe_load((first / "recipe.yaml").read_text())
    assert parse_recipe(values, "").max_steps == 3
    # A checkpoint begins another run, here with only the graft trained.
    step = first / "step-000003"
    more = ["--init", step, "--set", "trunk.mode=frozen", "--set", "max_steps=2", "--validation", data]
    assert command(made, "--data", data, "--out", second, *more) == 0
    assert losses(second)[0] < losses(first)[0]
    first.rename(tmp_path / "gone")  # the second run has all it needs
    assert command(made, "--data", data, "--out", second, *more, "--resume") == 0
    with pytest.raises(TrainingError, match="another init"):
        command(made, "--data", data, "--out", second, "--set", "max_steps=2", "--resume")


def test_a_finished_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write_base(tmp_path / "base")
    data, made, out = write_data(tmp_path / "data", 4), write_recipe(tmp_path / "r.yaml", base), tmp_path / "run"
    options = (made, "--data", data, "--out", out, "--set", "max_steps=2")
    assert command(*options) == 0
    assert "the run has finished" not in capsys.readouterr().err
    before = sorted(out.rglob("*"))
    assert command(*options, "--resume") == 0
    said = capsys.readouterr().err
    assert f"the run has finished, with step 2: nothing is left to train. Its checkpoint is {out}/step-000002" in said
    assert sorted(out.rglob("*")) == before
    base.rename(tmp_path / "gone")  # another run into that folder is refused before anything is read
    with pytest.raises(TrainingError, match="run already holds a run: go on with --resume"):
        command(*options)


def test_a_validation_that_was_lost_is_made_up_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, made = write_data(tmp_path / "data", 12), write_recipe(tmp_path / "r.yaml", write_base(tmp_path / "base"))
    options = (made, "--data", data, "--out", tmp_path / "run", "--set", "max_steps=2")
    assert command(*options) == 0
    metrics = tmp_path / "run" / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text("".join(whole.splitlines(keepends=True)[:-1]))  # killed behind the last checkpoint
    assert not validations(tmp_path / "run")
    assert command(*options, "--resume") == 0
    assert metrics.read_text() == whole
    assert [path.name for path in (tmp_path / "run").glob(".*")] == [".lock"]


def test_what_cannot_validate_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, made = write_data(tmp_path / "data", 4), write_recipe(tmp_path / "r.yaml", write_base(tmp_path / "tiny"))
    DatasetWriter(tmp_path / "empty", META).close()
    with pytest.raises(TrainingError, match="--validation has no example with a trained token"):
        command(made, "--data", data, "--validation", tmp_path / "empty", "--out", tmp_path / "run")
    with pytest.raises(TrainingError, match=r"no example .* to train: .*, or lower validation_share, 0\.999"):
        command(made, "--data", data, "--out", tmp_path / "run", "--set", "validation_share=0.999")
    short = ("--set", "max_steps=1", "--set", "packs_per_step=1")
    assert command(made, "--data", data, "--out", tmp_path / "a", *short, "--set", "validation_share=0.0001") == 0
    assert "warning: validation_share 0.0001 keeps no example back" in capsys.readouterr().err
    assert command(made, "--data", data, "--out", tmp_path / "b", *short, "--set", "validation_share=0") == 0
    assert "warning" not in capsys.readouterr().err
    assert command(made, "--data", data, "--validation", data, "--out", tmp_path / "c", *short) == 0
    assert "warning: 4 prompts of --validation are trained too" in capsys.readouterr().err


def test_a_run_that_ends_with_broken_losses_says_so(tmp_path: Path) -> None:
    data, made = write_data(tmp_path / "data", 4), write_recipe(tmp_path / "r.yaml", write_base(tmp_path / "base"))
    huge = ("--set", "trunk_lr=1e30", "--set", "graft_lr=1e30", "--set", "clip=1e30", "--set", "warmup_steps=0")
    with pytest.raises(TrainingError, match="not finite in the last 2 steps, so the last checkpoint may be broken"):
        command(made, "--data", data, "--out", tmp_path / "run", "--set", "max_steps=3", *huge)


def test_two_processes_do_not_train_into_one_folder(tmp_path: Path) -> None:
    data, made = write_data(tmp_path / "data", 4), write_recipe(tmp_path / "r.yaml", write_base(tmp_path / "base"))
    options = (made, "--data", data, "--out", tmp_path / "run", "--set", "max_steps=1")
    with RunFolder(tmp_path / "run").held(), pytest.raises(TrainingError, match=r"another process trains into .*run"):
        command(*options)
    assert command(*options) == 0
    with RunFolder(tmp_path / "run").held(), pytest.raises(TrainingError, match=r"another process trains into .*run"):
        command(*options, "--resume")


def test_a_stopped_run_is_no_success_to_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, made = write_data(tmp_path / "data", 4), write_recipe(tmp_path / "r.yaml", write_base(tmp_path / "base"))
    monkeypatch.setattr("hamburger.training.run.train.Job.run", lambda job, console, stop: False)
    assert command(made, "--data", data, "--out", tmp_path / "run") == 130


def test_data_that_another_model_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = write_recipe(tmp_path / "r.yaml", write_base(tmp_path / "tiny"))
    own, other = write_data(tmp_path / "own", 6), write_data(tmp_path / "other", 6, vocab_size=128)
    renamed = write_data(tmp_path / "renamed", 6, model="somebody's")
    short = ("--set", "max_steps=1", "--set", "packs_per_step=1")
    for sets in (("--data", own, other), ("--data", own, "--validation", other)):
        with pytest.raises(
            TrainingError, match=r"other was scored by tiny, .* vocabulary of 128, but .* has 96: segment"
        ):
            command(made, *sets, "--out", tmp_path / "run", *short)
    assert command(made, "--data", own, "--out", tmp_path / "run", *short) == 0
    assert "warning" not in capsys.readouterr().err
    assert command(made, "--data", renamed, "--out", tmp_path / "renamed-run", *short) == 0
    assert "renamed was scored by somebody's, and the base is tiny: if they are not" in capsys.readouterr().err


def test_a_data_set_is_named_once(tmp_path: Path) -> None:
    made, data = write_recipe(tmp_path / "r.yaml", write_base(tmp_path / "base")), write_data(tmp_path / "data", 6)
    with pytest.raises(TrainingError, match=r"--data names .*data twice: name it once"):
        command(made, "--data", data, tmp_path / "base" / ".." / "data", "--out", tmp_path / "run")
    with pytest.raises(TrainingError, match=r"--validation names .*data twice"):
        command(made, "--data", data, "--validation", data, data, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_steps_of_more_packs_than_there_are_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, data = write_recipe(tmp_path / "r.yaml", write_base(tmp_path / "base")), write_data(tmp_path / "data", 6)
    sizes = ("--set", "slots_per_pack=2000", "--set", "max_steps=1")
    assert command(made, "--data", data, "--out", tmp_path / "one", *sizes, "--set", "packs_per_step=1") == 0
    assert "packs_per_step is" not in capsys.readouterr().err
    assert command(made, "--data", data, "--out", tmp_path / "many", *sizes, "--set", "packs_per_step=3") == 0
    assert "warning: packs_per_step is 3, but the data makes 1, so that a step takes" in capsys.readouterr().err


def test_a_validation_set_belongs_to_the_run(tmp_path: Path) -> None:
    data, made = write_data(tmp_path / "data", 8), write_recipe(tmp_path / "r.yaml", write_base(tmp_path / "base"))
    call = (made, "--data", data, "--out", tmp_path / "run", "--set", "max_steps=1")
    assert command(*call) == 0
    with pytest.raises(TrainingError, match=r"another validation_share: .*; --validation sets validation_share to 0"):
        command(*call, "--validation", data, "--resume")


def test_data_and_recipe_that_are_not_there(tmp_path: Path) -> None:
    made = write_recipe(tmp_path / "r.yaml", write_base(tmp_path / "base"))
    with pytest.raises(TrainingError, match=r"no meta\.json"):
        command(made, "--data", tmp_path, "--out", tmp_path / "run")
    with pytest.raises(TrainingError, match="no recipe of ours"):
        command("other", "--data", tmp_path, "--out", tmp_path / "run")


def _fail_as_torch() -> None:
    raise RuntimeError("[enforce fail at inline_container.cc:672] . PytorchStreamWriter: file write failed\nframe #0")


def test_a_torn_checkpoint_is_never_the_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.start(recipe(tmp_path), resume=False)

    def write(path: Path) -> None:
        path.mkdir()

    def fail(path: Path) -> None:
        path.mkdir()
        raise OSError("disk full")

    for step in (2, 4, 10):
        folder.save(step, write, {"step": step}, keep=2)
    with pytest.raises(OSError, match="disk full"):
        folder.save(12, fail, {}, keep=2)
    assert folder.latest() == tmp_path / "run" / "step-000010"
    assert sorted(p.name for p in folder.path.glob("step-*")) == ["step-000004", "step-000010"]
    with monkeypatch.context() as full:
        full.setattr("torch.save", lambda state, path: _fail_as_torch())
        with pytest.raises(OSError, match=r"state\.pt cannot be written: .*file write failed"):
            folder.save(12, write, {}, keep=2)
    assert folder.latest() == tmp_path / "run" / "step-000010"
    assert not [p.name for p in folder.path.glob(".*")]
    folder.save(12, write, {"step": 12}, keep=1)
    assert [p.name for p in folder.path.iterdir() if p.is_dir()] == ["step-000012"]
    with pytest.raises(TrainingError, match="already holds a run"):
        folder.start(recipe(tmp_path), resume=False)


def test_a_broken_state_is_named(tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "state.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(TrainingError, match=r"state\.pt cannot be read"):
        read_state(tmp_path, recipe(tmp_path), 1, "")
    (tmp_path / "latest").write_text("step-000001")
    with pytest.raises(TrainingError, match="which is no whole checkpoint"):
        RunFolder(tmp_path).latest()


def test_a_journal_forgets_what_comes_again(tmp_path: Path) -> None:
    values = {"loss": math.nan, "tokens_per_second": 1.0}
    with Journal(tmp_path, 0, 5, Console(quiet=True)).open() as journal:
        for step in (1, 2, 3):
            journal.step(step, values)
        journal.validation(2, {"dial": [{"confidence": 0.5}], "loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    with Journal(tmp_path, 2, 5, Console(quiet=True)).open() as journal:
        journal.step(3, {**values, "loss": 7.0})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 2, 3]
    assert lines[-1]["loss"] == 7.0


def test_broken_lines_of_a_journal_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1}\n{"step": 2, "lo\n\0\0\n{"x\xff\n[2]\n{"step": 2, "validation": {}}\n{"step": 3}\n')
    assert was_validated(tmp_path, 2)
    assert not was_validated(tmp_path, 1)
    with Journal(tmp_path, 2, 5, Console(quiet=True)).open():
        assert file.read_text() == '{"step": 1}\n{"step": 2, "validation": {}}\n'
