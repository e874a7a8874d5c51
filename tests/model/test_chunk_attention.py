"""The seam for attention of prompts' chunks: which chunks a batch has."""

from __future__ import annotations

import pytest
import torch

from hamburger.model.batch import ForwardBatch, empty_sampling
from hamburger.model.gpu.chunks import Chunk, chunks_of
from small_models import CPU


def batch_of(queries: list[int], contexts: list[int] | None) -> ForwardBatch:
    """Only what the seam reads of a batch means anything."""
    rows, n = sum(queries), len(queries)
    ids = torch.arange(rows)
    return ForwardBatch(
        token_ids=ids[:, None],
        group_sizes=torch.ones_like(ids),
        max_group_size=1,
        positions=ids,
        write_slots=ids,
        block_tables=torch.zeros(n, 1, dtype=torch.int64),
        context_slots=torch.tensor(queries),
        query_slots=queries,
        context_slots_host=contexts,
        num_single=sum(q == 1 for q in queries),
        emit=ids[:1],
        confidence=torch.ones(1),
        group_limits=torch.ones(1, dtype=torch.int64),
        max_group_limit=1,
        sampling=empty_sampling(1, CPU),
    )


def test_chunks_come_behind_the_one_slot_rows() -> None:
    assert chunks_of(batch_of([1, 1, 5, 3], [9, 1, 5, 40])) == [Chunk(2, 2, 5, 0), Chunk(3, 7, 3, 37)]
    assert chunks_of(batch_of([1, 1], [9, 1])) == chunks_of(batch_of([1, 1], None)) == []
    with pytest.raises(ValueError, match="one-slot rows alone"):
        chunks_of(batch_of([1, 2], None))
