"""Which model is the base: the one that writes the answers and scores them. No torch."""

from __future__ import annotations

from hamburger.model.sources import BUILTIN, EMBEDDED_NAME, embedded_gguf, resolve_source

EMBEDDED = "builtin"


def base_arguments(model: str | None, base: str | None) -> tuple[str | None, str | None]:
    """What to give as model and base to LLM, Scorer and resolve_source; None and "builtin" are the untouched base.

    Raises CheckpointError when the embedded weights are not installed.
    """
    if model in (None, EMBEDDED) and base is None:
        return str(embedded_gguf()), str(BUILTIN)
    return model, base


def base_name(model: str | None, base: str | None) -> str:
    """The name that is written into files. Raises CheckpointError when there is no such model."""
    return EMBEDDED_NAME if model in (None, EMBEDDED) else resolve_source(model, base).name
