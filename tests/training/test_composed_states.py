"""States from each first composed slot on, on the base's before them: the same as one pass over all, for less."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from examples import MadeExample, example, random_example
from hamburger.model.modules.hamburger import HamburgerModel
from hamburger.training.batches.batches import TrainBatch, collate, collate_with_base
from hamburger.training.forward.composed_states import base_states, composed_states, from_first_composed
from hamburger.training.forward.network import is_for_composed, trunk_states
from hamburger.training.loss.objective import Objective, TrainingNetwork
from small_models import grafted, plain_model, trunk_config
from trunk_shapes import SHAPES

LAYERS = (1, 2, 3)
OBJECTIVE = Objective(
    cross_entropy=0, distillation=1.0, stop=0, stop_target="agreement", lookahead="dense", micro_weight=0, matching=2.0
)


def model_of(adapter_rank: int = 32, trunk: str | None = None) -> HamburgerModel:
    config = grafted(trunk_config(**(SHAPES[trunk] if trunk else {})), adapter_rank)
    model = plain_model(config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_for_composed(name))
    return model


def made() -> list[MadeExample]:
    """Several conversations; one without a composed slot, one that begins with one."""
    return [
        random_example(1, teacher_k=8),
        random_example(2, teacher_k=8, max_group=1),
        example([([5, 6], [[7, 8], [9], [10, 11, 12]])], teacher_k=8),
        random_example(4, teacher_k=8),
    ]


def with_base(examples: list[MadeExample]) -> TrainBatch:
    return collate_with_base(examples, 4, [e.group_sizes for e in examples])


@pytest.mark.parametrize("adapter_rank", [0, 32])
@pytest.mark.parametrize("trunk", [None, "qwen2_sliding", "qwen3", "smollm3", "olmo2", "gemma3"])
def test_the_states_and_gradients_are_those_of_one_pass(adapter_rank: int, trunk: str | None) -> None:
    model, batch = model_of(adapter_rank, trunk), with_base(made())
    assert batch.uncomposed is not None
    hidden, features = trunk_states(model, batch.slots, LAYERS)
    found = composed_states(model, batch.slots, batch.uncomposed, LAYERS)
    torch.testing.assert_close(found.hidden, hidden, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.features, features, atol=1e-5, rtol=1e-4)
    weigh = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
    trained = [p for p in model.parameters() if p.requires_grad]
    for ours, theirs in zip(
        torch.autograd.grad((found.hidden * weigh).sum(), trained, allow_unused=True),
        torch.autograd.grad((hidden * weigh).sum(), trained, allow_unused=True),
        strict=True,
    ):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("num_layers", [1, 3])
@torch.no_grad()
def test_the_distance_is_to_the_base_at_each_slots_last_token(num_layers: int) -> None:
    config = grafted(trunk_config(num_layers=num_layers), adapter_rank=32, feature_layers=(0,))
    model = plain_model(config)
    examples = made()
    batch = with_base(examples)
    assert batch.uncomposed is not None
    found = composed_states(model, batch.slots, batch.uncomposed, (0,)).distance
    composed, wanted = (trunk_states(model, slots)[0] for slots in (batch.slots, batch.uncomposed.slots))
    final = 0.0
    slot = token = 0
    for e in examples:
        seen = False
        for size in e.group_sizes[e.group_sizes > 0].tolist():
            token, seen = token + size, seen or size > 1
            if seen:
                base = wanted[token - 1]
                final += float((composed[slot] - base).square().sum() / base.square().sum())
            slot += 1
    if num_layers == 1:  # no layer's input lies between
        assert float(found) == pytest.approx(final, rel=1e-4)
    assert float(found) > final / num_layers > 0 or num_layers == 1
    alone = with_base([examples[1]])
    assert alone.uncomposed is not None
    assert composed_states(model, alone.slots, alone.uncomposed, (0,)).distance == 0


@torch.no_grad()
def test_the_bases_states_are_the_trunks_own() -> None:
    model, batch = model_of(0), with_base(made())
    assert batch.uncomposed is not None
    base = base_states(model, batch.uncomposed.slots, LAYERS)
    hidden, features = trunk_states(model, batch.uncomposed.slots, LAYERS)
    assert len(base.normed) == len(base.heads) == 4
    torch.testing.assert_close(base.normed[-1], hidden)
    torch.testing.assert_close(base.features, features)


def test_a_batch_beside_its_base_has_the_rows_that_can_learn() -> None:
    examples = made()
    whole, batch = collate(examples, 4), with_base(examples)
    after = from_first_composed(whole.slots)
    assert 0 < len(batch.emit) < len(whole.emit)
    assert batch.emit.tolist() == [row for row in whole.emit.tolist() if after[row]]
    kept = after[whole.emit]
    assert torch.equal(batch.targets, whole.targets[kept])
    assert batch.uncomposed is not None
    ids = torch.cat([e.token_ids for e in examples])
    assert torch.equal(batch.uncomposed.slots.token_ids[:, 0], ids.long())
    sizes = whole.slots.group_sizes
    newest = whole.slots.token_ids.gather(1, sizes[:, None] - 1)[:, 0]
    assert torch.equal(ids[batch.uncomposed.last_rows].long(), newest)


def test_the_loss_is_of_first_tokens_and_distances_alone() -> None:
    model, batch = model_of(), with_base(made())
    net = TrainingNetwork(model, OBJECTIVE)
    outcome, counts = net(batch), OBJECTIVE.counts(batch)
    assert counts.tolist() == [len(batch.emit), 0, int(from_first_composed(batch.slots).sum())]
    hidden, _ = trunk_states(model, batch.slots, LAYERS)
    assert batch.teacher_ids is not None
    assert batch.teacher_logprobs is not None
    logprobs = F.linear(hidden[batch.emit], model.head_weight).log_softmax(-1)
    wanted = batch.teacher_logprobs[:, 0].softmax(-1)
    divergence = F.kl_div(logprobs.gather(1, batch.teacher_ids[:, 0]), wanted, reduction="sum")
    torch.testing.assert_close(outcome.token_loss, divergence, rtol=1e-4, atol=1e-4)
    assert batch.uncomposed is not None
    distance = composed_states(model, batch.slots, batch.uncomposed, LAYERS).distance
    torch.testing.assert_close(outcome.matching_loss, 2 * distance)
    loss = divergence / counts[0] + 2 * distance / counts[2]
    torch.testing.assert_close(outcome.loss(counts, 0.0), loss, rtol=1e-4, atol=1e-4)
    outcome.loss(counts, 0.0).backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert {
        "trunk.layers.3.down_adapter.up.weight",
        "trunk.layers.0.qkv_adapter.down.weight",
        "embedder.out_proj.weight",
    } <= trained


def test_examples_that_merge_nothing_train_nothing_and_do_no_harm() -> None:
    model = model_of()
    net = TrainingNetwork(model, OBJECTIVE)
    batch = with_base([random_example(2, teacher_k=8, max_group=1)])
    net(batch).loss(OBJECTIVE.counts(batch), 0.0).backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
