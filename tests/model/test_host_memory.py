"""Large pieces of host memory (model/device/host_memory.py)."""

from __future__ import annotations

import mmap

import pytest
import torch

from hamburger.model.device.host_memory import Arena, zeroed
from hamburger.model.kv_cache import PagedKVCache
from small_models import CPU, trunk_config


def test_zeros_of_any_size_that_can_be_written() -> None:
    for size in (0, 1, 4097, 3 << 20):
        memory = zeroed(size)
        assert memory.shape == (size,)
        assert not memory.any()
        memory.fill_(7)
        assert int(memory.sum(dtype=torch.int64)) == 7 * size


def test_what_cannot_be_had_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="bytes of memory cannot be had"):
        zeroed(1 << 60)


def test_a_system_without_large_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", -1, raising=False)  # which no kernel knows
    assert len(zeroed(1 << 22)) == 1 << 22
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert len(zeroed(1 << 22)) == 1 << 22


def test_large_pages_are_asked_for_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[int] = []

    class Asked(mmap.mmap):
        def madvise(self, option: int, *place: int) -> None:
            advised.append(option)

    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 14, raising=False)
    monkeypatch.setattr(mmap, "mmap", Asked)
    assert not zeroed(100, large_pages=False).any()
    assert advised == []
    assert not zeroed(100).any()
    assert advised == [14]
    config = trunk_config()
    PagedKVCache(config, 4, 8, torch.int8, CPU)
    assert advised == [14] * 2  # of its codes, not of its scales


def test_pieces_of_an_arena_are_apart_and_outlive_it() -> None:
    arena, sizes = Arena(), [100, 1, 0, 64, (16 << 20) + 5, 1000]
    pieces = [arena.take(size) for size in sizes]
    del arena
    assert [len(piece) for piece in pieces] == sizes
    assert all(piece.data_ptr() % 64 == 0 for piece in pieces if len(piece))
    for number, piece in enumerate(pieces):
        piece.fill_(number)
    assert all(bool((piece == number).all()) for number, piece in enumerate(pieces))
