"""Where the training commands write: a place that cannot be written is named before any work, and nothing is made."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hamburger.training.cli.data import (
    add_distill_arguments,
    add_inspect_arguments,
    add_regroup_arguments,
    add_segment_arguments,
)
from hamburger.training.cli.export import add_export_arguments
from hamburger.training.cli.quality import add_eval_quality_arguments
from hamburger.training.cli.settle import add_eval_settle_arguments, add_fit_settle_arguments
from hamburger.training.cli.train import add_train_arguments

Add = Callable[[argparse.ArgumentParser], None]

FOLDERS: dict[Add, list[str]] = {
    add_segment_arguments: ["a.jsonl", "--out"],
    add_regroup_arguments: ["data", "--model", "m", "--out"],
    add_train_arguments: ["frozen", "--data", "data", "--out"],
    add_export_arguments: ["run", "--out"],
    add_eval_quality_arguments: ["--prompts", "p.jsonl", "--out"],
    add_eval_settle_arguments: ["--out"],
}
FILES: dict[Add, list[str]] = {
    add_distill_arguments: ["p.jsonl", "--out"],
    add_inspect_arguments: ["data", "--html"],
    add_fit_settle_arguments: ["--answers", "a.jsonl", "--out"],
}


def parse(add: Add, *argv: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add(parser)
    return parser.parse_args([str(a) for a in argv])


@pytest.mark.parametrize(("add", "argv", "wanted"), [
    *((add, argv, "folder") for add, argv in FOLDERS.items()), *((add, argv, "file") for add, argv in FILES.items())
])  # fmt: skip
def test_a_wrong_place_is_named_and_nothing_is_made(add: Add, argv: list[str], wanted: str, tmp_path: Path) -> None:
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_text("mine")
    folder.mkdir()
    wrong, other = (file, "file") if wanted == "folder" else (folder, "folder")
    with pytest.raises(argparse.ArgumentError, match=rf"argument {argv[-1]}: {wrong} is a {other}: name a {wanted}"):
        parse(add, *argv, wrong)
    with pytest.raises(argparse.ArgumentError, match=rf"{argv[-1]}: {file}/x/y cannot be made, as {file} is a file"):
        parse(add, *argv, file / "x" / "y")
    place = vars(parse(add, *argv, tmp_path / "new" / "place"))[argv[-1].removeprefix("--")]
    assert place == tmp_path / "new" / "place"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_a_place_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write everywhere
    with pytest.raises(argparse.ArgumentError, match=f"cannot be written: no permission for {tmp_path}"):
        parse(add_export_arguments, "run", "--out", tmp_path / "x")
    with pytest.raises(argparse.ArgumentError, match=r"argument --out: .* cannot be written: File name too long"):
        parse(add_export_arguments, "run", "--out", tmp_path / ("x" * 300))


def test_answers_cannot_grow_in_a_gzip_file(tmp_path: Path) -> None:
    with pytest.raises(argparse.ArgumentError, match=r"argument --out: .*a\.jsonl\.gz: .* leave \.gz out"):
        parse(add_distill_arguments, "p.jsonl", "--out", tmp_path / "a.jsonl.gz")
