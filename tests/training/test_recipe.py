"""Recipes: ours can be read, and what is wrong in one is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hamburger.training.errors import TrainingError
from hamburger.training.recipe import BUILTIN_RECIPES, GraftShape, Recipe, read_recipe
from small_models import trunk_config

OURS = {"published": "full", "frozen": "frozen", "adapter": "adapter", "merges": "merges", "dial": "frozen"}


@pytest.mark.parametrize("name", OURS)
def test_ours(name: str) -> None:
    recipe = read_recipe(name)
    assert recipe.trunk.mode == OURS[name]
    assert recipe.graft.config(trunk_config(num_layers=30, hidden_size=576)).feature_layers[-1] == 29
    assert json.loads(json.dumps(recipe.shaping())) == recipe.shaping()


def test_each_of_our_files_is_tested() -> None:
    assert {path.stem for path in BUILTIN_RECIPES.iterdir()} == set(OURS)


def test_later_stages_go_on_with_the_graft_of_stage_one() -> None:
    for later in ("adapter", "merges", "dial"):
        assert read_recipe("frozen").graft == read_recipe(later).graft


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trunk.mode=full", "objective.matching .* needs trunk.mode merges"),
        ("trunk.rank=8", "trunk.rank that is a multiple of 32"),
        ("gradient_checkpointing=true", "no gradient_checkpointing"),
        ("objective.stop=0.5", "objective.micro_weight 0 .* set objective.stop to 0"),
    ],
)
def test_what_a_run_for_merges_cannot_have(override: str, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        read_recipe("merges", [override])


@pytest.mark.parametrize("override", ["trunk.mode=merges", "trunk.mode=full", "groups.kind=single"])
def test_what_a_run_that_measures_merges_cannot_have(override: str) -> None:
    with pytest.raises(TrainingError, match=r"stop_target fidelity .* needs trunk.mode frozen, and groups of several"):
        read_recipe("dial", [override])


def test_the_published_shape() -> None:
    """Llama-3.2-1B-Instruct has 16 layers; the published graft reads 3, 7, 11 and 15."""
    recipe = read_recipe("published")
    assert recipe.graft.config(trunk_config(num_layers=16)).feature_layers == (3, 7, 11, 15)
    assert recipe.objective == Recipe().objective


def test_overrides(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("clip: 2\ngroups: {kind: jitter, split: 0.3}\n")
    changes = ["trunk_lr=1e-4", "groups.ratio=[0.2, 0.4]", "init=a b", "trunk.mode=adapter", "max_steps=7"]
    recipe = read_recipe(str(path), changes)
    assert (recipe.clip, recipe.trunk_lr, recipe.init, recipe.trunk.mode) == (2, 1e-4, "a b", "adapter")
    assert (recipe.groups.kind, recipe.groups.ratio, recipe.groups.split) == ("jitter", (0.2, 0.4), 0.3)
    assert recipe.max_steps == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("trunk_rl=1", "no trunk_rl, did you mean trunk_lr?"),
        ("graft.micro_layer=1", "no graft.micro_layer, did you mean graft.micro_layers?"),
        ("clip=0", "clip is 0: input should be greater than 0"),
        ("trunk.mode=lora", "trunk.mode is 'lora'"),
        ("groups.ratio=[0.5, 0.1]", "ratio must be two ascending numbers"),
        ("groups.single_share=0.1", "stop_target boundary"),
        ("cached_states=true", "need trunk.mode frozen"),
        ("clip", "write it as key=value"),
        ("clip.most=1", "clip has no parts"),
        ("epochs=.inf", "epochs is inf: input should be a finite number"),
        ("epochs=1e300", "epochs is 1e.300: input should be less than or equal to 1000000"),
        ("graft_lr=.inf", "graft_lr is inf: input should be a finite number"),
        ("objective.stop=.inf", "objective.stop is inf: input should be a finite number"),
        ("clip=.inf", "clip is inf: input should be a finite number"),
        ("clip=.nan", "clip is nan: input should be"),
        ("seed=99999999999999999999", "seed is 99999999999999999999: input should be less than"),
        ("threads=99999999999", "threads is 99999999999: input should be less than"),
        ("clip=[", "is not YAML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("clip: 1.0\n")
    with pytest.raises(TrainingError, match=message.replace("?", r"\?") if "mean" in message else message):
        read_recipe(str(path), [change])


@pytest.mark.parametrize(("text", "message"), [("a: [", "is not YAML"), ("- 1", "name: value"), ("\xff", None)])
def test_files_that_hold_no_recipe(tmp_path: Path, text: str, message: str | None) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(TrainingError, match=message or "not a text"):
        read_recipe(str(path))
    with pytest.raises(TrainingError, match=r"no recipe of ours \(adapter, dial, frozen, merges, published\)"):
        read_recipe("missing")


def test_recipes_and_arguments_are_read_without_torch() -> None:
    code = "import sys, hamburger.training.recipe, hamburger.training.cli.train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_shape_is_checked_against_the_base() -> None:
    with pytest.raises(TrainingError, match="5 feature layers were asked for, but the base model has 4 layers"):
        GraftShape(feature_layers=5).config(trunk_config())
