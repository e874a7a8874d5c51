"""Examples -> packed training batches: slots to run, and what each of them must foresee."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from hamburger.training.errors import TrainingError
from hamburger.training.forward.composed_states import Uncomposed, from_first_composed
from hamburger.training.forward.network import Slots

NO_TARGET = -100
_TOKENS_A_PASS = 2048


class Example(Protocol):
    """One conversation of N tokens, R of them of answers. corpus.dataset.Example is one.

    token_ids: int32 [N]. response: bool [N], the tokens that are trained. group_sizes: uint8 [N], at a slot's first
    token its size, else 0. top_ids int32 [R, k] and top_logprobs float16 [R, k]: the base's, or None. states: bfloat16
    [R, F, D], the frozen trunk's feature states that give each of those tokens, or None.
    """

    @property
    def token_ids(self) -> Tensor: ...
    @property
    def response(self) -> Tensor: ...
    @property
    def group_sizes(self) -> Tensor: ...
    @property
    def top_ids(self) -> Tensor | None: ...
    @property
    def top_logprobs(self) -> Tensor | None: ...
    @property
    def states(self) -> Tensor | None: ...


AnyExample = TypeVar("AnyExample", bound=Example)


@dataclass(frozen=True, slots=True, eq=False)
class TrainBatch:
    """Packed slots, and M rows: the slots after which an answer goes on.

    emit: int64 [M], into the slots. targets: int64 [M, W], the next W tokens of the answer, NO_TARGET beyond its end.
    next_sizes: int64 [M], how many of them the data's next group holds.
    teacher_ids: int64 [M, W, k] and teacher_logprobs: float32 [M, W, k], the base's likeliest ids for each target
        (probability 0 where there is no target), or None.
    states: [M, F, D], what the trunk gives for these rows, where it was computed beforehand; else None.
    uncomposed: the same text, each token its own slot, for a trunk that must keep to the base's states; else None.
    """

    slots: Slots
    emit: Tensor
    targets: Tensor
    next_sizes: Tensor
    teacher_ids: Tensor | None
    teacher_logprobs: Tensor | None
    states: Tensor | None = None
    uncomposed: Uncomposed | None = None

    def to(self, device: torch.device) -> TrainBatch:
        ids, logprobs, states = self.teacher_ids, self.teacher_logprobs, self.states
        return TrainBatch(
            self.slots.to(device),
            self.emit.to(device),
            self.targets.to(device),
            self.next_sizes.to(device),
            None if ids is None else ids.to(device),
            None if logprobs is None else logprobs.to(device),
            None if states is None else states.to(device),
            None if self.uncomposed is None else self.uncomposed.to(device),
        )


def collate(examples: Sequence[Example], max_group: int, groups: Sequence[Tensor] | None = None) -> TrainBatch:
    """Pack examples one after the other; `groups` (as Example.group_sizes) replaces their own group sizes."""
    return _collate(examples, max_group, [e.group_sizes for e in examples] if groups is None else groups)


def collate_with_base(examples: Sequence[Example], max_group: int, groups: Sequence[Tensor]) -> TrainBatch:
    """The batch of `collate`, with `uncomposed`, and only the rows from each example's first composed slot on (all rows
    where no slot is composed)."""
    batch = _collate(examples, max_group, groups)
    uncomposed = _collate(examples, max_group, [torch.ones_like(e.group_sizes) for e in examples]).slots
    uncomposed = replace(uncomposed, token_ids=uncomposed.token_ids[:, :1])
    slots, each = batch.slots, torch.tensor(batch.slots.lengths)
    starts = torch.tensor([0, *uncomposed.lengths[:-1]]).cumsum(0).repeat_interleave(each)
    batch = replace(batch, uncomposed=Uncomposed(uncomposed, starts + slots.positions))
    kept = from_first_composed(slots)[batch.emit].nonzero().squeeze(-1)
    if not len(kept):
        return batch
    ids, logprobs = batch.teacher_ids, batch.teacher_logprobs
    return replace(
        batch,
        emit=batch.emit[kept],
        targets=batch.targets[kept],
        next_sizes=batch.next_sizes[kept],
        teacher_ids=None if ids is None else ids[kept],
        teacher_logprobs=None if logprobs is None else logprobs[kept],
    )


def collate_states(examples: Sequence[Example], max_group: int) -> TrainBatch:
    """Pack examples that hold the trunk's states, every token its own slot: the trunk need not run.

    Raises TrainingError for an example without states.
    """
    states = [e.states for e in examples]
    known = [s for s in states if s is not None]
    if len(known) < len(states):
        raise TrainingError("the data set holds no trunk states: make it with `hamburger segment --states`.")
    batch = _collate(examples, max_group, [torch.ones_like(e.group_sizes) for e in examples])
    return replace(batch, states=torch.cat(known))


def passes(examples: Iterable[AnyExample], max_tokens: float = math.inf) -> Iterator[list[AnyExample]]:
    """Examples, in order, as many as run at once without gradients, until they have `max_tokens` trained tokens."""
    pack: list[AnyExample] = []
    room = _TOKENS_A_PASS
    for example in examples:
        if max_tokens <= 0:
            break
        if pack and len(example.token_ids) > room:
            yield pack
            pack, room = [], _TOKENS_A_PASS
        pack.append(example)
        room -= len(example.token_ids)
        max_tokens -= int(example.response.sum())
    if pack:
        yield pack


def _collate(examples: Sequence[Example], max_group: int, groups: Sequence[Tensor]) -> TrainBatch:
    parts = [_lay_out(e, g.numpy(), max_group) for e, g in zip(examples, groups, strict=True)]
    offsets = np.cumsum([0] + [len(p.sizes) for p in parts[:-1]])
    teachers = [p.teacher for p in parts]
    known = all(t is not None for t in teachers)
    return TrainBatch(
        Slots(
            torch.from_numpy(np.concatenate([p.token_ids for p in parts])),
            torch.from_numpy(np.concatenate([p.sizes for p in parts])),
            torch.from_numpy(np.concatenate([p.positions for p in parts])),
            [len(p.sizes) for p in parts],
        ),
        torch.from_numpy(np.concatenate([p.emit + o for p, o in zip(parts, offsets, strict=True)])),
        torch.from_numpy(np.concatenate([p.targets for p in parts])),
        torch.from_numpy(np.concatenate([p.next_sizes for p in parts])),
        torch.cat([t[0] for t in teachers if t is not None]) if known else None,
        torch.cat([t[1] for t in teachers if t is not None]) if known else None,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    token_ids: np.ndarray
    sizes: np.ndarray
    positions: np.ndarray
    emit: np.ndarray
    targets: np.ndarray
    next_sizes: np.ndarray
    teacher: tuple[Tensor, Tensor] | None


def _lay_out(example: Example, group_sizes: np.ndarray, width: int) -> _Layout:
    ids, response = example.token_ids.numpy().astype(np.int64), example.response.numpy()
    n = len(ids)
    first = np.flatnonzero(group_sizes)
    sizes = group_sizes[first].astype(np.int64)
    last = first + sizes - 1
    # One slot behind the end, so that looking ahead needs no bounds.
    padded_ids, padded_response = np.append(ids, 0), np.append(response, False)
    inside = np.arange(width) < sizes[:, None]
    tokens = np.where(inside, padded_ids[np.minimum(first[:, None] + np.arange(width), n)], 0)
    emit = np.flatnonzero(padded_response[last + 1])
    ahead = np.minimum(last[emit, None] + 1 + np.arange(width), n)
    valid = np.logical_and.accumulate(padded_response[ahead], axis=1)
    targets = np.where(valid, padded_ids[ahead], NO_TARGET)
    next_sizes = np.append(group_sizes, 0)[last[emit] + 1].astype(np.int64)
    teacher = None
    if example.top_ids is not None and example.top_logprobs is not None:
        rank = np.append(np.cumsum(response) - 1, 0)[ahead] * valid
        index, seen = torch.from_numpy(rank), torch.from_numpy(valid)[..., None]
        logprobs = example.top_logprobs[index].float().masked_fill(~seen, float("-inf"))
        teacher = example.top_ids[index].long(), logprobs
    return _Layout(tokens, sizes, last, emit, targets, next_sizes, teacher)
