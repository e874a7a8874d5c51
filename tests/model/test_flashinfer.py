"""FlashInfer behind its seam: the tables that it reads, exactly, and steps through a fake of it in plain torch."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import fake_flashinfer
from hamburger.model.assemble import assemble
from hamburger.model.attention import reference_attention
from hamburger.model.batch import ForwardBatch, empty_sampling
from hamburger.model.config import ModelConfig
from hamburger.model.execution import Execution
from hamburger.model.flashinfer_attention import FlashInferChunks, PageTable, page_table, workspace_bytes
from hamburger.model.gpu.chunks import Chunk, chunks_of
from poisoned_caches import NAN, check, poisoned_cache
from same_groups import assert_same_groups
from small_models import CPU, core_of, graft_config, params, random_tensors, run_core, trunk_config
from trunk_shapes import SHAPES as TRUNKS


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


def test_a_page_table_in_numbers() -> None:
    """Block tables of 5 columns, blocks of 4 slots. A prompt's first 7 slots; 3 slots after 9; a last block that is
    just full; one slot beyond it. Padding of the tables is in none of it."""
    chunks = [Chunk(1, 2, 7, 0), Chunk(2, 9, 3, 9), Chunk(3, 12, 2, 6), Chunk(5, 14, 2, 15)]
    assert page_table(chunks, 5, 4) == PageTable(
        row_starts=[0, 7, 10, 12, 14],
        page_starts=[0, 2, 5, 7, 12],
        places=[5, 6, 10, 11, 12, 15, 16, 25, 26, 27, 28, 29],
        last_page_slots=[3, 4, 4, 1],
        contexts=[7, 12, 8, 17],
    )


def test_a_page_table_of_one_block() -> None:
    assert page_table([Chunk(0, 0, 2, 0)], 1, 32) == PageTable([0, 2], [0, 1], [0], [2], [2])


def test_chunks_must_follow_each_other() -> None:
    with pytest.raises(ValueError, match="the chunk of sequence 3 does not begin where the one before it ends"):
        page_table([Chunk(2, 4, 5, 0), Chunk(3, 10, 2, 0)], 5, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "window"), [(4, 2, None), (3, 1, 5), (2, 2, 100)])
def test_steps_after_each_other(
    heads: int, kv_heads: int, window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer 1 slides where the model has a window, layer 0 does not. Two steps with other chunks, one plan each."""
    fake_flashinfer.install(monkeypatch)
    torch.manual_seed(heads)
    totals = [41, 9, 101]
    cache, blocks, table = poisoned_cache(totals, kv_heads, 64, dtype, CPU, block=8)
    sliding = {} if window is None else {"sliding_window": window, "sliding_layers": (1,)}
    config = trunk_config(num_layers=2, num_heads=heads, num_kv_heads=kv_heads, head_dim=64, **sliding)
    attention = FlashInferChunks(config, dtype, CPU)
    for chunks in ([Chunk(1, 1, 9, 0), Chunk(2, 10, 30, 71)], [Chunk(0, 1, 2, 39)]):
        q = torch.randn(1 + sum(chunk.queries for chunk in chunks), heads, 64).to(dtype)
        attend = attention.plan(chunks, table, 8)
        for of_layer in {None, window}:
            out = torch.full_like(q, NAN)
            attend(q, cache.data[0], out, of_layer)
            assert out[0].isnan().all()  # a row of others
            for sequence, row, queries, _ in chunks:
                own = slice(row, row + queries)
                exact = reference_attention(q[own], cache, 0, blocks[sequence], totals[sequence], of_layer)
                check(out[own].flatten(1), exact, dtype)


def test_without_the_library_its_import_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ImportError):
        FlashInferChunks(trunk_config(), torch.bfloat16, CPU)


@pytest.mark.parametrize("shape", [{}, TRUNKS["qwen2_sliding"]], ids=["full", "sliding"])
def test_whole_models_answer_as_the_plain_one(shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks beside decoding rows and groups, the rest of the step in Triton's interpreter."""
    pytest.importorskip("triton", reason="the package triton is not installed")
    fake_flashinfer.install(monkeypatch)
    planned = 0
    plan = FlashInferChunks.plan

    def counted(self: FlashInferChunks, *given: Any) -> Any:
        nonlocal planned
        planned += 1
        return plan(self, *given)

    monkeypatch.setattr(FlashInferChunks, "plan", counted)
    config = ModelConfig(trunk=trunk_config(**{"num_layers": 2, **shape}), graft=graft_config(feature_layers=(0, 1)))
    requests = {
        str(n): ([(7 * n + i) % 90 + 2 for i in range(n)], params(confidence=c, max_tokens=5, logprobs=2))
        for n, c in ((1, 0.0), (5, 0.55), (13, 1.0))
    }
    wanted, found = (
        run_core(
            core_of(
                assemble(
                    config,
                    random_tensors(config, 1),
                    dtype=torch.float32,
                    device=CPU,
                    max_positions=64,
                    how=Execution(packed=False, backend=backend),
                ),
                max_num_seqs=3,
                max_num_batched_slots=8,
                max_model_len=64,
            ),
            requests,
        )
        for backend in ("torch", "flashinfer")
    )
    assert planned >= 2
    assert_same_groups(found, wanted)


def test_the_workspace_holds_what_the_planner_may_split() -> None:
    """132 multiprocessors: 33,792 rows of tiles for each query head of a KV head."""
    small = trunk_config(num_heads=8, num_kv_heads=4, head_dim=64)
    assert workspace_bytes(small, 132) == 128 * 2**20
    large = trunk_config(num_heads=64, num_kv_heads=8, head_dim=128)
    assert workspace_bytes(large, 132) == 33_792 * 8 * 129 * 4 > 138.4e6
