"""What is sampled by where a request does not say: what the model's files recommend, or the operator says. No torch.

As vLLM and SGLang read generation_config.json, and llama.cpp a GGUF file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hamburger.engine.types.errors import InvalidRequest
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.model.checkpoints.sources import CheckpointError, ModelSource, read_json

SamplingDefaults = Mapping[str, float]
OPENAI_DEFAULTS: SamplingDefaults = MappingProxyType({})  # those of SamplingParams
# The names of SamplingParams, which are transformers', too.
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_OF_GGUF = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}


def recommended_defaults(source: ModelSource) -> dict[str, float]:
    """What a model's generation_config.json recommends, or its base's where it has none; else what its GGUF file does.

    Raises CheckpointError for a value that nothing can be sampled by.
    """
    for path in (source.path, source.base_path, source.tokenizer_path):
        if path is not None:
            file = (path if path.is_dir() else path.parent) / "generation_config.json"
            if file.is_file():
                return _checked(read_json(file), file)
    return _checked(_of_gguf(source.path), source.path) if source.kind == "gguf" else {}


def checked_defaults(given: Mapping[str, Any]) -> dict[str, float]:
    """Those of RECOMMENDED that are not null. Raises InvalidRequest that names the one that is out of range."""
    found = {name: value for name, value in given.items() if name in RECOMMENDED and value is not None}
    if isinstance(top_k := found.get("top_k"), float) and top_k.is_integer():
        found["top_k"] = int(top_k)
    if found.get("top_k") == -1:
        found["top_k"] = 0
    SamplingParams(**found)
    return found


def _checked(given: Mapping[str, Any], file: Path) -> dict[str, float]:
    try:
        return checked_defaults(given)
    except InvalidRequest as error:
        raise CheckpointError(
            f"{file}: {error} Mend the file; a server can do without (--sampling-defaults openai)."
        ) from error


def _of_gguf(path: Path) -> dict[str, float]:
    from hamburger.model.checkpoints.gguf_file import open_gguf, value_of  # the library, for such files alone

    prefix = "general.sampling."
    found: dict[str, float] = {}
    for key, field in open_gguf(path).fields.items():
        if key.startswith(prefix):
            name, value = key.removeprefix(prefix), value_of(path, field)
            # What was written as .95 is not read as .949999988 of its 32 bits.
            found[_OF_GGUF.get(name, name)] = round(value, 6) if isinstance(value, float) else value
    return found
