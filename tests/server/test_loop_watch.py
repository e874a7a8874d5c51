"""What holds the event loop up is measured."""

from __future__ import annotations

import asyncio
import math
import time

import pytest

from hamburger.server.operation.loop_watch import watch_loop
from hamburger.server.operation.metrics import ServerMetrics


async def test_a_blocked_loop_is_told() -> None:
    metrics, seen = ServerMetrics("m"), list[float]()

    def observe(seconds: float) -> None:
        seen.append(seconds)
        metrics.on_loop_lag(seconds)

    watch = asyncio.create_task(watch_loop(observe))
    await asyncio.sleep(0.15)
    time.sleep(0.6)  # noqa: ASYNC251 - the fault itself
    await asyncio.sleep(0.15)
    watch.cancel()
    assert max(seen) > 0.4
    late = seen[seen.index(max(seen)) :][: math.ceil(max(seen) / 0.1)]
    assert late == pytest.approx([max(seen) - 0.1 * i for i in range(len(late))])
    assert len(late) >= 4  # each that would have been woken meanwhile
    assert min(seen) >= 0
    told = metrics.render().decode()
    assert 'hamburger_event_loop_lag_seconds_count{engine="0",model_name="m"}' in told
