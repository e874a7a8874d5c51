"""distill, segment and inspect, one after the other on a small model's folder, as the command line runs them."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import save_file

from hamburger.engine.text.tokenizer import Tokenizer
from hamburger.model.checkpoints.config.hf import trunk_config_json
from hamburger.model.checkpoints.load import save_checkpoint
from hamburger.model.checkpoints.sources import BUILTIN
from hamburger.model.config import ModelConfig
from hamburger.training.cli.data import add_distill_arguments, add_inspect_arguments, add_segment_arguments
from hamburger.training.corpus.dataset import SegmentedDataset
from hamburger.training.errors import TrainingError
from hamburger.training.prepare import distill, segment
from hamburger.training.prepare import inspect as inspect_data
from small_models import grafted, random_tensors, trunk_config


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with the embedded model's tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    trunk = trunk_config(num_layers=2, vocab_size=49152, hidden_size=16, eos_token_ids=(2,))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN / name, folder / name)
    (folder / "config.json").write_text(json.dumps(trunk_config_json(trunk)))
    save_file(random_tensors(ModelConfig(trunk=trunk)), folder / "model.safetensors")
    return folder


def command(
    add: Callable[[argparse.ArgumentParser], None], run: Callable[[argparse.Namespace], int], *argv: object
) -> None:
    parser = argparse.ArgumentParser()
    add(parser)
    assert run(parser.parse_args([str(a) for a in argv])) == 0


def test_prompts_become_a_data_set(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, answers, data = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl", tmp_path / "data"
    prompts.write_text("".join(json.dumps({"id": f"p{i}", "prompt": f"Count to {i}."}) + "\n" for i in range(6)))
    where = ("--model", base, "--device", "cpu", "--dtype", "float32")
    limits = ("--held-out", 0, "--max-tokens", 9, "--samples", 2, "--max-num-seqs", 4)
    command(add_distill_arguments, distill.run, prompts, "--out", answers, *where, *limits)
    assert "12 answers written" in capsys.readouterr().err
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert {row["model"] for row in rows} == {base.name}

    how = ("--held-out", 0, "--top-k", 3, "--ratio", 0.9)
    command(add_segment_arguments, segment.run, answers, "--out", data, *where, *how)
    out, err = capsys.readouterr()
    assert "12/12" in err
    dataset = SegmentedDataset(data)
    assert f"{len(dataset)} examples" in out
    assert (dataset.meta.model, dataset.meta.model_argument) == (base.name, str(base))
    by_text = {tuple(row["prompt_ids"] + row["token_ids"]): row for row in rows}
    for example in dataset.examples():
        row = by_text[tuple(example.token_ids.tolist())]
        assert (example.id, example.num_response_tokens) == (row["id"], len(row["token_ids"]))
    greedy = next(e for e in dataset.examples() if by_text[tuple(e.token_ids.tolist())]["sampling"]["temperature"] == 0)
    assert greedy.top_ids is not None
    assert greedy.top_ids[:, 0].tolist() == greedy.token_ids[greedy.response].tolist()

    command(add_inspect_arguments, inspect_data.run, data, 1)
    shown = capsys.readouterr().out
    assert f"data, example 1 of {len(dataset)}: {dataset.example(1).id}" in shown
    assert "Count to" in shown
    command(add_inspect_arguments, inspect_data.run, data, 1, "--html", tmp_path / "x.html")
    assert "Count to" in (tmp_path / "x.html").read_text()
    assert capsys.readouterr().out == ""


def test_a_wrong_prompt_costs_no_model(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"id": "a"}\n')
    with pytest.raises(TrainingError, match='neither "prompt" nor "messages"'):
        command(add_distill_arguments, distill.run, tmp_path / "p.jsonl", "--out", tmp_path / "a", "--model", tmp_path)


def test_no_prompt_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text("\n")
    with pytest.raises(TrainingError, match=r"there is no prompt in .*p\.jsonl: each line is to hold one"):
        command(add_distill_arguments, distill.run, tmp_path / "p.jsonl", "--out", tmp_path / "a", "--model", tmp_path)
    assert not (tmp_path / "a").exists()


def test_no_answer_is_a_mistake(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text("\n")
    monkeypatch.setattr(segment, "Scorer", None)  # nothing is loaded
    with pytest.raises(TrainingError, match=r"there is no answer in .*a\.jsonl: each line is to hold one"):
        command(add_segment_arguments, segment.run, tmp_path / "a.jsonl", "--out", tmp_path / "data", "--model", base)
    assert not (tmp_path / "data").exists()


def test_a_data_set_without_an_example_is_no_success(base: Path, tmp_path: Path) -> None:
    answers = tmp_path / "a.jsonl"
    answers.write_text('{"id": "a", "prompt": "Hi", "response": "Hello"}\n')
    where = ("--model", base, "--device", "cpu", "--dtype", "float32", "--held-out", 1)
    with pytest.raises(TrainingError, match=r"no answer is left, so .*data holds no example"):
        command(add_segment_arguments, segment.run, answers, "--out", tmp_path / "data", *where)


def test_a_file_of_other_answers_costs_no_model(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.jsonl").write_text('{"id": "a", "prompt": "Hi"}\n')
    (tmp_path / "a.jsonl").write_text('{"text": "mine"}\n')
    monkeypatch.setattr(distill, "LLM", None)
    with pytest.raises(TrainingError, match="line 1 was not written by distill: name another file with --out"):
        command(
            add_distill_arguments, distill.run, tmp_path / "p.jsonl", "--out", tmp_path / "a.jsonl", "--model", base
        )


def test_the_data_set_finds_its_tokenizer_or_takes_another(base: Path, tmp_path: Path) -> None:
    answers = tmp_path / "a.jsonl"
    answers.write_text('{"id": "a", "prompt": "Hi", "response": "Hello", "finish_reason": "stop"}\n')
    where = ("--model", base, "--device", "cpu", "--dtype", "float32", "--held-out", 0)
    command(add_segment_arguments, segment.run, answers, "--out", tmp_path / "data", *where)
    tokenizer = Tokenizer.load(base)
    [example] = SegmentedDataset(tmp_path / "data").examples()
    assert tokenizer.decode(example.token_ids[example.response].tolist(), skip_special_tokens=False) == (
        "Hello<|im_end|>"
    )
    page = tmp_path / "x.html"
    command(add_inspect_arguments, inspect_data.run, tmp_path / "data", "--html", page, "--model", "builtin")
    assert "Hello" in page.read_text()
    page.write_text("<!DOCTYPE HTML>")
    command(add_inspect_arguments, inspect_data.run, tmp_path / "data", "--html", page)
    assert "Hello" in page.read_text()
    with pytest.raises(TrainingError, match=r"--html .*a\.jsonl holds no web page, so it is not replaced"):
        command(add_inspect_arguments, inspect_data.run, tmp_path / "data", "--html", answers)
    assert "Hello" in answers.read_text()


def test_answers_of_another_model_are_not_scored(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = Tokenizer.load(base).encode("Hello there")
    row = {"id": "a", "prompt": "Hi", "prompt_ids": [5], "response": "Hello there", "token_ids": [i + 3 for i in ids]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.setattr(segment, "Scorer", None)  # nothing is loaded
    with pytest.raises(TrainingError, match=r"a\.jsonl, line 1: token_ids are not those of .* --model"):
        command(add_segment_arguments, segment.run, tmp_path / "a.jsonl", "--out", tmp_path / "data", "--held-out", 0)
    assert not (tmp_path / "data").exists()


def test_who_scores_must_be_a_base_with_so_many_tokens(base: Path, tmp_path: Path) -> None:
    answers, data = tmp_path / "a.jsonl", tmp_path / "data"
    answers.write_text('{"id": "a", "prompt": "Hi", "response": "Hello", "finish_reason": "stop"}\n')
    call = (answers, "--out", data, "--device", "cpu", "--dtype", "float32", "--held-out", 0)
    with pytest.raises(TrainingError, match="--top-k is 50000, but the model has 49152 tokens: name no more"):
        command(add_segment_arguments, segment.run, *call, "--model", base, "--top-k", 50_000)
    trunk = trunk_config(num_layers=2, vocab_size=49152, hidden_size=16, eos_token_ids=(2,))
    config = grafted(trunk, feature_layers=(0, 1), merger_heads=2)
    burger = tmp_path / "burger"
    save_checkpoint(burger, config, random_tensors(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN / name, burger / name)
    with pytest.raises(TrainingError, match="burger is a HAMburger, but it is its base model that must score: name"):
        command(add_segment_arguments, segment.run, *call, "--model", burger)
    assert not data.exists()


def test_a_data_set_is_shown_from_anywhere(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": "a", "prompt": "Hi", "response": "Hello", "finish_reason": "stop"}\n')
    monkeypatch.chdir(base.parent)
    where = ("--model", base.name, "--device", "cpu", "--dtype", "float32", "--held-out", 0)
    command(add_segment_arguments, segment.run, tmp_path / "a.jsonl", "--out", tmp_path / "data", *where)
    monkeypatch.chdir(tmp_path)
    command(add_inspect_arguments, inspect_data.run, "data")
    assert "Hello" in capsys.readouterr().out
    (tmp_path / "builtin").mkdir()  # a name of ours stays one
    assert segment._from_anywhere("builtin") == "builtin"


def test_one_data_set_has_one_precision(base: Path, tmp_path: Path) -> None:
    answers, data = tmp_path / "a.jsonl", tmp_path / "data"
    answers.write_text('{"id": "a", "prompt": "Hi", "response": "Hello", "finish_reason": "stop"}\n')
    call = (answers, "--out", data, "--model", base, "--device", "cpu", "--held-out", 0)
    command(add_segment_arguments, segment.run, *call, "--dtype", "float32")
    meta = SegmentedDataset(data).meta
    assert (meta.dtype, meta.quantization) == ("float32", "none")
    with pytest.raises(TrainingError, match="was made with dtype 'float32', not 'bfloat16'"):
        command(add_segment_arguments, segment.run, *call, "--dtype", "bfloat16")
    values = json.loads((data / "meta.json").read_text())
    del values["dtype"], values["quantization"], values["weights"]  # as it was once
    (data / "meta.json").write_text(json.dumps(values))
    command(add_segment_arguments, segment.run, *call, "--dtype", "bfloat16")
    assert SegmentedDataset(data).meta.dtype is None


def test_another_model_of_the_same_name_is_another_one(base: Path, tmp_path: Path) -> None:
    other = tmp_path / base.name
    shutil.copytree(base, other)
    tensors = random_tensors(ModelConfig(trunk=trunk_config(num_layers=2, vocab_size=49152, hidden_size=16)), seed=9)
    save_file(tensors, other / "model.safetensors")
    prompts, answers, data = tmp_path / "p.jsonl", tmp_path / "a.jsonl", tmp_path / "data"
    prompts.write_text('{"id": "a", "prompt": "Hi"}\n')
    where = ("--device", "cpu", "--dtype", "float32", "--held-out", 0)
    write = (prompts, "--out", answers, "--max-tokens", 5, "--keep-loops", *where, "--model")
    command(add_distill_arguments, distill.run, *write, base)
    with pytest.raises(TrainingError, match=r"a\.jsonl, line 1 was made with other options .*'weights'"):
        command(add_distill_arguments, distill.run, *write, other)
    score = (answers, "--out", data, *where, "--model")
    command(add_segment_arguments, segment.run, *score, base)
    with pytest.raises(TrainingError, match="data was made with weights"):
        command(add_segment_arguments, segment.run, *score, other)
