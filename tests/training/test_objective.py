"""The objective: the reference's numbers, no leak between packed examples, and each loss against its plain formula."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from examples import MadeExample, example, random_example
from hamburger.model.assemble import model_of
from hamburger.model.checkpoints.load import load_checkpoint
from hamburger.model.checkpoints.sources import ModelSource
from hamburger.model.config import ModelConfig
from hamburger.training.batches.batches import TrainBatch, collate, collate_states
from hamburger.training.forward.network import trunk_states
from hamburger.training.loss.objective import Objective, Outcome, TrainingNetwork
from small_models import CPU, graft_config, plain_model, steps_of, teacher_forced, trunk_config

DATA = Path(__file__).parent.parent / "data" / "golden-tiny"
FUSED: dict[str, Any] = {"features": "fused", "micro_norm": True}


def network(objective: Objective | None = None, **graft: Any) -> TrainingNetwork:
    config = ModelConfig(trunk=trunk_config(), graft=graft_config(**graft))
    model = plain_model(config)
    model.requires_grad_(True)
    return TrainingNetwork(model, objective or Objective())


def value(net: TrainingNetwork, batch: TrainBatch) -> torch.Tensor:
    outcome: Outcome = net(batch)
    return outcome.loss(net.objective.counts(batch), net.objective.stop)


def test_the_published_objective_is_that_of_the_served_model() -> None:
    """Against logits and stop values of the paged, served forward, one example at a time."""
    net = network()
    made = [random_example(seed, turns=1) for seed in range(3)]
    token_loss, stop_loss, count = 0.0, 0.0, 0
    for e in made:
        prompt = int((~e.response).sum())
        sizes = e.group_sizes[prompt:][e.group_sizes[prompt:] > 0].tolist()
        logits, stops = teacher_forced(steps_of(net.model), e.token_ids.tolist(), prompt, sizes)
        ends = torch.cat([F.one_hot(torch.tensor(n - 1), n) for n in sizes]).float()
        token_loss += F.cross_entropy(logits, e.token_ids[prompt:].long(), reduction="sum").item()
        stop_loss += F.binary_cross_entropy_with_logits(stops, ends, reduction="sum").item()
        count += len(ends)
    expected = (token_loss + 0.5 * stop_loss) / count
    assert value(net, collate(made, 4)).item() == pytest.approx(expected, rel=1e-5)


def test_the_reference_numbers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((DATA / "base_config.json").read_text())
    source = ModelSource("lightning", "tiny", DATA / "reference-tiny.ckpt", tmp_path, tmp_path)
    checkpoint = load_checkpoint(source, torch.float32)
    tensors = checkpoint.tensors
    model = model_of(checkpoint.config, tensors, dtype=torch.float32, device=CPU, max_positions=512)
    net = TrainingNetwork(model, Objective())
    cases = json.loads((DATA / "golden.json").read_text())["forward"]
    batch = collate([golden_example(**case) for case in cases], 4)
    outcome = net(batch)
    trained = net.objective.token_mask(batch)
    stops = torch.tensor([x for case in cases for x in case["stop_logits"]])
    torch.testing.assert_close(outcome.stop_logits[trained], stops, atol=1e-3, rtol=0)
    assert outcome.predicted[trained].tolist() == [ids[0] for case in cases for ids in case["top5_ids"]]


def golden_example(input_ids: list[int], inst_len: int, steps: list[int], **_: object) -> MadeExample:
    answer = iter(input_ids[inst_len:])
    return example([(input_ids[:inst_len], [[next(answer) for _ in range(size)] for size in steps])])


@pytest.mark.parametrize("graft", [{}, FUSED, {"short_list_size": 40, **FUSED}], ids=["published", "fused", "short"])
@pytest.mark.parametrize("lookahead", ["group", "dense"])
def test_packed_examples_do_not_see_each_other(graft: dict[str, Any], lookahead: str) -> None:
    objective = Objective(distillation=1.0, stop_target="agreement", lookahead=lookahead)
    net = network(objective, **graft)
    made = [random_example(seed, teacher_k=8) for seed in range(4)]
    alone = [net(collate([e], 4)) for e in made]
    together = net(collate(made, 4))
    torch.testing.assert_close(together.token_loss, sum(o.token_loss for o in alone), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(together.stop_loss, sum(o.stop_loss for o in alone), rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(together.token_loss + together.stop_loss, list(net.parameters()), allow_unused=True)
    one_by_one = torch.autograd.grad(
        sum(o.token_loss + o.stop_loss for o in alone), list(net.parameters()), allow_unused=True
    )
    for ours, theirs in zip(gradients, one_by_one, strict=True):
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_distillation_is_the_divergence_from_the_renormalised_teacher() -> None:
    net = network(Objective(cross_entropy=0, distillation=1.0, stop=0, lookahead="dense"))
    batch = collate([random_example(5, teacher_k=8)], 4)
    assert batch.teacher_ids is not None
    assert batch.teacher_logprobs is not None
    hidden, _ = trunk_states(net.model, batch.slots, net.graft.feature_layers)
    logprobs = F.linear(hidden[batch.emit], net.model.head_weight).log_softmax(-1)
    wanted = batch.teacher_logprobs[:, 0].softmax(-1)
    plain = F.kl_div(logprobs.gather(1, batch.teacher_ids[:, 0]), wanted, reduction="sum")
    first_only = TrainingNetwork(net.model, Objective(cross_entropy=0, distillation=1.0, lookahead="group"))
    alone = replace(batch, next_sizes=torch.ones_like(batch.next_sizes))
    torch.testing.assert_close(first_only(alone).token_loss, plain, rtol=1e-4, atol=1e-4)


def test_the_agreement_target_is_the_bases_probability_of_the_likeliest_next_token() -> None:
    objective = Objective(stop_target="agreement", lookahead="dense")
    net = network(objective, **FUSED)
    batch = collate([random_example(7, teacher_k=96)], 4)  # a teacher that knows every id
    outcome = net(batch)
    mask = objective.stop_mask(batch)
    assert not mask[:, -1].any()  # the last token of a full group has no successor
    wanted = F.pad(1 - outcome.base_probs[:, 1:], (0, 1))[mask]
    plain = F.binary_cross_entropy_with_logits(outcome.stop_logits[mask], wanted, reduction="sum")
    torch.testing.assert_close(outcome.stop_loss, plain)
    assert batch.teacher_ids is not None
    assert batch.teacher_logprobs is not None
    row, j = mask.nonzero()[0].tolist()
    place = (batch.teacher_ids[row, j + 1] == outcome.predicted[row, j + 1]).nonzero().item()
    base_prob = batch.teacher_logprobs[row, j + 1, int(place)].exp()
    torch.testing.assert_close(outcome.base_probs[row, j + 1], base_prob)


def test_a_token_off_the_short_list_is_not_trained_but_can_be_stopped_at() -> None:
    net = network(short_list_size=2, **FUSED)
    listed = net.model.short_list.tolist()
    off = next(i for i in range(2, 96) if i not in listed)
    batch = collate([example([([5], [[6, off], [listed[0]]])])], 4)
    outcome = net(batch)
    hidden, _ = trunk_states(net.model, batch.slots, ())
    logits = F.linear(hidden[batch.emit], net.model.head_weight)
    firsts = F.cross_entropy(logits, batch.targets[:, 0], reduction="sum")
    torch.testing.assert_close(outcome.token_loss, firsts)
    assert outcome.predicted[0, 1].item() in listed


def test_without_the_first_token_a_frozen_trunks_stored_states_give_the_same_loss() -> None:
    objective = Objective(lookahead="dense", stop_target="agreement", distillation=1.0, first_token=False)
    net = network(objective, **FUSED)
    made = random_example(11, teacher_k=8, max_group=1)
    batch = collate([made], 4)
    with torch.no_grad():
        _, features = trunk_states(net.model, batch.slots, net.graft.feature_layers)
    held = replace(made, states=features[batch.emit])
    torch.testing.assert_close(value(net, collate_states([held], 4)), value(net, batch), rtol=1e-4, atol=1e-5)
    assert objective.counts(batch)[0] < Objective(lookahead="dense").counts(batch)[0]
