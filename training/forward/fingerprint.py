"""Which model it is, whatever it is called: a hash of all that its answers depend on."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path

from hamburger.model.checkpoints.sources import BUILTIN, ModelSource, embedded_gguf


def fingerprint(source: ModelSource, *settings: object, without: Collection[str] = ()) -> str:
    """16 hex digits that change with any byte of the model's weights or configuration, and with the settings.

    without: names of files beside the weights that the caller does not depend on.
    """
    digest = hashlib.sha256(repr(settings).encode())
    for path in dict.fromkeys(p for p in (source.path, source.base_path) if p is not None):
        for file in _model_files(path):
            if file.name in without:
                continue
            digest.update(file.name.encode())
            with file.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:16]


def _model_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = [path / name for name in ("config.json", "generation_config.json")]
    files = [file for file in files if file.is_file()] + sorted(path.glob("*.safetensors"))
    return [*files, embedded_gguf()] if path == BUILTIN else files
