"""fill_in_groups(): what the rows of a step get from the step before it, number by number."""

from dataclasses import replace

import torch

from hamburger.model.batch import StepOutput
from hamburger.model.device.overlapped import OverlapLinks, StepTail, fill_in_groups
from small_models import one_sequence


def test_linked_rows_follow_the_groups_of_the_step_before() -> None:
    # Three sequences whose newest slots are at positions 4, 9 and 20 emit 2, 1 and 3 tokens.
    previous = one_sequence([[1], [2], [3]], [4, 9, 20], emit=[0, 1, 2])
    sampling = replace(previous.sampling, output_index=torch.tensor([0, 5, 11]))
    output = StepOutput(
        torch.tensor([[7, 8, 0], [9, 0, 0], [4, 5, 6]]), torch.tensor([2, 1, 3]), torch.zeros(3, 3), None
    )
    tail = StepTail(replace(previous, sampling=sampling), output, torch.tensor([30, 6, 3]))
    # The first has ended meanwhile. The third and the second go on, and a prompt of two tokens comes behind them.
    batch = one_sequence([[0], [0], [50], [51]], [0, 0, 0, 1], emit=[0, 1, 3])
    batch = replace(batch, group_limits=torch.tensor([1, 4, 2]), text_lengths=torch.tensor([1, 1, 2, 2]))
    links = OverlapLinks(torch.tensor([0, 1]), torch.tensor([0, 1]), torch.tensor([2, 1]))
    found, left = fill_in_groups(batch, torch.tensor([2, 5, 2]), links, tail, max_group=4)
    assert found.token_ids.tolist() == [[4, 5, 6], [9, 0, 0], [50, 0, 0], [51, 0, 0]]
    assert (found.group_sizes.tolist(), found.max_group_size) == ([3, 1, 1, 1], 3)
    assert found.positions.tolist() == [23, 10, 0, 1]
    assert found.text_lengths is not None
    assert found.text_lengths.tolist() == [24, 11, 2, 2]
    assert found.sampling.output_index.tolist() == [14, 6, 0]
    assert left.tolist() == [0, 5, 2]
    # The third sequence's answer is full: there is still room for the one token that nobody will see.
    assert found.group_limits.tolist() == [1, 4, 2]
    assert batch.token_ids.shape == (4, 1)  # unchanged
