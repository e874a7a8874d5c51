"""Models that read images, of which the language model alone is read: where its configuration stands, and what its
tensors are called there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from hamburger.model.checkpoints.sources import CheckpointError

# How the names of a language model begin there, by what wrote them -> how they do without images.
NAMES = {"language_model.": ""}
# How those of all else begin.
TOWERS = tuple(
    start + part for start in ("", "model.") for part in ("vision_tower.", "multi_modal_projector.", "visual.")
)


def text_config(
    kinds: Mapping[str, str],
    *,
    tied: bool | None = None,
    is_flat: bool = False,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> Callable[[Mapping[str, Any], str], Mapping[str, Any]]:
    """What reads the text_config of a model with images as a configuration of its own.

    kinds: its model_type -> the kind it is read as, the first where it says none. tied: where nothing stands beside it;
    None: as it says itself. is_flat: whether older ones have its fields beside the others. defaults: what it leaves
    out.
    """

    def read(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        text = config.get("text_config")
        whole = config.get("model_type")
        if text is None and is_flat:
            text = {**config, "model_type": next(iter(kinds))}
        if not isinstance(text, dict):
            raise CheckpointError(f"{where}: text_config, the language model of a {whole}, is missing.")
        named = text.get("model_type", next(iter(kinds)))
        if named not in tuple(kinds):  # it may be a list
            raise CheckpointError(
                f"{where}: text_config is of a {named!r}; of {whole} are supported: {', '.join(kinds)}."
            )
        is_tied = config.get("tie_word_embeddings")
        if is_tied is None:
            is_tied = text.get("tie_word_embeddings", False) if tied is None else tied
        beside = {
            "model_type": kinds[named],
            "eos_token_id": config.get("eos_token_id") or text.get("eos_token_id"),
            "tie_word_embeddings": is_tied,
        }
        if config.get("quantization_config"):
            beside["quantization_config"] = config["quantization_config"]
        return _without_sections({**defaults, **text, **beside})

    return read


def _without_sections(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without what Qwen says of images' positions: a text's are the same in all sections."""
    changes: dict[str, Any] = {}
    for field in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := config.get(field), dict):
            changes[field] = {
                name: "default" if value == "mrope" else value
                for name, value in rope.items()
                if name not in ("mrope_section", "mrope_interleaved")
            }
    return {**config, **changes}
