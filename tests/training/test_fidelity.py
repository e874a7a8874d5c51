"""What a merge keeps, against divergences by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from examples import example, random_example
from hamburger.model.config import ModelConfig
from hamburger.training.batches.batches import TrainBatch, collate
from hamburger.training.forward.network import trunk_states
from hamburger.training.loss.objective import UNSEEN_FIDELITY, Objective, TrainingNetwork, group_fidelity
from small_models import graft_config, plain_model, trunk_config


def network() -> TrainingNetwork:
    """Whose vocabulary a teacher of 96 ids knows whole."""
    config = ModelConfig(trunk=trunk_config(vocab_size=96), graft=graft_config())
    return TrainingNetwork(plain_model(config), Objective(lookahead="dense", stop_target="fidelity"))


def states(net: TrainingNetwork, batch: TrainBatch) -> Tensor:
    with torch.no_grad():
        return trunk_states(net.model, batch.slots, ())[0][batch.emit]


def test_it_is_measured_after_merged_groups_that_something_follows() -> None:
    net = network()
    # Rows emit, in order: [7, 8], [9], [10, 11, 12], [13, 14] (the answer's last), then of another text [6], [7, 8].
    one = example([([5, 6], [[7, 8], [9], [10, 11, 12], [13, 14]])], teacher_k=96)
    two = example([([5], [[6], [7, 8]])], teacher_k=96)
    batch = collate([one, two], 4)
    assert batch.next_sizes.tolist() == [2, 1, 3, 2, 1, 2]
    found = group_fidelity(states(net, batch), net.model.head_weight, batch)
    assert found.isfinite().tolist() == [True, False, True, False, False, False]
    own = F.linear(states(net, batch), net.model.head_weight).log_softmax(-1)
    assert batch.teacher_ids is not None
    assert batch.teacher_logprobs is not None
    for row in (0, 2):
        ids, base = batch.teacher_ids[row + 1, 0], batch.teacher_logprobs[row + 1, 0].double()
        divergence = sum(base[i].exp() * (base[i] - own[row + 1, ids[i]].double()) for i in range(96))
        assert found[row].item() == pytest.approx(math.exp(-float(divergence)), rel=1e-3)


def test_a_token_counts_as_right_as_far_as_the_merge_keeps_it() -> None:
    net = network()
    batch = collate([random_example(seed, teacher_k=96) for seed in range(6)], 4)
    outcome = net(batch)
    fidelity = group_fidelity(states(net, batch), net.model.head_weight, batch)
    mask, seen = net.objective.stop_mask(batch), 0
    for row, place in mask.nonzero().tolist():
        merged_here = place < batch.next_sizes[row] - 1 and not fidelity[row].isnan()
        kept = fidelity[row].item() if merged_here else UNSEEN_FIDELITY
        seen += merged_here
        right = outcome.base_probs[row, place + 1].item()
        assert outcome.stop_targets[row, place].item() == pytest.approx(1 - right * kept, abs=1e-5)
    assert 0 < seen < len(mask.nonzero())
    wanted = outcome.stop_targets[mask]
    plain = F.binary_cross_entropy_with_logits(outcome.stop_logits[mask], wanted, reduction="sum")
    torch.testing.assert_close(outcome.stop_loss.detach(), plain)


def test_the_bases_impossible_ids_do_no_harm() -> None:
    net = network()
    made: Any = random_example(3, teacher_k=96)
    made.top_logprobs[:, 1:] = -math.inf
    batch = collate([made], 4)
    found = group_fidelity(states(net, batch), net.model.head_weight, batch)
    known = found[~found.isnan()]
    assert len(known)
    assert bool(((known > 0) & (known <= 1)).all())
