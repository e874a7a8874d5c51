"""Which replica Ray Serve sends a call to: the one that its key belongs to, while that has a seat. Imports ray.

Ray counts what asks a replica for its metrics or health like any request, and would have it wait for a seat of a full
replica. So requests leave the last seats free.
"""

from __future__ import annotations

from typing import Any

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

from hamburger.server.replicas.affinity import NAMED


class SeatedRouter(ConsistentHashRouter):  # type: ignore[misc]  # ray is Any where it is not installed
    """reserved: seats of each replica (its max_ongoing_requests) that requests are not given."""

    def initialize_state(self, reserved: int, **others: Any) -> None:
        super().initialize_state(**others)
        self._reserved = reserved

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        ranks = await super().choose_replicas(candidate_replicas, pending_request)
        key = "" if pending_request is None else pending_request.metadata.session_id or ""
        if key.startswith(NAMED):  # nobody else will do, unless it is gone
            name = key.removeprefix(NAMED)
            ranks = [[each] for each in candidate_replicas if each.replica_id.unique_id == name] or ranks
        return [[replica for replica in rank if self._has_seat(replica)] for rank in ranks]

    def _has_seat(self, replica: Any) -> bool:
        # What this router has sent, or heard last; unknown after seconds without either.
        num_requests = self.replica_queue_len_cache.get(replica.replica_id)
        # A Serve configuration may set a limit of its own, which leaves nothing to reserve.
        return num_requests is None or num_requests < max(1, replica.max_ongoing_requests - self._reserved)
