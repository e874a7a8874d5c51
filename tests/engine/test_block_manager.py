"""BlockManager: exact block ids, and an integrity check that can fail."""

from __future__ import annotations

import pytest

from hamburger.engine.core.block_manager import BlockManager
from hamburger.engine.core.sequence import Sequence
from hamburger.engine.types.messages import SubmitRequest
from hamburger.engine.types.sampling_params import SamplingParams


def sequence(name: str, num_prompt_tokens: int = 100) -> Sequence:
    return Sequence(SubmitRequest(name, [1] * num_prompt_tokens, SamplingParams(), 0.0), (), 1000)


def test_exact_block_ids() -> None:
    blocks = BlockManager(num_blocks=6, block_size=4)
    a, b, c = sequence("a"), sequence("b"), sequence("c")
    assert blocks.grow(a, 5)
    assert blocks.grow(b, 4)
    assert (a.block_ids, b.block_ids) == ([0, 1], [2])
    assert blocks.grow(a, 8)  # fits what it has
    assert a.block_ids == [0, 1]
    assert blocks.grow(a, 9)
    assert a.block_ids == [0, 1, 3]
    blocks.free(b)
    assert blocks.grow(c, 12)  # the lowest-numbered free ones
    assert c.block_ids == [2, 4, 5]
    assert blocks.num_free_blocks == 0
    blocks.free(c)
    blocks.free(a)
    assert blocks.grow(b, 24)
    assert b.block_ids == [0, 1, 2, 3, 4, 5]
    blocks.check_integrity()


def test_growing_is_all_or_nothing() -> None:
    blocks = BlockManager(num_blocks=3, block_size=4)
    a, b = sequence("a"), sequence("b")
    assert blocks.grow(a, 4)
    assert not blocks.grow(b, 12)
    assert b.block_ids == []
    assert blocks.grow(b, 8)
    assert not blocks.grow(a, 5)
    assert (a.block_ids, blocks.used_slots) == ([0], 12)
    blocks.check_integrity()


def test_freeing_twice_frees_once() -> None:
    blocks = BlockManager(num_blocks=2, block_size=4)
    a = sequence("a")
    blocks.grow(a, 8)
    blocks.free(a)
    blocks.free(a)
    assert (blocks.num_free_blocks, blocks.used_slots, a.block_ids) == (2, 0, [])
    blocks.check_integrity()


@pytest.mark.parametrize("damage", ["leak", "double use", "overfull", "hoard"])
def test_integrity_check_finds_damage(damage: str) -> None:
    blocks = BlockManager(num_blocks=4, block_size=4)
    a, b = sequence("a", 6), sequence("b", 4)
    blocks.grow(a, 6)
    blocks.grow(b, 4)
    blocks.check_integrity()
    if damage == "leak":
        a.block_ids.pop()
    elif damage == "double use":
        b.block_ids[0] = a.block_ids[0]
    elif damage == "overfull":
        a.num_computed_slots = 9
    else:
        blocks.grow(b, 8)
    with pytest.raises(RuntimeError):
        blocks.check_integrity()
