"""FlashInfer itself, on a GPU where it is installed: its parameters are those of the fake that other tests use, and its
numbers are the reference's.
"""

from __future__ import annotations

import inspect

import pytest
import torch

import fake_flashinfer
from hamburger.model.attention import reference_attention
from hamburger.model.flashinfer_attention import FlashInferChunks
from hamburger.model.gpu.chunks import Chunk
from poisoned_caches import NAN, check, poisoned_cache
from small_models import trunk_config

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    pytest.importorskip("flashinfer", reason="the package flashinfer-python is not installed")
    return torch.device("cuda")


def test_the_fake_has_the_parameters_of_the_library(device: torch.device) -> None:
    import flashinfer

    real, fake = (m.BatchPrefillWithPagedKVCacheWrapper for m in (flashinfer, fake_flashinfer))
    for name in ("__init__", "plan", "run"):
        theirs, ours = (inspect.signature(getattr(of, name)).parameters for of in (real, fake))
        for key, parameter in ours.items():
            assert (theirs[key].kind, theirs[key].default) == (parameter.kind, parameter.default), (name, key)
        needed = [[key for key, p in of.items() if p.default is p.empty] for of in (theirs, ours)]
        assert [key for key in needed[0] if key != "args"] == needed[1], name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window"),
    [(32, 8, 64, None), (9, 3, 64, 5), (28, 4, 128, 100), (7, 1, 128, None), (8, 4, 256, None)],
)
def test_chunks(
    heads: int, kv_heads: int, head_dim: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> None:
    """Several steps behind each other, whose plans share one pinned buffer; slots that nobody has written are large."""
    torch.manual_seed(heads)
    totals = [300, 9, 1001]
    cache, blocks, table = poisoned_cache(totals, kv_heads, head_dim, dtype, device, block=32, poison=1e4)
    sliding = {} if window is None else {"sliding_window": window, "sliding_layers": (1,)}
    config = trunk_config(num_layers=2, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, **sliding)
    attention = FlashInferChunks(config, dtype, device)
    done = []
    for chunks in ([Chunk(1, 1, 9, 0), Chunk(2, 10, 300, 701)], [Chunk(0, 1, 2, 298)], [Chunk(0, 2, 300, 0)]):
        q = torch.randn(chunks[0].first_row + sum(c.queries for c in chunks), heads, head_dim, device=device).to(dtype)
        attend = attention.plan(chunks, table, 32)
        for of_layer in (None, window):
            out = torch.full_like(q, NAN)
            attend(q, cache.data[0], out, of_layer)
            done.append((chunks, q, out, of_layer))
    for chunks, q, out, of_layer in done:
        assert out[: chunks[0].first_row].isnan().all()
        for sequence, row, queries, slot in chunks:
            own = slice(row, row + queries)
            exact = reference_attention(q[own], cache, 0, blocks[sequence], slot + queries, of_layer)
            check(out[own].flatten(1), exact, dtype)
