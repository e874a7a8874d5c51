"""The one error of `hamburger eval-tasks` for input that cannot be used: it names the field and the remedy."""

from __future__ import annotations


class EvalError(ValueError):
    """A file, a field or an option of an evaluation that cannot be used."""
