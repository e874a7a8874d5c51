"""Of a test's many cases, those that `make test` runs. The others are marked slow: `make test-all` runs them too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(quick: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """What pytest.mark.parametrize takes: all cases, in their order, and all but the quick ones slow."""
    found, wanted = list(cases), list(quick)
    if lost := [case for case in wanted if case not in found]:
        raise ValueError(f"no such cases: {lost}")
    return [case if case in wanted else slow(*(case if type(case) is tuple else (case,))) for case in found]


def slow(*values: Any) -> Any:
    """One slow case."""
    return pytest.param(*values, marks=pytest.mark.slow)
