"""What a macro-step takes from the one before it on the device: the groups that the host has not seen yet.

    step k       emits rows   0  1  2  3        sizes, tokens, positions: tensors that are still being computed
                              │  x  │  │        x: ended, or cannot go on without the host
    step k + 1   slots        0     1  2  | 3 4 5 ...     linked slots | slots whose tokens the host knows

All of it is gathering and adding: nothing waits for a number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hamburger.model.batch import ForwardBatch, StepOutput


@dataclass(frozen=True, slots=True, eq=False)
class StepTail:
    """Where the M emitting rows of a step stand after it, whatever they emitted.

    tokens_left: int64 [M], most tokens that each row could still emit before this step.
    """

    batch: ForwardBatch
    output: StepOutput
    tokens_left: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class OverlapLinks:
    """The C rows whose newest group the previous step emits; each of them brings that slot alone, and emits.

    slots: int64 [C], index in T. rows: int64 [C], index in the batch's own emitting rows. sources: int64 [C], index in
    the emitting rows of the step before.
    """

    slots: Tensor
    rows: Tensor
    sources: Tensor


@torch.inference_mode()
def fill_in_groups(
    batch: ForwardBatch, tokens_left: Tensor, links: OverlapLinks, previous: StepTail, max_group: int
) -> tuple[ForwardBatch, Tensor]:
    """The batch and its tokens_left [M], with the numbers of linked rows filled in from the step before them.

    What the host filled in for those rows is ignored, but for max_group_limit, which must not be below what their
    limits can be.
    """
    slots, rows, sources = links.slots, links.rows, links.sources
    output = previous.output
    sizes, tokens = output.group_sizes[sources], output.token_ids[sources]
    positions = previous.batch.positions[previous.batch.emit[sources]] + sizes
    left = previous.tokens_left[sources] - sizes
    width = max(batch.max_group_size, tokens.shape[1])
    token_ids = tokens.new_zeros(len(batch.token_ids), width)
    token_ids[:, : batch.max_group_size] = batch.token_ids
    token_ids[slots, : tokens.shape[1]] = tokens
    sampling = batch.sampling
    output_index = previous.batch.sampling.output_index[sources] + sizes
    text_lengths = batch.text_lengths
    if text_lengths is not None:
        text_lengths = text_lengths.index_copy(0, slots, positions + 1)
    following = replace(
        batch,
        token_ids=token_ids,
        group_sizes=batch.group_sizes.index_copy(0, slots, sizes),
        max_group_size=width,
        positions=batch.positions.index_copy(0, slots, positions),
        # A row that has ended has nothing left. What it emits is nobody's, but there must be room for it.
        group_limits=batch.group_limits.index_copy(0, rows, left.clamp(1, max_group)),
        sampling=replace(sampling, output_index=sampling.output_index.index_copy(0, rows, output_index)),
        text_lengths=text_lengths,
    )
    return following, tokens_left.index_copy(0, rows, left)
