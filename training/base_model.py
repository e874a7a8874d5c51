"""Which model is the base: the one that writes the answers and scores them. No torch."""

from __future__ import annotations

from pathlib import Path

from hamburger.model.checkpoints.sources import (
    BUILTIN,
    EMBEDDED_BASE,
    EMBEDDED_BASE_NAME,
    ModelSource,
    folder_name,
)


def base_arguments(model: str | None, base: str | None) -> tuple[str | None, str | None]:
    """What to give as model and base to LLM, Scorer and resolve_source: unless named, the embedded base."""
    return (EMBEDDED_BASE if model is None and base is None else model), base


def referenced_name(source: ModelSource) -> str | None:
    """What the base is called that a HAMburger folder refers to; None where it holds its own trunk."""
    if source.base_path is None:
        return None
    return EMBEDDED_BASE_NAME if source.base_path == BUILTIN else folder_name(str(source.base_path))


def other_scorer(data: Path, scored_by: str, base: str | None) -> list[str]:
    """A line to show where another model seems to have scored a data set. base: None where it is not known.

    A folder may be called otherwise elsewhere, so a name proves nothing.
    """
    if base is None or scored_by == base:
        return []
    return [
        f"warning: {data} was scored by {scored_by}, and the base is {base}: if they are not the same model, segment "
        "the data with the base."
    ]
