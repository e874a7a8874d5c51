"""Which replica gets a call, beside Ray's ring, which is played here: `make test-scale` has the real one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SEATS, RING = "hamburger.server.replicas.ray_seats", "ray.serve.experimental.consistent_hash_router"


class Ring:
    """All replicas, in the order in which they are."""

    def initialize_state(self, **others: Any) -> None:
        self.replica_queue_len_cache: dict[str, int] = {}

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        return [[each] for each in candidate_replicas]


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """It keeps 8 places of each replica."""
    for name in ("ray", "ray.serve", "ray.serve.experimental", RING):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[RING], "ConsistentHashRouter", Ring, raising=False)
    router = importlib.import_module(SEATS).SeatedRouter()
    router.initialize_state(reserved=8)
    yield router
    del sys.modules[SEATS]


async def chosen(router: Any, limit: int, running: dict[str, int], session: str = "") -> list[str]:
    """Names of the replicas that a call may go to, of "a" and "b", which run so many."""
    replicas = [
        SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), max_ongoing_requests=limit) for name in "ab"
    ]
    router.replica_queue_len_cache = SimpleNamespace(get=lambda replica: running.get(replica.unique_id))
    call = SimpleNamespace(metadata=SimpleNamespace(session_id=session))
    ranks = await router.choose_replicas(replicas, call)
    return [replica.replica_id.unique_id for rank in ranks for replica in rank]


async def test_the_last_seats_are_left_free(router: Any) -> None:
    assert await chosen(router, 10, {}) == ["a", "b"]  # nothing was heard of them
    assert await chosen(router, 10, {"a": 2, "b": 1}) == ["b"]
    assert await chosen(router, 10, {"a": 2, "b": 2}) == []


@pytest.mark.parametrize("limit", [1, 8])
async def test_a_limit_below_those_leaves_one(router: Any, limit: int) -> None:
    assert await chosen(router, limit, {"a": 1, "b": 0}) == ["b"]


async def test_who_is_named_is_waited_for_unless_it_is_gone(router: Any) -> None:
    assert await chosen(router, 10, {"a": 0, "b": 0}, "@b") == ["b"]
    assert await chosen(router, 10, {"a": 0, "b": 2}, "@b") == []
    assert await chosen(router, 10, {"a": 0, "b": 0}, "@c") == ["a", "b"]
