"""The one error of training that is meant for the user."""

from __future__ import annotations


class TrainingError(ValueError):
    """Data, a recipe or an option that cannot be used; the message names it and the remedy."""
