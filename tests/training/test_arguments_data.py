"""The options of distill, segment and inspect, and that they need no torch."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hamburger.model.checkpoints.sources import resolve_source
from hamburger.training.base_model import base_arguments
from hamburger.training.cli.data import (
    add_distill_arguments,
    add_inspect_arguments,
    add_regroup_arguments,
    add_segment_arguments,
)
from hamburger.training.corpus.dataset import DatasetMeta
from hamburger.training.prepare.distill import DistillSettings


def parse(add: Callable[[argparse.ArgumentParser], None], *argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add(parser)
    return parser.parse_args(argv)


def test_the_defaults_of_distill_are_those_of_its_settings() -> None:
    args = parse(add_distill_arguments, "a.jsonl", "b.jsonl.gz", "--out", "x.jsonl")
    assert args.prompts == [Path("a.jsonl"), Path("b.jsonl.gz")]
    assert (args.model, args.base, args.out) == (None, None, Path("x.jsonl"))
    names = DistillSettings.__dataclass_fields__
    assert DistillSettings(**{name: getattr(args, name) for name in names}) == DistillSettings()


def test_segment_has_an_option_for_every_field_of_its_meta_file() -> None:
    args = parse(add_segment_arguments, "a.jsonl", "--out", "set", "--strategy", "sliding", "--floor", "2.5")
    fields = set(DatasetMeta.__dataclass_fields__) - {"model_argument", "vocab_size", "state_layers", "weights"}
    assert fields | {"states"} <= set(vars(args))
    assert (args.strategy, args.floor, args.ratio, args.top_k, args.max_length) == ("sliding", 2.5, 0.3, 16, 1024)


def test_inspect_shows_the_first_example_unless_told() -> None:
    assert parse(add_inspect_arguments, "set").index == 0
    args = parse(add_inspect_arguments, "set", "7", "--html", "x.html")
    assert (args.folder, args.index, args.html) == (Path("set"), 7, Path("x.html"))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--held-out", "1.1", "not a number from 0 to 1"),
        ("--held-out", "nan", "not a number from 0 to 1"),
        ("--greedy-share", "half", "not a number from 0 to 1"),
        ("--temperature", "0", "not a number from 0.01 to 100"),
        ("--top-p", "0", "not a number from 0.001 to 1"),
        ("--max-tokens", "0", "not a whole number from 1 up"),
        ("--samples", "1.5", "not a whole number from 1 up"),
        ("--seed", "-1", "not a whole number from 0 up"),
    ],
)
def test_a_wrong_value_is_named(option: str, value: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentError, match=message):
        parse(add_distill_arguments, "a.jsonl", "--out", "x.jsonl", f"{option}={value}")


def test_a_range_of_confidences_is_no_list() -> None:
    options = ("set", "--model", "m", "--out", "x", "--confidence")
    assert parse(add_regroup_arguments, *options, "0.9,0.4").confidence == [0.4, 0.9]
    with pytest.raises(argparse.ArgumentError, match=r"names 3 confidences: name the lowest and the highest"):
        parse(add_regroup_arguments, *options, "0.1,0.2,0.3")


def test_the_base_is_the_untouched_embedded_model_unless_named() -> None:
    assert base_arguments(None, None) == base_arguments("builtin", None) == ("builtin", None)
    assert base_arguments("some/model", "b") == ("some/model", "b")
    assert resolve_source(*base_arguments(None, None)).name == "smollm2-135m-instruct"


def test_the_options_need_no_torch() -> None:
    code = "import sys, hamburger.training.cli.data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("text", "layers"), [("0", 0), ("3", 3), ("7,14,29", (7, 14, 29))])
def test_states_are_a_number_of_layers_or_their_names(text: str, layers: object) -> None:
    assert parse(add_segment_arguments, "a.jsonl", "--out", "set", "--states", text).states == layers


@pytest.mark.parametrize("text", ["-1", "x", "7,", "9,7", "7,7"])
def test_other_states_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentError, match="argument --states"):
        parse(add_segment_arguments, "a.jsonl", "--out", "set", f"--states={text}")
