"""CpuEmission: a macro-step's groups in one call of the kernels; and CpuChoices: their tokens one after the other.

To the bit the same tokens, and those that GroupSampler chooses by the kernels' logits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from hamburger.model.batch import Adjustments, ForwardBatch, StepOutput, stop_probability
from hamburger.model.cpu.backend import CpuBackend
from hamburger.model.cpu.graft import CpuGraft
from hamburger.model.cpu.structs import ChangesStruct, EmissionStruct, pointers
from hamburger.model.emission.emission import GoOn
from hamburger.model.group_cache import GroupCache
from hamburger.model.noise import noise_keys
from hamburger.model.sampler import Choice

_NOISY_ROWS = 16  # for more, 4 bits and noise of all tokens take longer than 8 bits of all


class CpuEmission:
    """Takes batches without log-probabilities and without grammars, whose masks the host makes token by token. None in
    which rows of composed groups change their logits: those end where a token is not the likeliest without that."""

    def __init__(self, graft: CpuGraft) -> None:
        self._graft = graft

    def takes(self, batch: ForwardBatch) -> bool:
        s = batch.sampling
        return s.constraint is None and s.max_logprobs < 0 and (s.adjustments is None or not _needs_likeliest(batch))

    def emit(self, states: Tensor, features: list[Tensor], batch: ForwardBatch) -> StepOutput:
        rows, width = states.shape[0], batch.max_group_limit
        tokens = torch.zeros(rows, width, dtype=torch.int64)
        sizes = torch.empty(rows, dtype=torch.int64)
        stops = torch.full((rows, width), float("-inf")) if batch.checks is None else torch.zeros(rows, width)
        passed = _PassedBatch(batch, tokens)
        passed.give_groups(states, features, sizes, stops)
        passed.struct.clock = self._graft.kernels.clock_address()
        self._graft.emit(passed.struct)
        return StepOutput(tokens, sizes, stop_probability(stops) if batch.checks is None else stops, None)


class CpuChoices:
    """Choices (emission/narrowing.py) of a batch that a grammar follows."""

    logits: Tensor | None = None

    def __init__(self, backend: CpuBackend, batch: ForwardBatch, token_ids: Tensor) -> None:
        self._backend, self._constraint, self._drafts = backend, batch.sampling.constraint, batch.checks is not None
        self._constrained = set[int]() if self._constraint is None else set(self._constraint.rows.tolist())
        self._passed = _PassedBatch(batch, token_ids)

    @classmethod
    def begin(cls, backend: CpuBackend, batch: ForwardBatch, token_ids: Tensor) -> Self | None:
        """None where log-probabilities are asked, or what is the likeliest of the unchanged logits."""
        if batch.sampling.max_logprobs >= 0 or _needs_likeliest(batch):
            return None
        return cls(backend, batch, token_ids)

    def choose(self, states: Tensor, rows: Tensor, index: int) -> Choice:
        if self._constraint is not None:
            masked = torch.tensor([row for row in rows.tolist() if row in self._constrained], dtype=torch.int64)
            self._passed.mask(masked, self._constraint.allowed(masked))
        tokens, chances, possible = self._backend.graft.choose(self._passed.struct, index, rows, states)
        is_draft = index > 0 and self._drafts
        return Choice(tokens, torch.ones_like(possible), possible, chances if is_draft else None)

    def micro_state(self, tokens: Tensor, cache: GroupCache) -> Tensor:
        return self._backend.micro_state(tokens, cache)


def _needs_likeliest(batch: ForwardBatch) -> bool:
    return batch.checks is None and batch.max_group_limit > 1


class _PassedBatch:
    """A batch as the kernels take it, and what the struct points to."""

    def __init__(self, batch: ForwardBatch, token_ids: Tensor) -> None:
        """token_ids: int64 [M, G], the groups as they grow."""
        s = batch.sampling
        rows, width = token_ids.shape
        self._batch, self._held = batch, list[object]()
        self.struct, self._changes = EmissionStruct(rows=rows, width=width), ChangesStruct()
        self._point(self.struct, token_ids=token_ids, checks=batch.checks)
        if s.any_sampled:
            keys = noise_keys(s.seed[:, None], s.output_index[:, None] + torch.arange(width))
            self._point(self.struct, temperatures=s.temperature, keys=keys)
            # Composed groups end where a token is not the likeliest, so that has to be known as well.
            if s.any_filtered or batch.checks is None or rows > _NOISY_ROWS:
                self._point(self.struct, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p)
        if s.adjustments is not None:
            self._adjust(s.adjustments)

    def give_groups(self, states: Tensor, features: Sequence[Tensor], sizes: Tensor, stops: Tensor) -> None:
        """For whole groups: what they are made of, and where that goes which is made."""
        batch = self._batch
        limits, thresholds = batch.group_limits, batch.confidence
        if batch.checks is None:  # no end token ends a run of drafts
            ends = batch.sampling.end_ids
            go_on = GoOn(batch.confidence, batch.group_limits, ends)
            limits, thresholds, self.struct.ends = go_on.limits, go_on.thresholds, ends.shape[1]
            self._point(self.struct, end_ids=ends)
        addresses = pointers(features)
        self._held.append(addresses)
        self.struct.features = ctypes.addressof(addresses)
        self._point(self.struct, hidden=states, limits=limits, thresholds=thresholds, sizes=sizes, stops=stops)

    def mask(self, rows: Tensor, allowed: Tensor) -> None:
        """The constrained rows int64 [C], ascending, of those that choose next, and Constraint.allowed of them."""
        self.struct.changes = ctypes.addressof(self._changes)
        self._changes.masks, self._changes.words = allowed.shape
        self._point(self._changes, masked=rows, allowed=allowed)

    def _adjust(self, a: Adjustments) -> None:
        s, changes = self._batch.sampling, self._changes
        self.struct.changes = ctypes.addressof(changes)
        changes.adjustments, changes.prompts, changes.outputs = len(a.row), a.prompt_ids.shape[1], a.output_ids.shape[1]
        changes.biases, changes.ends = len(a.bias_row), s.end_ids.shape[1]
        self._point(
            changes, adjusted=a.row, prompt_ids=a.prompt_ids, output_ids=a.output_ids, presence=a.presence,
            frequency=a.frequency, repetition=a.repetition, bias_row=a.bias_row, bias_id=a.bias_id, bias=a.bias,
            min_index=a.min_index, output_index=s.output_index, end_ids=s.end_ids,
        )  # fmt: skip

    def _point(self, struct: ctypes.Structure, **tensors: Tensor | None) -> None:
        """Have fields point to tensors, which live as long as this; None leaves null."""
        for name, tensor in tensors.items():
            if tensor is not None:
                contiguous = tensor.contiguous()
                self._held.append(contiguous)
                setattr(struct, name, contiguous.data_ptr())
