"""Which contestants can be alive at once: as many as the device's memory holds, and not too many."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Capacity:
    """needs: bytes by the name of the process, estimates. free: of the device with nobody of ours on it; unknown until
    the first start, which is alone. most: processes, however small, for the host's sake."""

    needs: Mapping[str, int]
    free: float = math.inf
    most: int = 6

    def learn(self, facts: Mapping[str, Any]) -> None:
        """What a process that started alone tells: `free_bytes` of the device before it took any."""
        if (free := facts.get("free_bytes")) is not None:
            self.free = float(free)

    def too_many(self, running: Sequence[str], needed: int) -> list[str]:
        """Who must end, the first of `running` first, for a process that needs so many bytes."""
        staying = list(running)
        while staying and (len(staying) >= self.most or self._taken(staying) + needed > self.free):
            staying.pop(0)
        return list(running[: len(running) - len(staying)])

    def _taken(self, names: Sequence[str]) -> int:
        return sum(self.needs.get(name, 0) for name in names)
