"""Packing: what each slot holds, and what it must foresee."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples import MadeExample, example, random_example
from hamburger.training.batches.batches import NO_TARGET, collate, collate_states
from hamburger.training.errors import TrainingError

NO = NO_TARGET


def test_a_conversation_of_two_turns_slot_by_slot() -> None:
    batch = collate([example([([10, 11], [[12, 13], [14]]), ([20], [[21, 22, 23]])])], max_group=3)
    assert batch.slots.token_ids.tolist() == [
        [10, 0, 0],
        [11, 0, 0],
        [12, 13, 0],
        [14, 0, 0],
        [20, 0, 0],
        [21, 22, 23],
    ]
    assert batch.slots.group_sizes.tolist() == [1, 1, 2, 1, 1, 3]
    assert batch.slots.positions.tolist() == [0, 1, 3, 4, 5, 8]
    # The slot of [14] ends its turn and the last slot the conversation: neither foresees anything.
    assert batch.emit.tolist() == [1, 2, 4]
    assert batch.targets.tolist() == [[12, 13, 14], [14, NO, NO], [21, 22, 23]]
    assert batch.next_sizes.tolist() == [2, 1, 3]
    assert batch.teacher_ids is None


def test_examples_follow_each_other_and_the_teacher_is_that_of_the_target() -> None:
    made = [random_example(seed, teacher_k=3) for seed in range(4)]
    batch = collate(made, max_group=4)
    assert batch.slots.lengths == [int((e.group_sizes > 0).sum()) for e in made]
    assert batch.teacher_ids is not None
    assert batch.teacher_logprobs is not None
    alone = [collate([e], max_group=4) for e in made]
    assert torch.equal(batch.targets, torch.cat([b.targets for b in alone]))
    first = made[0]
    assert first.top_ids is not None
    assert torch.equal(batch.teacher_ids[0, 0], first.top_ids[0].long())
    assert torch.equal(batch.teacher_logprobs.isinf().all(-1), batch.targets == NO)


@given(st.integers(0, 10_000), st.integers(2, 5))
def test_every_answer_token_is_foreseen_once_by_the_slot_before_its_group(seed: int, max_group: int) -> None:
    made = random_example(seed, max_group=max_group)
    batch = collate([made], max_group)
    inside = torch.arange(max_group) < batch.next_sizes[:, None]
    assert batch.targets[inside].tolist() == made.token_ids[made.response].tolist()
    assert sum(batch.slots.group_sizes.tolist()) == len(made.token_ids)
    assert batch.slots.positions[-1] == len(made.token_ids) - 1


def test_other_groups_than_the_examples_own() -> None:
    made = example([([10], [[11, 12], [13]])])
    batch = collate([made], 4, groups=[torch.tensor([1, 1, 1, 1], dtype=torch.uint8)])
    assert batch.slots.token_ids[:, 0].tolist() == [10, 11, 12, 13]
    assert batch.targets.tolist() == [[11, 12, 13, NO], [12, 13, NO, NO], [13, NO, NO, NO]]


def test_stored_states_stand_in_for_the_trunk_one_row_an_answer_token() -> None:
    made = random_example(3)
    rows = int(made.response.sum())
    held = MadeExample(made.token_ids, made.response, made.group_sizes, states=torch.randn(rows, 2, 8))
    batch = collate_states([held, held], 4)
    assert batch.states is not None
    assert len(batch.states) == len(batch.targets) == 2 * rows
    with pytest.raises(TrainingError, match="--states"):
        collate_states([held, made], 4)
