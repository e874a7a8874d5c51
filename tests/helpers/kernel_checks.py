"""What each Triton kernel computes against plain torch, for shapes of any kind. Outputs are poisoned beforehand, and so
is every slot that must not be read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, settings
from torch import Tensor

from attention_reference import lent_slots, reference_attention
from hamburger.model.gpu.attention import attend_singles
from hamburger.model.gpu.chunk_attention import attend_chunks, chunk_tiles
from hamburger.model.gpu.layers import add_rms_norm, gated, rotate_into_cache
from hamburger.model.gpu.micro_attention import micro_attention
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.modules.rotary import RotaryEmbedding, rotate
from hamburger.model.settled_places import SettledPlaces
from poisoned_caches import NAN, check, poison_all, poisoned_cache
from small_models import trunk_config


def any_shapes(examples: int) -> settings:
    """Few, and the same each time: on a GPU each of them is compiled. So are smaller ones where one fails: none."""
    return settings(
        max_examples=examples,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )


class Heads(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    dtype: torch.dtype
    kv_dtype: torch.dtype | None = None  # None: the same

    @property
    def of_cache(self) -> torch.dtype:
        return self.kv_dtype or self.dtype


def check_singles(
    shape: Heads,
    totals: list[int],
    block: int,
    splits: int,
    device: torch.device,
    settled: list[tuple[int, int]] | None = None,
) -> None:
    """totals: contexts of one-slot rows; 0 is padding. settled: of each its first settled slot and how many there are,
    where places are lent."""
    heads, _, head_dim, window, dtype, _ = shape
    torch.manual_seed(heads)
    cache, blocks, table = lending_cache(shape, totals, block, device, settled)
    q = torch.randn(len(totals) + 2, heads, head_dim, device=device).to(dtype)
    contexts, places = torch.tensor(totals, device=device), on_device(settled, device)
    for layer in range(len(cache.data)):
        out = torch.full_like(q, NAN)
        attend_singles(q, cache.layer(layer), table, contexts, out, splits, window, places)
        assert out[len(totals) :].isnan().all()  # rows of others
        for row, (total, own) in enumerate(zip(totals, blocks, strict=True)):
            if total:
                of_row = settled[row] if settled else (0, 0)
                exact = reference_attention(q[row : row + 1], cache, layer, own, total, window, of_row)
                check(out[row].flatten(), exact[0], dtype)
            else:
                assert (out[row] == 0).all()


def check_chunks(
    shape: Heads,
    lengths: list[tuple[int, int]],
    block: int,
    device: torch.device,
    settled: list[tuple[int, int]] | None = None,
) -> None:
    """lengths: (slots before, new slots) of each sequence; the first, of one new slot, is no chunk and not attended.
    settled: as for check_singles."""
    heads, kv_heads, head_dim, window, dtype, _ = shape
    torch.manual_seed(heads)
    totals = [before + new for before, new in lengths]
    cache, blocks, table = lending_cache(shape, totals, block, device, settled)
    q = torch.randn(sum(new for _, new in lengths), heads, head_dim, device=device).to(dtype)
    chunks, row = [], 1
    for sequence, (before, new) in list(enumerate(lengths))[1:]:
        chunks.append((sequence, row, new, before))
        row += new
    tiles = torch.tensor(chunk_tiles(chunks, heads // kv_heads, dtype), device=device)
    for layer in range(len(cache.data)):
        out = torch.full_like(q, NAN)
        attend_chunks(q, cache.layer(layer), table, tiles, out, window, on_device(settled, device))
        assert out[0].isnan().all()
        for sequence, row, new, _ in chunks:
            own, of_row = slice(row, row + new), settled[sequence] if settled else (0, 0)
            exact = reference_attention(q[own], cache, layer, blocks[sequence], totals[sequence], window, of_row)
            check(out[own].flatten(1), exact, dtype)


def lending_cache(
    shape: Heads, totals: list[int], block: int, device: torch.device, settled: list[tuple[int, int]] | None
) -> tuple[PagedKVCache, list[list[int]], Tensor]:
    """As poisoned_cache. With settled slots, of three layers: in each a head lends, in two a head has lenders, in other
    layers too, and a third head's lent places, which nobody has, are poisoned."""
    if settled is None:
        return poisoned_cache(totals, shape.kv_heads, shape.head_dim, shape.of_cache, device, block)
    shares = torch.ones(3, shape.kv_heads, dtype=torch.int64)
    shares[:, :2] = torch.tensor([[0, 1], [3, 0], [0, 2]])
    shares[0, 2:] = 0
    places = SettledPlaces(shares, chunk=11, kept=5)
    found = poisoned_cache(totals, shape.kv_heads, shape.head_dim, shape.of_cache, device, block, places=places)
    cache, blocks, _ = found
    borrowed = places.lenders.flatten().tolist()
    for layer, head in places.lends.nonzero().tolist():
        if layer * shape.kv_heads + head not in borrowed:
            for own, of_row in zip(blocks, settled, strict=True):
                for slot in lent_slots(places, *of_row):
                    (cache.scales or cache.data)[layer][own[slot // block], slot % block, :, head] = NAN
    return found


def on_device(settled: list[tuple[int, int]] | None, device: torch.device) -> tuple[Tensor, Tensor] | None:
    if settled is None:
        return None
    first, number = torch.tensor(settled, device=device).unbind(1)
    return first.contiguous(), number.contiguous()


def check_rotated(shape: Heads, block: int, normed: bool, device: torch.device) -> None:
    """Five slots, two of which are padding, into three blocks."""
    heads, kv_heads, head_dim, _, dtype, _ = shape
    torch.manual_seed(heads)
    config = trunk_config(num_layers=1, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
    rotary = RotaryEmbedding(config, 64, device, dtype)
    cache = PagedKVCache(config, 3, block, shape.of_cache, device)
    poison_all(cache)
    qkv = torch.randn(5, (heads + 2 * kv_heads) * head_dim, device=device).to(dtype)
    positions = torch.tensor([0, 63, 5, 9, 10], device=device)
    # Row 1 has a slot but no context, row 2 no slot: both are padding. Rows 3 and 4 are a chunk of sequence 3.
    most = 3 * block - 1
    write = torch.tensor([most // 2, 3, -1, most, 0], device=device)
    contexts = torch.tensor([1, 0, 0, 11], device=device)
    weights = norms_of(head_dim, dtype, device) if normed else None
    q = rotate_into_cache(
        qkv, (rotary.cos, rotary.sin), positions, weights, 1e-5, cache.layer(0), write, contexts, 3, heads
    )

    by_head = qkv.float().unflatten(1, (-1, head_dim))
    q_raw, k_raw, v = by_head.split((heads, kv_heads, kv_heads), dim=1)
    if weights is not None:
        q_raw, k_raw = (
            F.rms_norm(x, (head_dim,), w.float(), 1e-5) for x, w in zip((q_raw, k_raw), weights, strict=True)
        )
    cos, sin = (table.float() for table in rotary(positions))
    check(q, rotate(q_raw, cos, sin), dtype)
    exact, written = torch.stack((rotate(k_raw, cos, sin), v), dim=1), [0, 3, 4]
    untouched = sorted(set(range(most)) - {0, most // 2})
    flat, scales = cache.data[0].flatten(0, 1), cache.scales[0].flatten(0, 1) if cache.scales else None
    if scales is None:
        check(flat[write[written]], exact[written], dtype)
        assert flat[untouched].isnan().all()
        return
    check(scales[write[written]], exact[written].abs().amax(-1) / 127, dtype)
    off = flat[write[written]] * scales[write[written]][..., None] - exact[written]
    # To the nearest code, of numbers that were rounded to dtype before.
    assert (off.abs() <= scales[write[written]][..., None] * (0.51 if dtype == torch.float32 else 1.1)).all()
    assert scales[untouched].isnan().all()
    assert (flat[untouched] == 127).all()


def norms_of(head_dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    q_weight, k_weight = torch.randn(2, head_dim, device=device).to(dtype)
    return q_weight, k_weight


def check_norm(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(size)
    x, delta = torch.randn(2, rows, 2, size, device=device).to(dtype)
    weight = torch.randn(size, device=device).to(dtype)
    total, normed = add_rms_norm(x, delta, weight, 1e-5)
    check(total, x.float() + delta.float(), dtype)
    check(normed, F.rms_norm(total.float(), (size,), weight.float(), 1e-5), dtype)
    per_feature = torch.randn(2, size, device=device).to(dtype)
    same, normed = add_rms_norm(x, None, per_feature, 1e-5)
    assert same is x
    check(normed, F.rms_norm(x.float(), (size,), eps=1e-5) * per_feature.float(), dtype)


def check_gated(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(size)
    gate_up = (3 * torch.randn(rows, 2 * size, device=device)).to(dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    check(gated(gate_up), F.silu(gate) * up, dtype)
    check(gated(gate_up, "gelu_tanh"), F.gelu(gate, approximate="tanh") * up, dtype)


def check_micro(shape: Heads, rows: int, positions: int, normed: bool, last_only: bool, device: torch.device) -> None:
    """Rows in places of a cache: some positions at once, then one more of every second row."""
    heads, kv_heads, head_dim, _, dtype, _ = shape
    torch.manual_seed(heads)
    config = trunk_config(num_layers=1, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
    rotary = RotaryEmbedding(config, 64, device, dtype)
    tables, width = (rotary.cos, rotary.sin), (heads + 2 * kv_heads) * head_dim
    weights = norms_of(head_dim, dtype, device) if normed else None
    kv = torch.full((rows, positions + 2, 2, kv_heads, head_dim), NAN, device=device, dtype=dtype)
    kept = torch.arange(0, rows, 2, device=device)
    first, later = torch.randn(rows, positions, width), torch.randn(len(kept), 1, width)
    first, later = first.to(device, dtype), later.to(device, dtype)
    places = torch.randperm(rows).to(device)
    args: dict[str, Any] = {"tables": tables, "norms": weights, "eps": 1e-5, "kv": kv, "num_heads": heads}
    begun = micro_attention(first.flatten(0, 1), rows=places, length=0, new=positions, last_only=last_only, **args)
    exact = causal_attention(first, rotary, weights, heads, kv_heads, 1 if last_only else positions)
    check(begun.unflatten(0, (rows, -1)), exact, dtype)
    on = micro_attention(later.flatten(0, 1), rows=places[kept], length=positions, new=1, last_only=False, **args)
    whole = torch.cat((first[kept], later), dim=1)
    check(on.unflatten(0, (len(kept), -1)), causal_attention(whole, rotary, weights, heads, kv_heads, 1), dtype)
    ended = places[1::2]
    assert kv[:, positions + 1].isnan().all()
    assert kv[ended, positions].isnan().all()
    assert kv[:, :positions].isfinite().all()


def causal_attention(
    qkv: Tensor,
    rotary: RotaryEmbedding,
    weights: tuple[Tensor, Tensor] | None,
    heads: int,
    kv_heads: int,
    last: int,
) -> Tensor:
    """Of the last positions of qkv [R, n, *] in float32 -> [R, last, heads * head_dim]."""
    n = qkv.shape[1]
    by_head = qkv.float().unflatten(2, (heads + 2 * kv_heads, -1))
    q, k, v = by_head.split((heads, kv_heads, kv_heads), dim=2)
    if weights is not None:
        q, k = (F.rms_norm(x, x.shape[-1:], w.float(), 1e-5) for x, w in zip((q, k), weights, strict=True))
    cos, sin = (table.float() for table in rotary(torch.arange(n, device=qkv.device)))
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    k, v = (x.repeat_interleave(heads // kv_heads, dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).flatten(2)[:, -last:]
