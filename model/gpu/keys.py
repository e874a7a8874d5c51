"""What Triton kernels share: what a KV head sees of a context, where its keys lie, and products.

A head sees places, one after the other: of its own slots all, but for those whose places it lends, and then those that
each of its lenders lends it (model/settled_places.py). Where nothing is lent, KEPT is 0, and places are slots. All
layers lie in one piece of memory, so a lender's key is a fixed way off the head's own.

    places   0 ............ own | ...... own + lent | ......... seen
    key of   its own slots      | its first lender  | its second
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hamburger.model.gpu.chunks import Settled
from hamburger.model.kv_cache import KVLayer

LOG2_E = 1.4426950408889634
MIN_DOT = 16  # tl.dot's least width
MAX_SLOTS = 64  # of a step of the loop over a context
_KEY_BYTES = 16384  # of such a step: several steps must fit into shared memory
# Pointers into a step's staged numbers, and to a layer's lenders: each would be compiled anew, while others wait.
OF_ANY_ALIGNMENT = ["tables", "contexts", "settled_from", "settled_slots", "lenders", "lends", "offsets"]
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b):
    if _INTERPRETED:  # the interpreter would multiply the bits of bfloat16 as integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def seen_of(
    context, settled_from, settled_slots, lenders, lends, sequence, kv_head, KEPT: tl.constexpr, LENT: tl.constexpr
):
    """Of a context [slots]: its first settled slot, how many places are the head's own, how many a lender lends, and
    how many it sees."""
    first, own, lent, seen = context * 0, context, context * 0, context
    if KEPT > 0:
        first = tl.load(settled_from + sequence).to(tl.int32)
        lent = tl.where(context > 0, tl.load(settled_slots + sequence).to(tl.int32) // KEPT * LENT, 0)
        own = context - tl.load(lends + kv_head).to(tl.int32) * lent
        seen = own + tl.load(lenders + kv_head).to(tl.int32) * lent
    return first, own, lent, seen


@triton.jit
def slots_of(
    places, held, context, first, own, lent, offsets, kv_head,
    KV_HEADS: tl.constexpr, KEPT: tl.constexpr, LENT: tl.constexpr,
):  # fmt: skip
    """In which slots these places are, and how many vectors behind the head's own key there each one's key lies. held:
    which of them there are; the others: as of seen_of."""
    slots, further = places, 0
    if KEPT > 0:
        # A lending head's own places pass over the last LENT of each KEPT slots; another's context - own is 0.
        over = (places - first) // (KEPT - LENT) * LENT
        slots = places + tl.minimum(tl.maximum(over, 0), context - own)
        number = (places - own) // tl.maximum(lent, 1)
        place = places - own - number * lent
        is_lent = held & (places >= own)
        slots = tl.where(is_lent, first + place + (place // LENT + 1) * (KEPT - LENT), slots)
        further = tl.load(offsets + number * KV_HEADS + kv_head, mask=is_lent, other=0)
    return slots, further


@triton.jit
def keys_of(tables, row, table_width, slots, seen, kv_head, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr):
    """Which of a layer's keys and values [slots] the slots' keys are; their values are KV_HEADS further."""
    blocks = tl.load(tables + row.to(tl.int64) * table_width + slots // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
    return (blocks * BLOCK_SIZE + slots % BLOCK_SIZE) * (2 * KV_HEADS) + kv_head


@triton.jit
def as_query(numbers, query):
    """By way of float32: the interpreter makes no bfloat16 of whole numbers."""
    return numbers.to(tl.float32).to(query.dtype)


@triton.jit
def scaled(scales, at, seen, numbers, IS_INT8: tl.constexpr):
    """Numbers [rows, slots], each slot's times its scale where the cache has scales."""
    if IS_INT8:
        numbers *= tl.load(scales + at, mask=seen, other=0.0)[None, :]
    return numbers


def slots_at_once(block_d: int, q: Tensor) -> int:
    """A power of 2, as block_d is. Keys are multiplied as numbers of q's kind."""
    return max(min(_KEY_BYTES // (block_d * q.element_size()), MAX_SLOTS), MIN_DOT)


def lending_of(layer: KVLayer, settled: Settled | None, unused: Tensor) -> tuple[tuple[Tensor, ...], dict[str, int]]:
    """What kernels are given of a layer's lending: settled_from, settled_slots, lenders, lends and offsets, which are
    `unused`, int64, where nothing is lent; and constants."""
    lending = layer.lending
    if lending is None or settled is None:
        return (unused,) * 5, {"KEPT": 0, "LENT": 0}
    tensors = (*settled, lending.lenders, lending.lends, lending.offsets)
    return tensors, {"KEPT": lending.kept, "LENT": lending.lent}
