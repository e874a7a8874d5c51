"""The recipe of a training run: everything that shapes it but the data, read from YAML. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hamburger.model.config import GraftConfig, TrunkConfig
from hamburger.training.errors import TrainingError

BUILTIN_RECIPES = Path(__file__).parent / "recipes"

Share = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]
Weight = Annotated[float, Field(ge=0)]
Range = tuple[Weight, Weight]

# What may differ when a run goes on: it does not change the loss curve.
FREE_FIELDS = frozenset({"checkpoint_every", "keep", "threads", "validation_every", "validation_batches"})


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class GraftShape(_Part):
    """The shape of a new graft (model/config.py, GraftConfig).

    feature_layers: trunk layers counted from 0, or a number of layers, evenly spaced up to the last.
    """

    max_group: Annotated[int, Field(ge=2, le=16)] = 4
    merger_heads: Count = 64
    micro_layers: Count = 4
    feature_layers: Count | tuple[Annotated[int, Field(ge=0)], ...] = 4
    features: Literal["positions", "fused"] = "positions"
    micro_norm: bool = False
    short_list_size: Count | None = None

    def config(self, trunk: TrunkConfig) -> GraftConfig:
        """The graft's configuration over a trunk. Raises TrainingError."""
        layers = self.feature_layers
        if isinstance(layers, int):
            layers = spaced_layers(layers, trunk.num_layers)
        fields = self.model_dump(exclude={"feature_layers"})
        return GraftConfig(feature_layers=layers, **fields)


def spaced_layers(count: int, num_layers: int) -> tuple[int, ...]:
    """`count` layers of a trunk, counted from 0, evenly spaced up to the last. Raises TrainingError."""
    if not 1 <= count <= num_layers:
        raise TrainingError(f"{count} feature layers were asked for, but the base model has {num_layers} layers.")
    return tuple((i + 1) * num_layers // count - 1 for i in range(count))


class TrunkTraining(_Part):
    """mode: `frozen`, `adapter` (low-rank adapters on every linear of the trunk, arXiv 2106.09685), `merges` (the same,
    passed by composed slots (of several tokens) alone, so that single ones stay the base's), or `full`.

    rank, alpha, dropout: of the adapter; it adds alpha / rank * B A to a weight, for `merges` B A alone.
    """

    mode: Literal["frozen", "merges", "adapter", "full"] = "full"
    rank: Count = 32
    alpha: Annotated[float, Field(gt=0)] = 64.0
    dropout: Rate = 0.0


class ObjectiveWeights(_Part):
    """Weights and targets of the loss. The defaults are the published objective (arXiv 2505.20438).

    cross_entropy, distillation: weights of the cross-entropy with the data's token, and of the KL divergence from the
        base model's likeliest ids (renormalised over those that the data set holds).
    stop: weight of the stop head's binary cross-entropy.
    lookahead: "group" trains the tokens of the data's next group; "dense" all of the next max_group tokens, whatever
        the data's groups are.
    stop_target: "boundary" is 1 at the data's last token of a group; "agreement" is the base model's probability that
        the next micro-step's likeliest token is wrong, which makes the dial a probability; "fidelity" counts as right
        only what the composed slot keeps of it: that times exp(-KL) of the base's next token from the model's after the
        group (objective.group_fidelity). It does not change what composed slots hold. Both need a teacher.
    micro_weight: weight of a micro-step's token beside the trunk's; 0 leaves micro decoder and stop head as they are.
    first_token: whether the trunk's own token is trained; off saves its head where the trunk is frozen.
    matching: weight of how far the trunk's states are, from each answer's first composed slot on, from those that the
        base has after the same tokens (composed_states.py). Then the loss is of these slots alone.
    """

    cross_entropy: Weight = 1.0
    distillation: Weight = 0.0
    stop: Weight = 0.5
    lookahead: Literal["group", "dense"] = "group"
    stop_target: Literal["boundary", "agreement", "fidelity"] = "boundary"
    micro_weight: Weight = 1.0
    first_token: bool = True
    matching: Weight = 0.0

    @property
    def needs_teacher(self) -> bool:
        return self.distillation > 0 or self.stop_target != "boundary"


class Grouping(_Part):
    """How the answers' tokens are grouped as input.

    kind: `data` as the data set says, `single` one token a group, `jitter` segmented anew for each answer and epoch.
    ratio, floor: ranges that jitter draws an answer's segmentation thresholds from. split: probability that jitter cuts
        a group in two. data_share: share of the answers that jitter leaves in the data's groups.
    single_share: share of the packs whose groups all have one token.
    """

    kind: Literal["data", "single", "jitter"] = "data"
    ratio: tuple[Share, Share] = (0.15, 0.7)
    floor: Range = (0.02, 0.3)
    split: Share = 0.1
    data_share: Share = 0.0
    single_share: Share = 0.0

    @model_validator(mode="after")
    def _ranges_ascend(self) -> Grouping:
        for name, (low, high) in (("ratio", self.ratio), ("floor", self.floor)):
            if low > high:
                raise ValueError(f"{name} must be two ascending numbers, not {low} and {high}")
        return self


class Recipe(_Part):
    """One training run.

    base: the model to make a HAMburger of, a folder, hub id or `builtin`. init: a HAMburger folder to go on from
        instead (for example a checkpoint of another run); its graft then has to be the recipe's.
    optimizer: `adamw`, or `muon`: the graft's matrices step along their orthogonalised momentum, by as much as AdamW's
        steps of the same rate are long (Muon, arXiv 2502.16982), and all else by AdamW.
    trunk_lr, graft_lr: peak learning rates. They rise over warmup_steps, then follow a cosine down to min_lr_ratio.
    epochs: passes over the data; max_steps, if set, is what counts instead.
    slots_per_pack: most slots that run at once; with cached_states those of prompts do not. packs_per_step: packs that
        one step averages, over all processes.
    validation_share: share of the examples that is kept for validation, unless there is a validation data set.
    cached_states: take the trunk's states from the data set (`segment --states`); for a frozen trunk and single groups.
    gradient_checkpointing: use less memory, and run the trunk's forward pass twice.
    precision: `bfloat16` computes in bfloat16 (weights that are trained stay float32); `auto` where the machine can.
    """

    base: str = "builtin"
    init: str | None = None
    graft: GraftShape = GraftShape()
    trunk: TrunkTraining = TrunkTraining()
    objective: ObjectiveWeights = ObjectiveWeights()
    groups: Grouping = Grouping()
    optimizer: Literal["adamw", "muon"] = "adamw"
    trunk_lr: Weight = 5e-5
    graft_lr: Weight = 1e-4
    warmup_steps: Annotated[int, Field(ge=0)] = 100
    min_lr_ratio: Share = 0.1
    weight_decay: Weight = 0.01
    betas: tuple[Rate, Rate] = (0.9, 0.95)
    clip: Annotated[float, Field(gt=0)] = 1.0
    epochs: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    max_steps: Count | None = None
    slots_per_pack: Count = 2048
    packs_per_step: Count = 4
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    validation_share: Rate = 0.02
    validation_every: Count = 500
    validation_batches: Count = 32
    checkpoint_every: Count = 500
    keep: Count = 2
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    threads: Annotated[int, Field(ge=1, le=4096)] | None = None
    gradient_checkpointing: bool = False
    cached_states: bool = False

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        has_single_groups = self.groups.kind == "single" or self.groups.single_share > 0
        if self.objective.stop > 0 and self.objective.stop_target == "boundary" and has_single_groups:
            raise ValueError(
                "objective.stop_target boundary learns where groups end, which one-token groups (groups.kind single, "
                "groups.single_share) would spoil: use stop_target agreement, or groups.kind data"
            )
        if self.groups.kind == "single" and self.objective.lookahead == "group":
            raise ValueError("groups.kind single trains micro-steps only with objective.lookahead dense")
        if self.objective.matching and (self.trunk.mode not in ("frozen", "merges") or self.gradient_checkpointing):
            raise ValueError(
                "objective.matching keeps composed slots to the base's states: it needs trunk.mode merges (or frozen), "
                "and no gradient_checkpointing"
            )
        if self.trunk.mode == "merges" and (self.trunk.rank % 32 or self.trunk.dropout):
            raise ValueError("trunk.mode merges needs a trunk.rank that is a multiple of 32, and has no dropout")
        if self.objective.micro_weight == 0 and self.objective.stop > 0:
            raise ValueError("objective.micro_weight 0 leaves the stop head as it is: set objective.stop to 0 as well")
        if self.objective.stop_target == "fidelity" and (self.trunk.mode != "frozen" or self.groups.kind == "single"):
            raise ValueError(
                "objective.stop_target fidelity measures what composed slots cost, which must not change meanwhile: "
                "it needs trunk.mode frozen, and groups of several tokens (groups.kind data or jitter)"
            )
        if self.cached_states and (self.groups.kind != "single" or self.trunk.mode != "frozen"):
            raise ValueError(
                "cached_states are the untouched base's, one token a slot: they need trunk.mode frozen and "
                "groups.kind single"
            )
        return self

    def shaping(self) -> dict[str, Any]:
        """The fields that shape the loss curve, as plain values: a run goes on only with the same."""
        return self.model_dump(mode="json", exclude=set(FREE_FIELDS))


def read_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from a YAML file, or one of ours by name (`published`, `adapter`, `frozen`, `merges`, `dial`).

    overrides: `key=value` or `part.key=value`, the value in YAML. Raises TrainingError that names key and remedy.
    """
    values = _read_yaml(_find(name))
    for override in overrides:
        key, sign, text = override.partition("=")
        if not sign:
            raise TrainingError(f"--set {override}: write it as key=value.")
        try:
            _assign(values, key.strip(), _value(text))
        except yaml.YAMLError as error:
            raise TrainingError(f"--set {override}: the value is not YAML.") from error
    return parse_recipe(values, name)


def parse_recipe(values: Any, where: str) -> Recipe:
    """Raises TrainingError that names the first field that is wrong."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise TrainingError(f"recipe {where}: there is no {field or 'nameless field'}{_near(field)}") from error
        reason = first["msg"].removeprefix("Value error, ")
        named = f"{field} is {first['input']!r}: " if field else ""
        raise TrainingError(f"recipe {where}: {named}{reason[0].lower()}{reason[1:]}.") from error


def _near(field: str) -> str:
    known = [*Recipe.model_fields, *(f"{p}.{f}" for p, m in _parts().items() for f in m.model_fields)]
    near = difflib.get_close_matches(field, known, n=1)
    return f", did you mean {near[0]}?" if near else f"; known are {', '.join(known)}."


def _parts() -> dict[str, type[_Part]]:
    return {"graft": GraftShape, "trunk": TrunkTraining, "objective": ObjectiveWeights, "groups": Grouping}


def _find(name: str) -> Path:
    path = Path(name).expanduser()
    ours = BUILTIN_RECIPES / f"{name}.yaml"
    if path.is_file():
        return path
    if path.name == name and ours.is_file():
        return ours
    known = ", ".join(sorted(p.stem for p in BUILTIN_RECIPES.glob("*.yaml")))
    raise TrainingError(f"{name} is no file, and no recipe of ours ({known}).")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise TrainingError(f"recipe {path} is not YAML: {' '.join(str(error).split())}.") from error
    except UnicodeDecodeError as error:
        raise TrainingError(f"recipe {path} is not a text in UTF-8.") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise TrainingError(f"recipe {path} must hold `name: value` lines.")
    return values


def _value(text: str) -> Any:
    """YAML, but 1e-4 is a number (YAML 1.1 wants 1.0e-4)."""
    try:
        return float(text) if "e" in text.lower() else yaml.safe_load(text)
    except ValueError:
        return yaml.safe_load(text)


def _assign(values: dict[str, Any], key: str, value: Any) -> None:
    part, dot, name = key.partition(".")
    if not dot:
        values[part] = value
        return
    inner = values.setdefault(part, {})
    if not isinstance(inner, dict):
        raise TrainingError(f"--set {key}: {part} has no parts.")
    inner[name] = value
