"""`hamburger export`: a training checkpoint, or the published Lightning `.ckpt` -> a folder to serve.

Grafts and adapter over a named base where the checkpoint has one, else (or with --merge) whole weights. The folder
appears whole or not at all.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from hamburger.model.checkpoints.config.folder import Adapter
from hamburger.model.checkpoints.load import load_checkpoint, save_checkpoint
from hamburger.model.checkpoints.settle_settings import probe_file
from hamburger.model.checkpoints.sources import PROBE_FILE, ModelSource, own_files, read_json, resolve_source
from hamburger.model.checkpoints.weight_files import read_files
from hamburger.model.config import GraftConfig, ModelConfig
from hamburger.training.base_model import other_scorer, referenced_name
from hamburger.training.cli.quality import CONFIDENCES
from hamburger.training.corpus.dataset import Example, SegmentedDataset
from hamburger.training.corpus.prompts import is_kept_back
from hamburger.training.errors import TrainingError
from hamburger.training.export import calibrate
from hamburger.training.export.bases import base_reference, named_base, shown_base
from hamburger.training.export.model_card import CardFacts, model_card, read_run
from hamburger.training.forward.loading import load_model
from hamburger.training.recipe import read_recipe

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_GENERATION = "generation_config.json"
_CALIBRATE_TOKENS = 20_000
_WHOLE_KINDS = "a folder of our format or the published .ckpt"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """The arguments of `hamburger export` (training/cli/export.py says what they mean)."""

    checkpoint: Path
    out: Path
    base: str | None = None
    dtype: str = "bfloat16"
    merge: bool = False
    calibrate: Path | None = None
    held_back: bool = False
    calibrate_tokens: int | None = None
    device: str = "auto"
    groups: Literal["composed", "verified"] | None = None
    confidence: float | None = None
    expected_tokens_per_kv: float | None = None
    data: Sequence[Path] = ()
    card_notes: Path | None = None
    overwrite: bool = False


def run(args: argparse.Namespace) -> int:
    """The command: writes the folder, and prints what the dial's calibration gave."""
    options = ExportOptions(**{field.name: getattr(args, field.name) for field in fields(ExportOptions)})
    text = export(options, on_progress=lambda line: print(f"hamburger: {line}", file=sys.stderr, flush=True))
    if text is not None:
        print(text)
    print(f"{options.out} is ready: hamburger serve {options.out}")
    return 0


def export(options: ExportOptions, on_progress: Callable[[str], None] = lambda line: None) -> str | None:
    """Write the folder; returns the calibration's report, if there was one.

    Raises TrainingError, CheckpointError, ConfigError or OSError; then nothing has changed on disk.
    """
    if options.held_back and options.calibrate is None:
        raise TrainingError(
            "--held-back says which examples calibrate the dial, and --calibrate names none: add --calibrate DATA, or "
            "leave out --held-back."
        )
    if options.calibrate_tokens is not None and options.calibrate is None:
        raise TrainingError(
            "--calibrate-tokens says how many tokens calibrate the dial, and --calibrate names none: add --calibrate "
            "DATA, or leave out --calibrate-tokens."
        )
    path = latest_checkpoint(options.checkpoint)
    source = resolve_source(str(path), options.base)
    if source.kind not in ("hamburger", "lightning"):
        raise TrainingError(f"{path} is a plain base model, which has nothing to export: name {_WHOLE_KINDS}.")
    out = options.out.expanduser().resolve()
    _check_out(out, [p for p in (source.path, source.base_path) if p is not None], options.overwrite)
    # All that the options name is opened before the work.
    notes = None if options.card_notes is None else options.card_notes.read_text(encoding="utf-8")
    for folder in options.data:
        SegmentedDataset(folder)
    data = None if options.calibrate is None else SegmentedDataset(options.calibrate)
    share = _validation_share(path) if options.held_back else None
    for line in () if data is None else other_scorer(data.folder, data.meta.model, referenced_name(source)):
        on_progress(line)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        facts = _write(options, source, temporary, out, on_progress)
        text = None
        if data is not None:
            graft, text = _calibrated(options, data, temporary, share, on_progress)
            _set_graft(temporary, graft)
            facts = replace(facts, config=replace(facts.config, graft=graft), calibration=text)
        card = model_card(replace(facts, run=read_run(path), notes=notes))
        (temporary / "MODEL_CARD.md").write_text(card, encoding="utf-8")
        _put_in_place(temporary, out)
    except BaseException:  # Ctrl-C as well
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return text


def latest_checkpoint(path: Path) -> Path:
    """A run's folder names its latest checkpoint in the file `latest`; anything else is what it is."""
    file = path / "latest"
    if not file.is_file() or (path / "config.json").exists():
        return path
    name = file.read_text(encoding="utf-8").strip()
    if not name or Path(name).name != name or not (path / name).is_dir():
        raise TrainingError(f"{file} names no checkpoint of the run: name one of its step-* folders yourself.")
    return path / name


def _check_out(out: Path, needed: list[Path], overwrite: bool) -> None:
    for path in needed:
        if out == path.resolve() or out in path.resolve().parents:
            raise TrainingError(f"--out {out} is or holds {path}, which is being read: name another folder.")
    if not out.exists():
        return
    if not out.is_dir():
        raise TrainingError(f"--out {out} is a file: name a folder.")
    if any(out.iterdir()):
        if not overwrite:
            raise TrainingError(f"--out {out} is not empty: name another folder, or add --overwrite.")
        if (out / "training" / "state.pt").exists():
            raise TrainingError(
                f"--out {out} is a training run's checkpoint, so --overwrite leaves it alone: name another folder."
            )
        file = out / "config.json"
        if not file.is_file() or read_json(file).get("model_type") != "hamburger":
            raise TrainingError(
                f"--out {out} holds no checkpoint of our format, so --overwrite leaves it alone: remove it yourself or "
                "name another folder."
            )


def _write(
    options: ExportOptions, source: ModelSource, folder: Path, out: Path, on_progress: Callable[[str], None]
) -> CardFacts:
    """Weights, configuration and tokenizer; the dial is not calibrated yet."""
    on_progress(f"reading {source.name}")
    dtype = _DTYPES[options.dtype]
    checkpoint = load_checkpoint(source, dtype, on_progress=on_progress)
    if checkpoint.config.graft is None:
        raise TrainingError(f"{source.path} has no graft, so there is nothing to export: name {_WHOLE_KINDS}.")
    config = replace(checkpoint.config, graft=_dial(checkpoint.config.graft, options))
    tensors, base, adapter = checkpoint.tensors, None, None
    if source.kind == "hamburger" and source.base_path is not None and not options.merge:
        settings = read_json(source.path / "config.json")
        base = base_reference(options.base or settings["base"], source, out)
        if "adapter" in settings and not config.adapter_rank:
            adapter = Adapter(settings["adapter"]["rank"], float(settings["adapter"]["alpha"]))
        own = read_files(own_files(source.path))
        tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in own.items()}
        if config.adapter_rank:  # as they were loaded, with alpha / rank in them
            tensors |= {name: t for name, t in checkpoint.tensors.items() if name.startswith("adapter.")}
    _check_finite(tensors, options.dtype)
    on_progress(f"writing {out}")
    save_checkpoint(folder, config, tensors, base=base, adapter=adapter)
    _copy_texts(source, config, folder)
    probe = probe_file(source)
    if probe is not None and (base is None or probe.parent == source.path):  # else it is found beside the base
        shutil.copyfile(probe, folder / PROBE_FILE)
    return CardFacts(
        name=out.name,
        source=str(options.checkpoint if source.kind == "lightning" else latest_checkpoint(options.checkpoint)),
        base=shown_base(options.base or named_base(source), source),
        is_whole=base is None,
        dtype=options.dtype,
        config=config,
        adapter=adapter,
        data=options.data,
        num_adapter_parameters=sum(t.numel() for name, t in tensors.items() if name.startswith("adapter.")),
        weight_bytes=sum(file.stat().st_size for file in own_files(folder)),
    )


def _dial(graft: GraftConfig, options: ExportOptions) -> GraftConfig:
    """The graft with the options' groups and confidence; what was measured with another dial counts no more."""
    confidence = graft.default_confidence if options.confidence is None else options.confidence
    is_same = confidence == graft.default_confidence and options.calibrate is None
    expected = graft.expected_tokens_per_kv if is_same else 1.0
    if options.expected_tokens_per_kv is not None:
        expected = options.expected_tokens_per_kv
    groups = options.groups or graft.groups
    return replace(graft, groups=groups, default_confidence=confidence, expected_tokens_per_kv=expected)


def _check_finite(tensors: Mapping[str, Tensor], dtype: str) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise TrainingError(
                f"{name} holds numbers that are not finite in {dtype}: the training diverged, or --dtype is too narrow."
            )


def _copy_texts(source: ModelSource, config: ModelConfig, folder: Path) -> None:
    """The tokenizer's files, and the end tokens where a Hugging Face folder has them."""
    for name in _TOKENIZER_FILES:
        if (source.tokenizer_path / name).is_file():
            shutil.copyfile(source.tokenizer_path / name, folder / name)
    places = [p for p in (source.path, source.base_path) if p is not None and (p / _GENERATION).is_file()]
    if places:
        shutil.copyfile(places[0] / _GENERATION, folder / _GENERATION)
    elif config.trunk.eos_token_ids:
        end = {"eos_token_id": list(config.trunk.eos_token_ids)}
        (folder / _GENERATION).write_text(json.dumps(end, indent=2) + "\n", encoding="utf-8")


def _validation_share(checkpoint: Path) -> float:
    recipe = checkpoint.resolve().parent / "recipe.yaml"
    if not recipe.is_file():
        raise TrainingError(f"--held-back needs the run's recipe, and there is no {recipe}: leave the option out.")
    share = read_recipe(str(recipe)).validation_share
    if not share:
        raise TrainingError("the run kept nothing of its data back: calibrate on other data, without --held-back.")
    return share


def held_back(data: SegmentedDataset, share: float) -> list[int]:
    """The examples that `train` keeps back for validation with such a validation_share."""
    return [i for i in range(len(data)) if is_kept_back(data.example(i).id, share)]


def _calibrated(
    options: ExportOptions,
    data: SegmentedDataset,
    folder: Path,
    share: float | None,
    on_progress: Callable[[str], None],
) -> tuple[GraftConfig, str]:
    """Fit the dial of the weights as they will be served."""
    source = resolve_source(str(folder))
    model = load_model(source, device=options.device, dtype=options.dtype, on_progress=on_progress)
    trunk, graft = model.config.trunk, model.config.graft
    if graft is None or data.meta.max_group > graft.max_group or data.meta.vocab_size != trunk.vocab_size:
        raise TrainingError(
            f"{data.folder} has groups of up to {data.meta.max_group} tokens and a vocabulary of "
            f"{data.meta.vocab_size}, which is not this model's: segment with its base and --max-group."
        )
    chosen = list(range(len(data))) if share is None else held_back(data, share)
    if share is not None and not chosen:
        raise TrainingError(
            f"the run's validation_share {share:g} keeps nothing of {data.folder} back: train with a larger one, or "
            "calibrate on other data without --held-back."
        )
    on_progress("calibrating the dial")
    tokens = options.calibrate_tokens or _CALIBRATE_TOKENS
    verified = graft.groups == "verified"
    decisions = calibrate.collect(model, _spread(data, chosen, tokens), tokens, verified=verified)
    fitted = calibrate.fit(decisions)
    if fitted == calibrate.identity(graft.max_group):
        raise TrainingError(
            f"{data.folder} decides fewer than {calibrate.FEWEST_DECISIONS} times at each place of a group, so nothing "
            "is fitted: name more data, or leave out --calibrate."
        )
    graft = replace(graft, stop_scale=fitted.stop_scale, stop_bias=fitted.stop_bias)
    points = sorted({*CONFIDENCES, graft.default_confidence})
    return graft, calibrate.report(decisions, fitted, points)


def _spread(data: SegmentedDataset, chosen: Sequence[int], max_tokens: int) -> Iterator[Example]:
    """Examples from all over the set, whose parts may differ in kind."""
    tokens = data.num_response_tokens * len(chosen) / max(len(data), 1)
    stride = max(1.0, tokens / max_tokens)
    return (data.example(chosen[int(i * stride)]) for i in range(math.ceil(len(chosen) / stride)))


def _set_graft(folder: Path, graft: GraftConfig) -> None:
    settings: dict[str, Any] = read_json(folder / "config.json")
    settings["graft"] = asdict(graft)
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _put_in_place(temporary: Path, out: Path) -> None:
    if not out.exists():
        temporary.rename(out)
        return
    old = temporary.with_suffix(".old")
    out.rename(old)
    try:
        temporary.rename(out)
    except OSError:
        old.rename(out)
        raise
    shutil.rmtree(old)
