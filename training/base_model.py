"""Which model is the base: the one that writes the answers and scores them. No torch."""

from __future__ import annotations

from hamburger.model.checkpoints.sources import EMBEDDED_BASE


def base_arguments(model: str | None, base: str | None) -> tuple[str | None, str | None]:
    """What to give as model and base to LLM, Scorer and resolve_source: unless named, the embedded base."""
    return (EMBEDDED_BASE if model is None and base is None else model), base
