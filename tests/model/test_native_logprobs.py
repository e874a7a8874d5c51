"""Log-probabilities by the compiled kernels: those of torch, with ids in order where logits are equal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hamburger.model.config import ModelConfig
from hamburger.model.cpu.graft import CpuGraft, PackedHead
from hamburger.model.cpu.library import Kernels, load_kernels
from hamburger.model.sampler import token_logprobs
from native_models import WIDE
from small_models import trunk_config

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="built without a compiler, or for another processor")


@pytest.fixture
def graft(kernels: Kernels) -> CpuGraft:
    return CpuGraft(kernels, ModelConfig(trunk=trunk_config(**WIDE)), PackedHead(kernels, torch.zeros(16, 64)), None)


def logits_of(rows: int, vocabulary: int, spread: float) -> Tensor:
    return spread * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(rows + vocabulary))


@pytest.mark.parametrize("spread", [0.1, 3.0, 40.0])
@pytest.mark.parametrize("vocabulary", [1, 15, 16, 33, 1024, 5001])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_log_probabilities_are_those_of_torch(graft: CpuGraft, rows: int, vocabulary: int, spread: float) -> None:
    logits = logits_of(rows, vocabulary, spread)
    logits[:, ::5] = logits[:, :1].clone()  # as likely as the first
    logits[:, 3::7] = float("-inf")
    tokens = torch.arange(rows) * 31 % vocabulary
    for k in {0, 1, min(5, vocabulary), vocabulary}:
        found, wanted = graft.logprobs(logits, tokens, k), token_logprobs(logits, tokens, k, ranked=True)
        torch.testing.assert_close(found.chosen, wanted.chosen, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(found.top, wanted.top, atol=2e-5, rtol=1e-5)
        assert found.ranks is not None
        assert wanted.ranks is not None
        assert torch.equal(found.ranks, wanted.ranks)
        assert torch.equal(found.top_ids, logits.sort(descending=True, stable=True).indices[:, :k])


def test_a_row_has_the_same_bits_wherever_it_lies(graft: CpuGraft) -> None:
    logits, tokens = logits_of(9, 1000, 3.0), torch.arange(9)
    whole = graft.logprobs(logits, tokens, 4)
    for row in range(9):
        alone = graft.logprobs(logits[row : row + 1], tokens[row : row + 1], 4)
        assert torch.equal(alone.chosen, whole.chosen[row : row + 1])
        assert torch.equal(alone.top, whole.top[row : row + 1])
