"""Plays requests on a core of any kind to their end, with its integrity checked after every step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hamburger.engine.core.core import EngineCore
from hamburger.engine.types.messages import GroupOutput, SubmitRequest


@dataclass
class Played:
    """outputs: by request id, in order. seen: steps, preemptions, cache_queries, and failures by their kind."""

    outputs: dict[str, list[GroupOutput]] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)

    @property
    def groups(self) -> dict[str, list[list[int]]]:
        return {name: [output.token_ids for output in outputs] for name, outputs in self.outputs.items()}

    @property
    def tokens(self) -> dict[str, list[int]]:
        return {name: [token for group in groups for token in group] for name, groups in self.groups.items()}

    @property
    def ended(self) -> set[str]:
        """Ids of the requests that were told how they ended."""
        return {name for name, outputs in self.outputs.items() if outputs[-1].finish_reason is not None}


def play(core: EngineCore, asked: list[SubmitRequest], at_once: int = 2, every: int = 1) -> Played:
    """`at_once` of them arrive each `every` steps, so that batches grow and shrink."""
    played = Played()
    waiting = list(asked)
    while waiting or core.has_work:
        if played.seen["steps"] % every == 0:
            for request in waiting[:at_once]:
                core.add(request)
            del waiting[:at_once]
        step = core.step()
        core.check_integrity()
        assert step.stats is not None
        played.seen.update(steps=1, preemptions=step.stats.num_preemptions, cache_queries=step.stats.cache_queries)
        played.seen.update(failure.kind for failure in step.failures)
        for output in step.outputs:
            played.outputs.setdefault(output.request_id, []).append(output)
    return played
