"""The rule that says whether a group goes on, in C++ (goes_on, graft/decide.h) and in Python: the same to the bit."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from hamburger.model.cpu.library import Kernels
from hamburger.model.cpu.structs import EmissionStruct
from hamburger.model.emission.emission import GoOn, drafts_go_on, last_confirmed

INFINITY = float("inf")
GREATEST = torch.finfo(torch.float32).max
TINIEST = 2.0**-149  # the least above zero
ROWS = 20_000
ENDS = 3  # of each row; -1 fills up


def compiled(
    kernels: Kernels, confidence: Tensor, group_limits: Tensor, end_ids: Tensor,
    index: int, tokens: Tensor, likeliest: Tensor, stop: Tensor,
) -> Tensor:  # fmt: skip
    """What the kernels say of all rows, given what CpuGraft.emit gives them."""
    go_on = GoOn(confidence, group_limits, end_ids)
    limits, thresholds = go_on.limits, go_on.thresholds
    emission = EmissionStruct(
        rows=len(tokens), ends=end_ids.shape[1],
        limits=limits.data_ptr(), thresholds=thresholds.data_ptr(), end_ids=end_ids.data_ptr(),
    )  # fmt: skip
    on = torch.empty(len(tokens), dtype=torch.bool)
    pointer = ctypes.c_void_p
    run = kernels.function("goes_on", pointer, ctypes.c_int64, *4 * (pointer,))
    run(ctypes.byref(emission), index, *(t.data_ptr() for t in (tokens, likeliest, stop, on)))
    return on


def assert_same(
    kernels: Kernels, confidence: Tensor, limits: Tensor, ends: Tensor,
    index: int, tokens: Tensor, likeliest: Tensor, stop: Tensor,
) -> Tensor:  # fmt: skip
    """The rule's answer, of all rows and of some of them, which is that of the kernels."""
    rule = GoOn(confidence, limits, ends)
    expected = rule.after(index, tokens, likeliest, stop)
    assert torch.equal(compiled(kernels, confidence, limits, ends, index, tokens, likeliest, stop), expected)
    rows = torch.arange(0, len(tokens), 3)
    some = rule.after(index, tokens[rows], likeliest[rows], stop[rows], rows)
    assert torch.equal(some, expected[rows])
    return expected


@pytest.mark.parametrize("index", [0, 1, 5])
def test_random_rows(kernels: Kernels, index: int) -> None:
    generator = torch.Generator().manual_seed(index)
    confidence = torch.rand(ROWS, generator=generator)
    stop = 4 * torch.randn(ROWS, generator=generator)
    # A third of the stop values lie on their threshold, or next to it on either side.
    on_it = -torch.logit(confidence)
    beside = torch.stack([on_it, on_it.nextafter(on_it + 1), on_it.nextafter(on_it - 1)])
    which = torch.randint(9, (ROWS,), generator=generator)
    stop = torch.where(which < 3, beside.gather(0, which.clamp(max=2)[None])[0], stop)
    limits = torch.randint(index, index + 6, (ROWS,), generator=generator)
    ends = torch.randint(-1, 6, (ROWS, ENDS), generator=generator)
    tokens = torch.randint(12, (ROWS,), generator=generator)
    likeliest = torch.rand(ROWS, generator=generator) < 0.9
    on = assert_same(kernels, confidence, limits, ends, index, tokens, likeliest, stop)
    assert 0.1 < on.float().mean() < 0.9


def test_every_edge_with_every_other(kernels: Kernels) -> None:
    """Confidences, stop values, limits, tokens that end or not, likeliest or not."""
    below_one = 1 - 2.0**-24
    confidences = torch.tensor([0.0, TINIEST, 1e-30, 0.25, 0.5, 0.7, below_one, 1.0])
    at = torch.logit(confidences)
    far = torch.tensor([0.0, -0.0, TINIEST, -TINIEST, 1.0, -1.0, GREATEST, -GREATEST, INFINITY, -INFINITY])
    values = torch.cat([-at, at, (-at).nextafter(far[8]), (-at).nextafter(far[9]), far])
    limits = torch.tensor([1, 2, 3, 4, 2**62])
    ends = torch.tensor([[-1, -1, -1], [7, -1, -1], [-1, -1, 7], [0, 2**62, 8]])
    every = torch.cartesian_prod(
        torch.arange(len(confidences)), torch.arange(len(values)), limits, torch.arange(len(ends)),
        torch.tensor([0, 7, 2**62]), torch.tensor([0, 1]),
    )  # fmt: skip
    confidence, stop, limit, end, tokens, likeliest = every.unbind(1)
    found = [
        assert_same(
            kernels, confidences[confidence], limit.contiguous(), ends[end], index, tokens.contiguous(),
            likeliest.bool(), values[stop],
        )
        for index in range(3)
    ]  # fmt: skip
    assert all(on.any() and not on.all() for on in found)


@pytest.mark.parametrize(
    ("confidence", "stop", "limit", "token", "likeliest", "expected"),
    [
        (0.5, -0.0, 2, 1, True, True),  # exactly on the threshold
        (0.5, TINIEST, 2, 1, True, False),
        (0.5, -9.0, 1, 1, True, False),  # no room
        (0.5, -9.0, 2, 7, True, False),  # an end
        (0.5, -9.0, 2, 1, False, False),
        (0.0, GREATEST, 2, 1, True, True),
        (0.0, INFINITY, 2, 1, True, True),
        (1.0, -INFINITY, 2, 1, True, False),  # every token from the trunk, whatever the limit
    ],
)
def test_the_rule_by_example(
    kernels: Kernels, confidence: float, stop: float, limit: int, token: int, likeliest: bool, expected: bool
) -> None:
    on = assert_same(
        kernels, torch.tensor([confidence]), torch.tensor([limit]), torch.tensor([[7]]), 0, torch.tensor([token]),
        torch.tensor([likeliest]), torch.tensor([stop]),
    )  # fmt: skip
    assert on.tolist() == [expected]


def test_no_end_tokens_at_all(kernels: Kernels) -> None:
    ends = torch.empty(1, 0, dtype=torch.int64)
    on = assert_same(
        kernels, torch.tensor([0.5]), torch.tensor([2]), ends, 0, torch.tensor([7]), torch.tensor([True]),
        torch.tensor([-1.0]),
    )  # fmt: skip
    assert on.all()


def test_drafts_go_on_while_all_of_them_together_are_likely_enough() -> None:
    stop_probs = torch.tensor([[0.2, 0.5, 0.9], [0.0, 0.0, 0.9], [1.0, 0.5, 0.9]])
    limits, wanted = torch.full((3,), 4), [[True, False, False], [True, True, False], [False, False, False]]
    found = [drafts_go_on(stop_probs, i, torch.full((3,), 0.5), limits).tolist() for i in range(3)]
    assert [*map(list, zip(*found, strict=True))] == wanted
    # At exactly the chance that is asked for they do; without any they always do, and at 1 never.
    assert drafts_go_on(stop_probs, 1, torch.full((3,), 0.4), limits).tolist() == [True, True, False]
    assert drafts_go_on(stop_probs, 2, torch.zeros(3), limits).tolist() == [True] * 3
    assert drafts_go_on(torch.zeros(3, 3), 0, torch.ones(3), limits).tolist() == [False] * 3
    assert drafts_go_on(torch.zeros(3, 3), 1, torch.zeros(3), torch.tensor([1, 2, 3])).tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("tokens", "checks", "wanted"),
    [
        ([5], [-1], [0]),
        ([5, 6, 7], [5, 6, -1], [2]),
        ([5, 6, 7], [4, 6, -1], [0]),
        ([5, 6, 7], [5, 4, -1], [1]),
        ([5, 6, 7], [-1, -1, -1], [0, 1, 2]),
        # Three sequences: two drafts, of which none counts; none; one, which counts.
        ([1, 2, 3, 4, 5, 6], [9, 2, -1, -1, 5, -1], [0, 3, 5]),
        ([1, 1, 1, 1], [1, 1, 1, -1], [3]),
        ([], [], []),
    ],
)
def test_the_last_row_that_counts_of_each_sequence(tokens: list[int], checks: list[int], wanted: list[int]) -> None:
    last = last_confirmed(*(torch.tensor(ids, dtype=torch.int64) for ids in (tokens, checks)))
    assert last.nonzero().flatten().tolist() == wanted
