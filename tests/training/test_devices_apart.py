"""Training and the commands for settled slots on a pretended GPU: what they compute there is never mixed with the
host's tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from examples import random_example
from hamburger.engine.types.settling import Settling
from hamburger.model.assemble import model_of
from hamburger.model.config import ModelConfig
from hamburger.model.modules.rotary import RotaryEmbedding
from hamburger.model.slot_choice import SlotChoice
from hamburger.training.batches.batches import collate, collate_with_base
from hamburger.training.forward.grafts import likeliest_ids
from hamburger.training.forward.origin import read_base, with_graft
from hamburger.training.forward.trainable import build
from hamburger.training.loss.objective import Objective, TrainingNetwork
from hamburger.training.run.optimizers import optimizers
from hamburger.training.settling.choice import EQUAL, KEYS, PROBE, SCORE_NAMES, Chooser, Policy
from hamburger.training.settling.observed import observe, settled_states
from hamburger.training.settling.shares import costs_of_shares
from pretended_gpu import GPU, pretended_gpu
from small_models import CPU, random_tensors, trunk_config
from training_runs import AGREEMENT, FUSED, MERGES, recipe, write_base

TRUNK = trunk_config(vocab_size=64, max_position_embeddings=256)
SETTLING = Settling(window=20, keep=1 / 4, growth=1 / 4, chunk=16, apart=8)
RECIPES: dict[str, dict[str, Any]] = {
    "full": {},
    "frozen": {"graft": FUSED, "trunk": {"mode": "frozen"}, "optimizer": "muon", "objective": AGREEMENT},
    "merges": MERGES,
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_of_training(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = recipe(write_base(tmp_path), **RECIPES[name])
    examples = [random_example(seed, 4) for seed in range(3)]
    with pretended_gpu(monkeypatch):
        origin = with_graft(read_base(made.base), made, lambda size: likeliest_ids([torch.arange(96)], size, 96))
        model = build(origin, made, device=GPU, compute=torch.float32, max_positions=64).model
        network = TrainingNetwork(model, Objective(**made.objective.model_dump()))
        groups = [example.group_sizes for example in examples]
        batch = collate_with_base(examples, 4, groups) if name == "merges" else collate(examples, 4)
        outcome = network(batch.to(GPU))
        assert outcome.token_loss.device == GPU
        outcome.loss(network.objective.counts(batch).to(GPU), made.objective.stop).backward()
        for optimizer in optimizers(network, made):
            optimizer.step()


@pytest.mark.parametrize("score", SCORE_NAMES)
def test_what_answers_lose_by_settling(score: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended_gpu(monkeypatch):
        found = _settled(GPU, score)
        assert all(tensor.device == GPU for tensor in found[:2])
    for ours, plain in zip(found, _settled(CPU, score), strict=True):
        assert torch.equal(ours, plain)


def _settled(device: torch.device, score: str) -> tuple[Tensor, Tensor, Tensor]:
    """When tokens lose their slots, the states behind the first of them, and what shares would cost."""
    config = ModelConfig(trunk=TRUNK)
    model = model_of(config, random_tensors(config, 3), dtype=torch.float32, device=device, max_positions=256)
    rotary, shares = RotaryEmbedding(TRUNK, 256, device, torch.float32), torch.tensor([[1, 0], [3, 2], [0, 0], [1, 1]])
    probed = SlotChoice(rotary, torch.linspace(-1, 1, 4 * 2 * 9).view(4, 2, 9))
    choices = {
        KEYS: Chooser(SlotChoice(rotary), torch.ones_like(shares)),
        PROBE: Chooser(probed, shares),
        EQUAL: Chooser(probed, torch.ones_like(shares)),
    }
    seen = observe(model, [5, 6, 7], [(7 * i) % 61 + 2 for i in range(120)], by_head=True)
    dropped = Policy(score, SETTLING, seed=1).dropped_at(seen, choices)
    states = settled_states(model, seen, dropped, next(SETTLING.places(120))[0])
    return dropped, states, costs_of_shares(model, probed, SETTLING, [seen], shares)
