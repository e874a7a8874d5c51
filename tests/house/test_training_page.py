"""docs/training.md: its commands exist, and its estimates are what its own formulas give."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from hamburger.model.config import ModelConfig
from hamburger.model.tensor_shapes import tensor_shapes
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
from hamburger.training.recipe import BUILTIN_RECIPES, read_recipe
from small_models import graft_config, trunk_config

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
COMMANDS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "distill": add_distill_arguments,
    "segment": add_segment_arguments,
    "inspect": add_inspect_arguments,
    "regroup": add_regroup_arguments,
    "train": add_train_arguments,
    "export": add_export_arguments,
    "eval-quality": add_eval_quality_arguments,
    "fit-settle": add_fit_settle_arguments,
    "eval-settle": add_eval_settle_arguments,
}
BLOCKS = re.findall(r"^```bash\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
LINES = [shlex.split(line, comments=True) for line in "".join(BLOCKS).replace("\\\n", " ").splitlines()]
CALLS = [words[words.index(name) :] for words in LINES for name in COMMANDS if name in words]


def test_every_training_command_is_shown() -> None:
    assert {call[0] for call in CALLS} == set(COMMANDS)


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_commands_parse(call: list[str]) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    COMMANDS[call[0]](parser)
    parser.parse_args(call[1:])
    if call[0] == "train":
        overrides = [call[i + 1] for i, word in enumerate(call) if word == "--set"]
        read_recipe(call[1], overrides)


def test_a_probe_lies_beside_the_model_that_it_was_fitted_to() -> None:
    fits = [call for call in CALLS if call[0] == "fit-settle"]
    assert fits
    for call in fits:
        assert call[call.index("--out") + 1] == f"{call[call.index('--model') + 1]}/settle.safetensors"


def test_every_recipe_is_described() -> None:
    for path in BUILTIN_RECIPES.glob("*.yaml"):
        assert f"`{path.stem}`" in PAGE


@dataclass(frozen=True)
class Size:
    width: int
    feed_forward: int
    layers: int
    vocabulary: int
    kv_width: int
    tied: bool

    @property
    def layer(self) -> int:
        d, kv, ff = self.width, self.kv_width, self.feed_forward
        return 2 * d * d + 2 * d * kv + 3 * d * ff

    @property
    def body(self) -> int:
        return self.layers * self.layer

    def graft(self, recipe: str) -> int:
        d = self.width
        return 4 * self.layer + 7 * d * d if recipe == "published" else 2 * self.layer + 11 * d * d

    def adapter(self, recipe: str) -> int:
        per_layer = 32 * (6 * self.width + 2 * self.kv_width + 3 * self.feed_forward)
        return self.layers * per_layer if recipe == "adapter" else 0

    def memory(self, recipe: str, slots: int = 2048) -> float:
        """Bytes."""
        d, v = self.width, self.vocabulary
        heads = v * d if self.tied else 2 * v * d
        trained = self.graft(recipe) + self.adapter(recipe)
        if recipe == "published":
            state = 18 * (self.body + heads + trained)
        else:
            each = 14 if read_recipe(recipe).optimizer == "muon" else 18
            state = 2 * self.body + 6 * v * d + (0 if self.tied else 2 * v * d) + each * trained
        position = 30 * d + 8 * self.feed_forward
        trunk = 0 if recipe == "frozen" else self.layers * position
        micro = 4 * 7 * position if recipe == "published" else 2 * 3 * position
        head_gradient = 6 * v * d if recipe == "published" else 0
        return state + slots * (trunk + micro) + 12 * 128 * 49152 + head_gradient

    def work(self, recipe: str, slots_per_token: float = 1.5) -> float:
        """FLOP for each answer token and epoch."""
        d, v = self.width, self.vocabulary
        short = v if recipe == "published" else 12288
        passes = {"frozen": 1, "adapter": 2, "published": 3}[recipe]
        trunk = slots_per_token * 2 * self.body * passes
        micro = 3 * 2 * (4 * 7 if recipe == "published" else 2 * 3) * self.layer
        heads = 2 * d * (v * passes + 3 * short * (3 if recipe == "published" else 2))
        return trunk + micro + heads


SIZES = {
    "135M": Size(576, 1536, 30, 49152, 192, True),
    "1B": Size(2048, 8192, 16, 128256, 512, True),
    "8B": Size(4096, 14336, 32, 128256, 1024, False),
}


def test_the_pages_parameter_counts_are_those_of_the_code() -> None:
    for size in SIZES.values():
        heads = size.width // 64
        trunk = trunk_config(
            vocab_size=size.vocabulary,
            hidden_size=size.width,
            intermediate_size=size.feed_forward,
            num_layers=size.layers,
            num_heads=heads,
            num_kv_heads=size.kv_width // 64,
            head_dim=64,
            tie_word_embeddings=size.tied,
        )
        for recipe in ("published", "adapter"):
            shape = read_recipe(recipe).graft
            graft = graft_config(micro_layers=shape.micro_layers, features=shape.features, micro_norm=shape.micro_norm)
            shapes = tensor_shapes(ModelConfig(trunk=trunk, graft=graft))
            counts: dict[bool, int] = {True: 0, False: 0}
            for name, shape_of in shapes.items():
                of_trunk = name.startswith(("model.", "lm_head."))
                counts[of_trunk] += shape_of[0] * (shape_of[1] if len(shape_of) > 1 else 1)
            embeddings = size.vocabulary * size.width * (1 if size.tied else 2)
            assert size.body + embeddings == pytest.approx(counts[True], rel=1e-3)
            assert size.graft(recipe) == pytest.approx(counts[False], rel=1e-3)


def rows(title: str) -> dict[str, list[str]]:
    """The rows of a section that begin with a model's size: first cell -> the others."""
    section = PAGE.partition(f"\n### {title}\n")[2].partition("\n##")[0]
    lines = re.findall(r"^\| (\d+[MB]\b.*) \|$", section, flags=re.MULTILINE)
    return {cells[0]: cells[1:] for cells in (line.split(" | ") for line in lines)}


def test_memory_estimates_follow_from_the_formula() -> None:
    table = rows("Memory")
    assert list(table) == list(SIZES)
    for name, cells in table.items():
        expected = [f"{SIZES[name].memory(recipe) / 1e9:.3g} GB" for recipe in ("frozen", "adapter", "published")]
        assert cells == expected, name


def test_time_estimates_follow_from_the_formula() -> None:
    table = rows("Time")
    assert list(table) == [f"{name}, `{recipe}`" for name in SIZES for recipe in ("frozen", "adapter", "published")]
    for name, cells in table.items():
        size, recipe = name.removesuffix("`").split(", `")
        work = SIZES[size].work(recipe)
        hours = [3e6 * work / 0.12e12 / 3600, 10e6 * work / 60e12 / 3600, 10e6 * work / 350e12 / 3600]
        assert cells == [f"{work / 1e9:.3g}", *(f"{h:.2g}" if h < 100 else f"{h:.0f}" for h in hours)], name
