"""StepCalls: the calls with the others (collectives.py) that a rank makes in a step, known ahead.

    batch ─► embedding ─► o, down of each layer ─► head ─► rows that go on ─► micro-step's ─► ... ─► scores ─► flags

A rank that makes fewer calls than the others leaves them waiting for ever. So one whose memory ends in the middle of a
step computes no more, but makes every call that is left, with zeros or weights, which the others' arithmetic survives.
The last call tells all of them whose memory that was; then rank 0 throws the step away.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hamburger.model.device.out_of_memory import out_of_memory_reason
from hamburger.model.parallel.collectives import CollectiveError, Collectives
from hamburger.model.parallel.step_shape import StepShape

NOT_ON = -1  # instead of a token: this row's group does not go on

Kind = Literal["batch", "reduce", "gather", "rows", "flags"]
Call = tuple[Kind, int]  # and the number of values


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSizes:
    """What the number of values follows from, beside a step's shape.

    head, micro_head: one rank's logits of a state. micro_context: positions that the first micro-step has beside its
    own. scored_at_once: most rows that are scored together.
    """

    hidden: int
    layers: int
    adapter_rank: int
    micro_layers: int
    micro_context: int
    head: int
    micro_head: int
    scored_at_once: int


class StepCalls:
    """One rank's. weights: some of the model's, with the dtype of states and logits.

    A call that is not the next of the step is a mistake in the model or in this file: a RuntimeError.
    """

    def __init__(self, ranks: Collectives, sizes: CallSizes, weights: Tensor) -> None:
        self._ranks, self._sizes, self._weights = ranks, sizes, weights.detach().flatten()
        device = self._device = weights.device
        self._flags = torch.zeros(ranks.size, dtype=torch.int64, device=device)  # later there may be no memory for it
        self._ahead: deque[Call] = deque()
        self._next_tokens: Tensor | None = None  # who goes on, until `go_on` is called
        self._num_emitting, self._is_first = 0, True

    @property
    def rank(self) -> int:
        return self._ranks.rank

    def begin(self, shape: StepShape) -> None:
        """Of the step that is announced."""
        s, m = self._sizes, shape.num_emitting
        layer: list[Call] = [("reduce", shape.num_slots * s.hidden)]
        if s.adapter_rank and shape.max_group_size > 1:
            layer.append(("reduce", shape.num_composed * s.adapter_rank))
        embedding: Call = ("reduce", shape.num_slots * shape.max_group_size * s.hidden)
        calls: list[Call] = [("batch", sum(shape.part_sizes)), embedding]
        calls += layer * (2 * s.layers)
        if m:
            calls.append(("gather", m * s.head))
            if shape.max_group_limit > 1:
                calls.append(("rows", m))
        for start in range(0, shape.num_scored, s.scored_at_once):
            calls.append(("gather", min(s.scored_at_once, shape.num_scored - start) * s.head))
        self._ahead = deque([*calls, ("flags", self._ranks.size)])
        self._next_tokens, self._num_emitting, self._is_first = None, m, True

    def go_on(self, num_rows: int) -> None:
        """The groups of so many rows go on, as all ranks know now: next is a micro-step, and who goes on after it."""
        self._next_tokens = None
        if not num_rows:
            return
        s, values = self._sizes, num_rows * self._sizes.hidden
        wide = values * (1 + s.micro_context if self._is_first else 1)
        layer: list[Call] = [("reduce", wide)]
        calls: list[Call] = [("reduce", values)]  # the embedding
        calls += layer * (2 * (s.micro_layers - 1))
        # The last layer computes no more than the last position.
        calls += [("reduce", values), ("reduce", values), ("gather", num_rows * s.micro_head)]
        self._ahead.extendleft(reversed([*calls, ("rows", self._num_emitting)]))
        self._is_first = False

    def share_batch(self, values: Tensor) -> Tensor:
        """Rank 0's batch, into every rank's int64 [sum of StepShape.part_sizes]."""
        self._next("batch", values)
        return self._ranks.broadcast(values)

    def share_rows(self, tokens: Tensor) -> Tensor:
        """Rank 0's tokens of all emitting rows, NOT_ON where none follows, into every rank's int64 [M]. `go_on` with
        the number of the others must follow."""
        self._next("rows", tokens)
        self._next_tokens = self._ranks.broadcast(tokens)
        return self._next_tokens

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, which may be overwritten."""
        x = x.contiguous()
        self._next("reduce", x)
        return self._ranks.all_reduce(x)

    def gather(self, x: Tensor) -> Tensor:
        """Rank 0: all ranks' x [..., k] side by side, [..., size * k]. The others get their own x back."""
        x = x.contiguous()
        parts = [] if self.rank else [torch.empty_like(x) for _ in range(self._ranks.size)]
        self._next("gather", x)
        self._ranks.gather(x, parts)
        return torch.cat(parts, dim=-1) if parts else x

    def agree(self, *, has_memory: bool = True) -> list[int]:
        """The step's last call: the ranks whose memory did not hold the step."""
        self._flags.zero_()
        self._flags[self.rank].fill_(not has_memory)
        self._next("flags", self._flags)
        flags: list[int] = self._ranks.all_reduce(self._flags).tolist()
        return [rank for rank, flag in enumerate(flags) if flag]

    def abandon(self) -> list[int]:
        """Make the calls that are left of a step, if any, and agree. The step's own tensors should be gone.

        Raises CollectiveError where there is no memory for a call's own values.
        """
        try:
            while self._ahead:
                if self._next_tokens is not None:
                    self.go_on(int((self._next_tokens != NOT_ON).sum()))
                elif self._ahead[0][0] == "flags":
                    return self.agree(has_memory=False)
                else:
                    self._make(*self._ahead[0])
            return [self.rank]
        except Exception as error:
            reason = out_of_memory_reason(error)
            if reason is None:
                raise
        raise CollectiveError(
            f"rank {self.rank} has not even memory for what the ranks exchange in a step: lower max_num_batched_slots, "
            f"max_num_seqs or kv_cache_memory. ({reason})"
        )

    def _make(self, kind: Kind, number: int) -> None:
        match kind:
            case "batch":  # never rank 0's, whose batch was there before the step: zeros would be slots to write
                self.share_batch(torch.zeros(number, dtype=torch.int64, device=self._device))
            case "rows":  # of rank 0: nobody goes on
                self.share_rows(torch.full((number,), NOT_ON, device=self._device))
            case "reduce":
                self.all_reduce(self._weights.new_zeros(number))
            case "gather":  # of logits, the largest tensors of all; nobody believes these, if they are finite
                x = self._weights[:number] if number <= len(self._weights) else self._weights.new_zeros(number)
                parts = [] if self.rank else [torch.empty_like(x)] * self._ranks.size  # upon each other
                self._next("gather", x)
                self._ranks.gather(x, parts)

    def _next(self, kind: Kind, x: Tensor) -> None:
        """A call is made now: whatever it needs is there, so it will take place."""
        expected = self._ahead[0] if self._ahead else ("nothing", 0)
        if expected != (kind, x.numel()):
            raise RuntimeError(f"a rank makes the call {(kind, x.numel())}, where {expected} was foreseen.")
        self._ahead.popleft()
