"""One comparison of two runs of the same requests on models that differ in rounding only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from hamburger.engine.types.messages import GroupOutput


def assert_same_groups(found: Mapping[str, Sequence[GroupOutput]], wanted: Mapping[str, Sequence[GroupOutput]]) -> None:
    """The same tokens in the same groups; stop probabilities and the rivals' log-probabilities within 1e-4."""
    for name, outputs in wanted.items():
        assert [o.token_ids for o in outputs] == [o.token_ids for o in found[name]]
        for ours, theirs in zip(found[name], outputs, strict=True):
            assert ours.stop_probs == pytest.approx(theirs.stop_probs, abs=1e-4)
            for mine, other in zip(ours.logprobs or [], theirs.logprobs or [], strict=True):
                assert [p for _, p in mine.top] == pytest.approx([p for _, p in other.top], abs=1e-4)
