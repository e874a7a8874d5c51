"""Places in settled slots that KV heads lend each other: who has which, and attention over them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attention_reference import reference_attention
from hamburger.model.batch import ForwardBatch, Reads, empty_sampling
from hamburger.model.checkpoints.settle_probe import equal_shares
from hamburger.model.config import ModelConfig
from hamburger.model.cpu.library import InstructionSet, load_kernels
from hamburger.model.cpu.slot_choice import CpuSlotChoice
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.modules.attention import PagedAttention
from hamburger.model.modules.rotary import RotaryEmbedding
from hamburger.model.settled_places import SettledPlaces
from hamburger.model.slot_choice import SlotChoice
from native_models import SETS, WIDE, models
from poisoned_caches import NAN
from small_models import CPU, trunk_config

CHUNK, KEPT, BLOCK = 16, 4, 8
# Of two layers and two KV heads: one borrows of two in the other layer; two lend to each other's neighbours.
SHARES = {"two lenders": [[3, 1], [0, 0]], "one each": [[2, 0], [0, 2]]}


@given(st.data())
def test_each_token_that_stays_has_one_place_of_its_own(data: st.DataObject) -> None:
    layers, heads = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    chunk = data.draw(st.integers(2, 70))
    kept = data.draw(st.integers(1, chunk - 1))
    drawn = data.draw(st.lists(st.integers(0, 4), min_size=layers * heads, max_size=layers * heads))
    shares = torch.tensor(drawn).view(layers, heads)
    if (shares - 1).clamp(min=0).sum() > (shares == 0).sum():
        with pytest.raises(ValueError, match="heads lend their places, which are fewer than the others borrow"):
            SettledPlaces(shares, chunk, kept)
        return
    places = SettledPlaces(shares, chunk, kept)
    assert 0 <= places.lent < kept
    assert int(places.numbers.max()) <= chunk
    stay = torch.zeros(layers, chunk, heads, dtype=torch.bool)
    for layer in range(layers):
        for head in range(heads):
            draw = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
            stay[layer, torch.randperm(chunk, generator=draw)[: int(places.numbers[layer, head])], head] = True
    sources = places.sources(stay)
    assert sources.shape == (layers, kept, heads)
    for layer in range(layers):
        for head in range(heads):
            lends, number = bool(places.lends[layer, head]), layer * heads + head
            own = kept - places.lent if lends else kept
            found = sources[layer, :own, head].tolist()
            for lender in places.lenders[layer, head].tolist():
                if lender >= 0:
                    assert shares.flatten()[lender] == 0
                    of, there = divmod(lender, heads)
                    found += sources[of, kept - places.lent :, there].tolist()
            assert [source // chunk for source in found] == [number] * len(found)
            assert [source % chunk for source in found] == stay[layer, :, head].nonzero()[:, 0].tolist()


def filled(cache: PagedKVCache) -> PagedKVCache:
    draw = torch.Generator().manual_seed(3)
    for layer in range(len(cache.data)):
        slots = torch.arange(cache.data[0].shape[0] * BLOCK)
        cache.write(layer, slots, *torch.randn(2, len(slots), *cache.data[0].shape[3:], generator=draw))
    return cache


def batch_of(sequences: list[tuple[int, int, int, int]]) -> ForwardBatch:
    """sequences: new slots, all slots, where settled slots begin and how many they are; single ones first."""
    width = max(-(-slots // BLOCK) for _, slots, _, _ in sequences)
    tables = (torch.randperm(width * len(sequences), generator=torch.Generator().manual_seed(1))).view(-1, width)
    write = [
        int(tables[i, slot // BLOCK]) * BLOCK + slot % BLOCK
        for i, (new, slots, _, _) in enumerate(sequences)
        for slot in range(slots - new, slots)
    ]
    queries, contexts, first, settled = (list(column) for column in zip(*sequences, strict=True))
    rows = sum(queries)
    return ForwardBatch(
        token_ids=torch.arange(rows)[:, None] % 90 + 2,
        group_sizes=torch.ones(rows, dtype=torch.int64),
        max_group_size=1,
        positions=torch.arange(rows) + 150,
        write_slots=torch.tensor(write),
        block_tables=tables,
        context_slots=torch.tensor(contexts),
        query_slots=queries,
        context_slots_host=contexts,
        num_single=queries.count(1),
        emit=torch.arange(rows),
        confidence=torch.ones(rows),
        group_limits=torch.ones(rows, dtype=torch.int64),
        max_group_limit=1,
        sampling=empty_sampling(rows, CPU),
        settled_from=torch.tensor(first),
        settled_slots=torch.tensor(settled),
    )


# One alone, which threads share out by heads; several at once; chunks, of many queries and of few.
BATCHES = {
    "one": [(1, 75, 5, 40)],
    "many": [(1, 75, 5, 40), (1, 70, 20, 4), (1, 66, 3, 0), (1, 73, 1, 64)],
    "chunks": [(1, 50, 5, 40), (40, 90, 11, 36), (3, 61, 7, 28)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("instructions", SETS)
def test_kernels_read_lent_places_as_torch_does(dtype: torch.dtype, shares: str, instructions: InstructionSet) -> None:
    if (kernels := load_kernels(instructions)) is None:
        pytest.skip("built without a compiler, or for another processor")
    config = trunk_config(num_layers=2, max_position_embeddings=512, **{**WIDE, "head_dim": 64})
    places = SettledPlaces(torch.tensor(SHARES[shares]), CHUNK, KEPT)
    for seed, sequences in enumerate(BATCHES.values()):
        batch, states = batch_of(sequences), []
        plain, native = models(ModelConfig(trunk=config), seed=seed, kernels=kernels)
        for model, settled in ((plain, places), (native, places), (plain, None)):
            cache = filled(PagedKVCache(config, 60, BLOCK, dtype, CPU, settled))
            with torch.inference_mode():
                states.append(model.backend.trunk(batch, cache, Reads(batch.emit, 0))[0])
        wanted, found, unlent = states
        off = (wanted - found).abs().amax(1)
        # An input between two steps may be rounded to either side, which the second layer sees.
        assert float(off.max()) < 0.1 < float((wanted - unlent).abs().amax(1).median())
        # Codes of 8 bits have roundings of their own, and so have products of bfloat16 (dots.h).
        is_exact = dtype is torch.float32 or (dtype is torch.bfloat16 and instructions != "avx512bf16")
        assert not is_exact or float(off.min()) < 1e-4


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("shares", SHARES)
def test_what_a_head_sees_is_its_own_places_and_those_that_it_borrows(name: str, shares: str) -> None:
    """Spelled out: each head's slots are copied, one after the other, into a cache in which nothing is lent. Slots of
    others, and those that a layer has not written yet, hold what is left of a sequence that went wrong."""
    config = trunk_config(num_layers=2, max_position_embeddings=512, **WIDE)
    places, batch = SettledPlaces(torch.tensor(SHARES[shares]), CHUNK, KEPT), batch_of(BATCHES[name])
    cache = filled(PagedKVCache(config, 60, BLOCK, torch.float32, CPU, places))
    is_stale = torch.ones(61 * BLOCK, dtype=torch.bool)
    for table, (_, slots, _, _) in zip(batch.block_tables, BATCHES[name], strict=True):
        is_stale[[int(table[slot // BLOCK]) * BLOCK + slot % BLOCK for slot in range(slots)]] = False
    is_stale[batch.write_slots] = True
    for data in cache.data:
        data.flatten(0, 1)[is_stale] = NAN
    q = torch.randn(len(batch.token_ids), config.num_heads, config.head_dim)
    for layer in range(2):
        written = torch.randn(2, len(q), config.num_kv_heads, config.head_dim)
        found = PagedAttention(batch, cache, torch.float32)(layer, q, *written).unflatten(1, (config.num_heads, -1))
        row, each = 0, config.num_heads // config.num_kv_heads
        for i, (new, slots, first, settled) in enumerate(BATCHES[name]):
            at = [int(batch.block_tables[i, slot // BLOCK]) * BLOCK + slot % BLOCK for slot in range(slots)]
            lent = [slot for slot in range(first, first + settled) if (slot - first) % KEPT >= KEPT - places.lent]
            for head in range(config.num_kv_heads):
                hidden = lent if places.lends[layer, head] else []
                held = [(layer, head, at[slot]) for slot in range(slots) if slot not in hidden]
                lenders = [divmod(x, config.num_kv_heads) for x in places.lenders[layer, head].tolist() if x >= 0]
                held = [(*lender, at[slot]) for lender in lenders for slot in lent] + held
                apart = PagedKVCache(config, 30, BLOCK, torch.float32, CPU)
                values = torch.stack([cache.data[of].flatten(0, 1)[slot, :, there] for of, there, slot in held])
                apart.data[0].flatten(0, 1)[: len(held)] = values[:, :, None]
                mine = q[row : row + new]
                wanted = reference_attention(mine, apart, 0, range(30), len(held)).unflatten(1, (config.num_heads, -1))
                of_head = slice(head * each, (head + 1) * each)
                torch.testing.assert_close(found[row : row + new, of_head], wanted[:, of_head], atol=1e-5, rtol=1e-4)
            row += new


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("fitted", "shares"), [(False, [[1, 1]] * 3), (True, [[0, 1], [2, 0], [3, 0]])])
@pytest.mark.parametrize("instructions", SETS)
def test_kernels_move_what_plain_settling_moves(
    dtype: torch.dtype, fitted: bool, shares: list[list[int]], instructions: InstructionSet
) -> None:
    if (kernels := load_kernels(instructions)) is None:
        pytest.skip("built without a compiler, or for another processor")
    trunk = trunk_config(num_layers=3, unturned_layers=(1,), **{**WIDE, "head_dim": 64})
    draw = torch.Generator().manual_seed(4)
    rotary = RotaryEmbedding(trunk, 500, CPU, torch.float32)
    probe = torch.randn(3, trunk.num_kv_heads, 65, generator=draw) if fitted else None
    places = SettledPlaces(torch.tensor(shares), 48, 12)
    caches = [PagedKVCache(trunk, 20, 8, dtype, CPU, places) for _ in range(2)]
    for layer in range(3):
        keys, values = torch.randn(2, 160, trunk.num_kv_heads, 64, generator=draw)
        for cache in caches:
            cache.write(layer, torch.arange(160), keys, values)
    before = caches[0].data[1].clone()
    slots = torch.randperm(150, generator=draw).tolist()
    candidates, behind = slots[:48], slots[48:60]
    # What stays goes to candidates' own slots and to new ones; what is moved, to where candidates or moved ones were.
    kept_at = [*candidates[10:15], *slots[60:67]]
    moves = list(zip(behind, [*candidates[20:26], *behind[:6]], strict=True))
    for cache, choice in zip(caches, (SlotChoice(rotary, probe), CpuSlotChoice(kernels, rotary, probe)), strict=True):
        choice.settle(cache, candidates, list(range(100, 148)), kept_at, moves)
    for of_plain, of_kernels in zip(*((*cache.data, *cache.scales) for cache in caches), strict=True):
        assert torch.equal(of_plain, of_kernels)
    assert not torch.equal(caches[0].data[1], before)
    assert torch.equal(caches[1].data[1].flatten(0, 1)[candidates[20]], before.flatten(0, 1)[behind[0]])


class Largest(TorchDispatchMode):
    """The largest tensor that is made while it is on, in bytes; views are none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and not func._schema.is_mutable and not func.is_view:
            self.bytes = max(self.bytes, found.nbytes)
        return found


def test_what_only_moves_is_copied_layer_by_layer() -> None:
    trunk = trunk_config(num_layers=12, **WIDE)
    cache = PagedKVCache(trunk, 60, 32, torch.float32, CPU, SettledPlaces(equal_shares(trunk), 16, 4))
    choice = SlotChoice(RotaryEmbedding(trunk, 500, CPU, torch.float32))
    with Largest() as made:
        choice.settle(cache, range(16), range(16), range(4), [(slot, slot - 12) for slot in range(16, 1816)])
    assert made.bytes == 1800 * cache.data[0][0, 0].nbytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")
@pytest.mark.parametrize("fitted", [False, True])
def test_a_gpu_moves_what_the_processor_moves(fitted: bool) -> None:
    trunk = trunk_config(num_layers=3, **{**WIDE, "head_dim": 64})
    draw = torch.Generator().manual_seed(4)
    probe = torch.randn(3, trunk.num_kv_heads, 65, generator=draw) if fitted else None
    values = [torch.randn(21, 8, 2, trunk.num_kv_heads, 64, generator=draw).bfloat16() for _ in range(3)]
    slots = torch.randperm(150, generator=draw).tolist()
    found = []
    for device in (CPU, torch.device("cuda")):
        places = SettledPlaces(torch.tensor([[0, 1], [2, 0], [3, 0]]), 48, 12)
        cache = PagedKVCache(trunk, 20, 8, torch.bfloat16, device, places)
        for data, of_layer in zip(cache.data, values, strict=True):
            data.copy_(of_layer)
        choice = SlotChoice(RotaryEmbedding(trunk, 500, device, torch.float32), probe)
        moves = list(zip(slots[48:60], slots[20:32], strict=True))
        choice.settle(cache, slots[:48], list(range(100, 148)), slots[60:72], moves)
        found.append([data.cpu() for data in cache.data])
    for of_cpu, of_gpu in zip(*found, strict=True):
        assert torch.equal(of_cpu, of_gpu)
