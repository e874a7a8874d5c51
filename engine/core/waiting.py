"""WaitingQueue: who waits for slots, and who of them is next: fair between clients. No tensors, no clock, no IO.

Who was preempted comes first, in the order of its rank. Of those that never ran, those of the lowest priority come
next, and among these the client that has been served the least, with its oldest request. Served is what was computed
for it, in prompt tokens: the virtual token counter of Sheng et al., Fairness in Serving Large Language Models
(OSDI 2024). A client that comes back is no better off than the least served of those that are there, so nobody saves
idle time up. With one client, or without keys, the order is that of arrival.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from hamburger.engine.core.sequence import Sequence

OUTPUT_COST = 2  # of an answer's token, in prompt tokens, as in the paper's experiments


class WaitingQueue:
    def __init__(self) -> None:
        self._preempted: list[Sequence] = []  # by rank
        # By priority and client; a value is the sequence's place in the order of arrival.
        self._new: dict[int, dict[str, dict[Sequence, int]]] = {}
        self._served: dict[str, float] = {}  # of each client since nobody was there
        self._num_unfinished: dict[str, int] = {}  # of each client that is there
        self._num_entered = 0
        self._next: Sequence | None = None  # as far as it is known

    def __len__(self) -> int:
        new = sum(len(sequences) for clients in self._new.values() for sequences in clients.values())
        return len(self._preempted) + new

    def __iter__(self) -> Iterator[Sequence]:
        """By priority; of each, who was preempted first, then the others by arrival."""
        new = [item for clients in self._new.values() for sequences in clients.values() for item in sequences.items()]
        by_arrival = [sequence for sequence, _ in sorted(new, key=lambda item: item[1])]
        return iter(sorted([*self._preempted, *by_arrival], key=rank))

    @property
    def head(self) -> Sequence | None:
        """Who is next."""
        if self._next is None:
            self._next = min((self._preempted[:1] + self._first_new()), key=rank, default=None)
        return self._next

    def enter(self, sequence: Sequence) -> None:
        """A request that never ran."""
        client = sequence.client
        if client not in self._num_unfinished:
            least = min((self._served[other] for other in self._num_unfinished), default=0.0)
            if not self._num_unfinished:
                self._served.clear()
            self._served[client] = max(self._served.get(client, 0.0), least)
        self._num_unfinished[client] = self._num_unfinished.get(client, 0) + 1
        self._num_entered += 1
        self._new.setdefault(sequence.priority, {}).setdefault(client, {})[sequence] = self._num_entered
        self._next = None

    def leave(self, sequence: Sequence) -> None:
        """A request that has ended, and does not wait."""
        client = sequence.client
        self._num_unfinished[client] -= 1
        if not self._num_unfinished[client]:
            del self._num_unfinished[client]

    def put_back(self, sequence: Sequence) -> None:
        """A request that was preempted."""
        insort(self._preempted, sequence, key=rank)
        self._next = None

    def remove(self, sequence: Sequence) -> None:
        """Raises ValueError or KeyError for one that does not wait."""
        self._next = None
        if sequence.scheduled_time is not None:
            self._preempted.remove(sequence)
            return
        clients = self._new[sequence.priority]
        del clients[sequence.client][sequence]
        if not clients[sequence.client]:
            del clients[sequence.client]
        if not clients:
            del self._new[sequence.priority]

    def charge(self, sequence: Sequence, cost: int) -> None:
        """What was, or will be, computed for it: prompt tokens, or tokens of its answer times OUTPUT_COST."""
        self._served[sequence.client] += cost
        self._next = None

    def served(self, client: str) -> float:
        return self._served.get(client, 0.0)

    def _first_new(self) -> list[Sequence]:
        if not self._new:
            return []
        clients = self._new[min(self._new)]
        firsts = {client: next(iter(sequences.items())) for client, sequences in clients.items()}
        client = min(firsts, key=lambda client: (self._served[client], firsts[client][1]))
        return [firsts[client][0]]


def rank(sequence: Sequence) -> tuple[int, float]:
    return sequence.rank
