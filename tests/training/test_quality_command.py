"""`hamburger eval-quality` from prompt file to results, on small random models with the embedded tokenizer."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import hamburger.training.quality.evaluate as quality
from hamburger.model.checkpoints.load import save_checkpoint
from hamburger.model.checkpoints.sources import BUILTIN, CheckpointError
from hamburger.model.config import ConfigError, ModelConfig
from hamburger.model.tensor_shapes import tensor_shapes
from hamburger.training.cli.quality import CONFIDENCES, add_eval_quality_arguments
from hamburger.training.errors import TrainingError
from hamburger.training.quality.answers import Engine, ModelName, load_engine
from hamburger.training.quality.prompts import Prompt
from small_models import graft_config, random_tensors, trunk_config

KINDS = ("maths", "code")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A HAMburger, the base that it shares its trunk with, prompts and kinds."""
    folder = tmp_path_factory.mktemp("models")
    trunk = trunk_config(vocab_size=49152, hidden_size=32, eos_token_ids=(2,))
    merged = ModelConfig(trunk=trunk, graft=graft_config(default_confidence=0.4))
    plain = ModelConfig(trunk=trunk)
    tensors = random_tensors(merged, seed=1)
    save_checkpoint(folder / "burger", merged, tensors)
    save_checkpoint(folder / "base", plain, {name: tensors[name] for name in tensor_shapes(plain)})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        for model in ("burger", "base"):
            shutil.copy(BUILTIN / name, folder / model / name)
    rows = [{"id": f"{k}-{i}", "source": k, "prompt": f"What is {k} number {i}?"} for k in KINDS for i in range(6)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "kinds.yaml").write_text("maths: [maths]\ncode: [code]\n")
    return folder


def arguments(folder: Path, out: Path, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_eval_quality_arguments(parser)
    given = ["--model", folder / "burger", "--base-model", folder / "base", "--prompts", folder / "prompts.jsonl"]
    given += ["--kinds", folder / "kinds.yaml", "--held-out", "1", "--per-kind", "4", "--out", out]
    given += ["--confidences", "0.1,1", "--max-tokens", "24", "--rounds", "50", "--dtype", "float32", "--device", "cpu"]
    given += ["--speed-prompts", "2", "--speed-tokens", "8", "--max-num-seqs", "8"]
    return parser.parse_args([*map(str, given), *more])


@pytest.fixture(scope="module")
def evaluated(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("results") / "new" / "folder"
    assert quality.run(arguments(folder, out)) == 0
    return out


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are slow, and the first evaluation drew them."""
    monkeypatch.setattr(quality, "plot_curve", lambda *args: None)
    monkeypatch.setattr(quality, "plot_reliability", lambda *args: None)


def results(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    return found


def asked(answers: bytes) -> set[tuple[str, float, str]]:
    """Model, confidence and prompt of each answer."""
    rows = map(json.loads, answers.splitlines())
    return {(row["model"], row["confidence"], row["id"]) for row in rows}


def test_every_file_is_written(evaluated: Path) -> None:
    found = {path.name for path in evaluated.iterdir()}
    assert found == {
        *("results.json", "results.md", "curve.png", "reliability.png"),
        *("answers.jsonl", "speed.jsonl", "scores.jsonl"),
    }
    for name in ("curve.png", "reliability.png"):
        assert (evaluated / name).read_bytes().startswith(b"\x89PNG")


def test_the_model_s_own_confidence_is_measured_too(evaluated: Path) -> None:
    found = results(evaluated)
    assert [point["confidence"] for point in found["points"]] == [0.1, 0.4, 1.0]
    assert found["default_confidence"] == 0.4
    assert {kind: len(ids) for kind, ids in found["prompts"].items()} == {"maths": 4, "code": 4}
    page = (evaluated / "results.md").read_text()
    assert "| **0.4** |" in page
    assert "| untouched base | 1.00 [1.00, 1.00] |" in page


def test_groups_are_seen_and_confidence_one_is_the_base(evaluated: Path) -> None:
    low, _, one = results(evaluated)["points"]
    assert low["figures"]["tokens_per_kv"]["value"] > 1.2
    assert low["figures"]["nll_difference"]["value"] != 0
    assert set(low["dial"]) >= {"all", "1"}
    # Its trunk is the base's own, so at 1 the texts are equal and so is every figure.
    assert one["only_single_groups"]
    assert one["figures"]["tokens_per_kv"]["value"] == 1
    assert one["figures"]["nll_difference"] == {"value": 0, "low": 0, "high": 0}
    assert one["dial"] == {}
    claims = {v["claim"]: v["passed"] for v in results(evaluated)["verdicts"]}
    assert claims["at 1: exactly 1 token per KV"] is True
    assert claims["at 1: quality equal to the base's within the intervals"] is True


def test_speed_is_timed_for_every_point(evaluated: Path) -> None:
    found = results(evaluated)
    for point in [found["base_point"], *found["points"]]:
        assert point["speed"]["tokens_per_second"]["value"] > 0
    assert found["base_point"]["speed"]["speed_quotient"]["value"] == 1


@pytest.mark.usefixtures("no_plots")
def test_a_second_call_loads_the_model_s_engine_alone_and_finds_the_same(
    folder: Path, evaluated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(evaluated, tmp_path / "again")
    before = results(evaluated)
    loaded: list[str | None] = []
    load = load_engine

    def spy(name: ModelName, *args: Any) -> Engine:
        loaded.append(name.model)
        return load(name, *args)

    monkeypatch.setattr(quality, "load_engine", spy)
    quality.run(arguments(folder, tmp_path / "again"))
    assert loaded == [str(folder / "burger")]
    assert results(tmp_path / "again") == before


@pytest.mark.usefixtures("no_plots")
def test_what_was_cut_off_is_made_again_and_a_larger_set_keeps_the_smaller(
    folder: Path, evaluated: Path, tmp_path: Path
) -> None:
    out = tmp_path / "cut"
    shutil.copytree(evaluated, out)
    answers, scores = out / "answers.jsonl", out / "scores.jsonl"
    whole = answers.read_bytes()
    answers.write_bytes(whole[: len(whole) // 2])
    scores.write_bytes(scores.read_bytes()[:100])
    quality.run(arguments(folder, out, "--per-kind", "5", "--speed-prompts", "0"))
    again = answers.read_bytes()
    kept = whole[: whole.rfind(b"\n", 0, len(whole) // 2) + 1]
    assert again.startswith(kept)
    # What is made again is made in other batches, so near ties of these random weights may fall otherwise.
    assert asked(again) > asked(whole)
    assert len(again.splitlines()) == len(asked(again)) == len(whole.splitlines()) // 8 * 10
    for kind, ids in results(evaluated)["prompts"].items():
        assert results(out)["prompts"][kind][:4] == ids


@pytest.mark.usefixtures("no_plots")
def test_another_model_shares_no_answers(folder: Path, evaluated: Path, tmp_path: Path) -> None:
    shutil.copytree(evaluated, tmp_path / "out")
    shutil.copytree(folder / "burger", tmp_path / "burger")
    settings = json.loads((tmp_path / "burger/config.json").read_text())
    settings["graft"]["default_confidence"] = 0.1
    (tmp_path / "burger/config.json").write_text(json.dumps(settings))
    number = len((evaluated / "answers.jsonl").read_text().splitlines())
    quality.run(arguments(folder, tmp_path / "out", "--model", str(tmp_path / "burger"), "--speed-prompts", "0"))
    found = results(tmp_path / "out")
    assert [point["confidence"] for point in found["points"]] == [0.1, 1.0]
    assert found["points"][0]["speed"] == {}
    assert found["micro_step_cost"] is None
    # Two confidences of eight prompts; the base's answers were there.
    assert len((tmp_path / "out/answers.jsonl").read_text().splitlines()) == number + 16


def test_a_plain_base_has_no_dial(folder: Path, tmp_path: Path) -> None:
    assert quality.run(arguments(folder, tmp_path, "--model", str(folder / "base"), "--speed-prompts", "0")) == 0
    found = results(tmp_path)
    assert [v["passed"] for v in found["verdicts"] if "base probability" in v["claim"]] == [None, None]
    assert all(point["dial"] == {} for point in found["points"])
    assert "No micro-step added a token." in (tmp_path / "results.md").read_text()


def test_a_model_is_compared_with_the_base_that_it_refers_to(folder: Path, tmp_path: Path) -> None:
    config = ModelConfig(trunk=trunk_config(vocab_size=49152, hidden_size=32), graft=graft_config())
    graft = {name: t for name, t in random_tensors(config).items() if not name.startswith(("model.", "lm_head."))}
    save_checkpoint(tmp_path / "over", config, graft, base=str(folder / "base"))
    args = arguments(folder, tmp_path, "--model", str(tmp_path / "over"))
    assert quality._job(args, print).base.model == str(folder / "base")
    args.base_model = None
    assert quality._job(args, print).base.model == str(folder / "base")
    for model, base, wanted in ((None, None, "builtin"), (str(folder / "burger"), None, "builtin"),
                                (str(tmp_path / "over"), str(folder / "burger"), str(folder / "burger"))):  # fmt: skip
        assert ModelName(model, base).own_base == wanted


def test_wrong_models_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="is a HAMburger: name the untouched model"):
        quality.run(arguments(folder, tmp_path, "--base-model", str(folder / "burger")))
    with pytest.raises(CheckpointError, match="nowhere"):
        quality.run(arguments(folder, tmp_path, "--model", "nowhere"))
    other = tmp_path / "other"
    shutil.copytree(folder / "base", other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    first, second = list(tokenizer["model"]["vocab"])[300:302]
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(TrainingError, match="different tokenizers"):
        quality.run(arguments(folder, tmp_path, "--base-model", str(other)))


def test_prompts_of_ones_own_need_no_file_of_kinds(folder: Path, tmp_path: Path) -> None:
    args, said = arguments(folder, tmp_path), list[str]()
    args.kinds = None
    assert [p.kind for p in quality._job(args, said.append).prompts] == ["code"] * 4 + ["maths"] * 4
    assert said == [said[0]]
    assert said[0].startswith("8 held-out prompts (4 each of code, maths), the longest of ")


def test_the_kinds_take_turns() -> None:
    prompts = [Prompt(f"{k}{i}", k, [1]) for k, n in (("a", 3), ("b", 1)) for i in range(n)]
    assert [p.id for p in quality.spread(prompts, 3)] == ["a0", "b0", "a1"]
    assert len(quality.spread(prompts, 9)) == 4
    assert quality.spread([], 2) == []


def test_arguments_have_the_issue_s_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_eval_quality_arguments(parser)
    args = parser.parse_args(["--prompts", "a", "b", "--out", "o"])
    assert (args.per_kind, args.max_tokens, args.held_out, args.model) == (40, 384, 0.04, None)
    assert tuple(args.confidences) == CONFIDENCES == (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
    assert parser.parse_args(["--prompts", "a", "--out", "o", "--confidences", "1, 0.5,1"]).confidences == [0.5, 1.0]
    wrong = [("--confidences", "0.5,2"), ("--confidences", "x"), ("--per-kind", "0"), ("--seed", "-1")]
    for option, value in wrong:
        with pytest.raises(SystemExit):
            parser.parse_args(["--prompts", "a", "--out", "o", f"{option}={value}"])
        assert option in capsys.readouterr().err


def test_the_model_runs_as_it_would_be_served_where_that_is_asked(folder: Path, tmp_path: Path) -> None:
    plain, served = (
        quality._job(arguments(folder, tmp_path, *more), print) for more in ((), ("--quantization", "int8"))
    )
    assert (plain.options.quantization, served.options.quantization) == ("none", "int8")
    assert plain.model_print != served.model_print  # their answers are never mixed
    assert plain.base_print != served.base_print
    assert plain.scorer_print == served.scorer_print  # who scores is not what is measured
    with pytest.raises(ConfigError, match="quantization is int8"):  # too narrow for the kernels
        quality.run(arguments(folder, tmp_path, "--quantization", "int8"))


def test_files_of_other_commands_are_left_alone(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "load_engine", None)
    row = '{"id": "a", "sample": 0, "model": "m", "sampling": {}, "prompt_ids": [5], "response": "x"}'
    for name in ("answers.jsonl", "speed.jsonl", "scores.jsonl"):
        (tmp_path / name).write_text(row)
        with pytest.raises(TrainingError, match=rf"{name} was not written by eval-quality: move it .* with --out"):
            quality.run(arguments(folder, tmp_path))
        assert (tmp_path / name).read_text() == row
        (tmp_path / name).unlink()
