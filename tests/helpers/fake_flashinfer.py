"""The part of flashinfer-python 0.7 that we call, in plain torch: the same parameters, and the conditions that its
documentation puts on them. test_flashinfer_gpu.py compares its parameters and numbers with the library's.
"""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor


class BatchPrefillWithPagedKVCacheWrapper:
    """Causal attention of the queries of n sequences, each over the pages that it has in a paged cache (layout NHD)."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"
        self._planned = False

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        window_left: int = -1,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        seq_lens: Tensor | None = None,
    ) -> None:
        n = len(qo_indptr) - 1
        for numbers in (qo_indptr, paged_kv_indptr, paged_kv_last_page_len, seq_lens):
            assert numbers is not None
            assert (numbers.dtype, numbers.device.type, numbers.dim()) == (torch.int32, "cpu", 1)
        assert (paged_kv_indices.dtype, paged_kv_indices.dim()) == (torch.int32, 1)
        assert qo_indptr[0] == paged_kv_indptr[0] == 0
        assert len(paged_kv_indptr) == n + 1
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        assert len(paged_kv_last_page_len) == n
        assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
        lengths = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
        assert seq_lens is not None
        assert lengths.tolist() == seq_lens.tolist()
        assert (qo_indptr.diff() <= lengths).all()
        assert causal
        assert num_qo_heads % num_kv_heads == 0
        self._rows, self._pages, self._indices = qo_indptr.tolist(), paged_kv_indptr.tolist(), paged_kv_indices.clone()
        self._lengths, self._window_left = lengths.tolist(), window_left
        self._heads, self._kv_heads, self._head_dim, self._page = num_qo_heads, num_kv_heads, head_dim_qk, page_size
        self._q_dtype, self._kv_dtype = q_data_type, kv_data_type
        self._planned = True

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor | None = None) -> Tensor:
        assert self._planned, "plan() comes first"
        keys, values = paged_kv_cache
        assert out is not None
        assert q.shape == out.shape == (self._rows[-1], self._heads, self._head_dim)
        assert keys.shape == values.shape == (len(keys), self._page, self._kv_heads, self._head_dim)
        assert keys.stride() == values.stride(), "its kernels for Hopper take no other"
        assert (q.dtype, keys.dtype, out.dtype) == (self._q_dtype, self._kv_dtype, self._q_dtype)
        assert keys.stride(-1) == q.stride(-1) == out.stride(-1) == 1
        per_kv = self._heads // self._kv_heads
        for i, length in enumerate(self._lengths):
            first, last = self._rows[i : i + 2]
            pages = self._indices[self._pages[i] : self._pages[i + 1]].long()
            k, v = (x[pages].flatten(0, 1)[:length].float().repeat_interleave(per_kv, dim=1) for x in (keys, values))
            scores = torch.einsum("nhd,lhd->hnl", q[first:last].float(), k) * self._head_dim**-0.5
            own = torch.arange(length - (last - first), length, device=q.device)[:, None]
            slots = torch.arange(length, device=q.device)
            hidden = slots > own
            if self._window_left >= 0:
                hidden |= slots < own - self._window_left
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[first:last] = torch.einsum("hnl,lhd->nhd", weights, v).to(out.dtype)
        return out


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """`import flashinfer` gives the fake, for this test."""
    module = ModuleType("flashinfer")
    vars(module)["BatchPrefillWithPagedKVCacheWrapper"] = BatchPrefillWithPagedKVCacheWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
