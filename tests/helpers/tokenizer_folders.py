"""Folders of tokenizers, made of the embedded one's files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import hamburger.model

BUILTIN = Path(str(hamburger.model.__file__)).parent / "builtin"


def copy_builtin(folder: Path, **changes: Any) -> Path:
    shutil.copy(BUILTIN / "tokenizer.json", folder)
    config = json.loads((BUILTIN / "tokenizer_config.json").read_text()) | changes
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return folder


def added(content: str, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("normalized", "lstrip", "rstrip", "single_word"), False)
    return {"content": content, "special": special, **flags}
