"""Whole runs on a tiny model: it learns, it can be killed and resumed, and what it writes can be served."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from hamburger.training.errors import TrainingError
from hamburger.training.forward.network import Slots, trunk_states
from hamburger.training.forward.scoring import Scorer
from hamburger.training.recipe import Recipe
from hamburger.training.run.train import Job, StopRequest, _stop_signals
from hamburger.training.run.trainer import Trainer, rate_factor
from training_runs import (
    AGREEMENT,
    FUSED,
    GRAFT,
    MERGES,
    MadeRecord,
    MadeSource,
    losses,
    random_source,
    recipe,
    repetitive_source,
    validations,
    write_base,
)

QUIET = Console(quiet=True)
ADAPTER: dict[str, Any] = {"mode": "adapter", "rank": 2, "alpha": 4, "dropout": 0.2}
FROZEN: dict[str, Any] = {"graft": {**FUSED, "short_list_size": 50}, "trunk": {"mode": "frozen"}}


def train(made: Recipe, data: MadeSource, out: Path, **options: Any) -> bool:
    stop = options.pop("stop", StopRequest())
    return Job(made, [data], out, device="cpu", **options).run(QUIET, stop)


def stop_after(steps: int) -> Any:
    calls = iter(range(steps))
    return lambda: next(calls, None) == steps - 1


def test_it_learns_a_repetitive_text_and_its_groups_grow(tmp_path: Path) -> None:
    data = repetitive_source(12)
    made = recipe(
        write_base(tmp_path / "base"),
        graft=FUSED,
        objective=AGREEMENT,
        groups={"kind": "jitter", "single_share": 0.2},
        trunk_lr=3e-3,
        graft_lr=5e-3,
        max_steps=70,
        slots_per_pack=120,
        packs_per_step=1,
        validation_every=1000,
    )
    assert train(made, data, tmp_path / "run", validation=[repetitive_source(6)])
    curve = losses(tmp_path / "run")
    assert len(curve) == 70
    assert curve[-1] < 0.3 * curve[0]
    [report] = validations(tmp_path / "run")
    at_half = next(point for point in report["dial"] if point["confidence"] == 0.5)
    assert at_half["tokens_per_kv"] > 2
    assert at_half["extra_agreement"] > 0.8
    assert report["token_accuracy"][0] > 0.9


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"graft": FUSED, "trunk": ADAPTER, "objective": AGREEMENT, "groups": {"kind": "jitter", "single_share": 0.3}},
        {**FROZEN, "gradient_checkpointing": True},
        {**FROZEN, "optimizer": "muon"},
        MERGES,
    ],
    ids=["full", "adapter", "frozen", "muon", "merges"],
)
def test_a_run_that_is_stopped_and_resumed_takes_the_same_course(tmp_path: Path, changes: dict[str, Any]) -> None:
    data = random_source(8)
    made = recipe(write_base(tmp_path / "base"), max_steps=5, checkpoint_every=50, **changes)
    assert train(made, data, tmp_path / "whole")
    assert not train(made, data, tmp_path / "parts", stop=stop_after(1))
    assert not train(made, data, tmp_path / "parts", resume=True, stop=stop_after(2))
    assert train(made, data, tmp_path / "parts", resume=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    weights = [(tmp_path / run / "step-000005" / "model.safetensors").read_bytes() for run in ("whole", "parts")]
    assert weights[0] == weights[1]


def test_merges_are_learned_beside_a_graft_that_stays(tmp_path: Path) -> None:
    """Stage 1, then merges alone: the merge adapter comes in, and nothing else but the merger moves."""
    data = repetitive_source(8)
    base = write_base(tmp_path / "base")
    first = recipe(base, graft=FUSED, trunk={"mode": "frozen"}, objective=AGREEMENT, max_steps=1, checkpoint_every=1)
    assert train(first, data, tmp_path / "stage1")
    init = str(tmp_path / "stage1" / "step-000001")
    # The made text's teacher is not the base, whose states alone are learned here.
    merges = {**MERGES, "groups": {"kind": "data"}, "objective": {**MERGES["objective"], "distillation": 0.0}}
    second = recipe(base, init=init, trunk_lr=2e-3, graft_lr=2e-3, max_steps=40, slots_per_pack=120, packs_per_step=1,
                    validation_every=1000, checkpoint_every=1000, **merges)  # fmt: skip
    assert train(second, data, tmp_path / "stage2", validation=[repetitive_source(4)])
    steps = [json.loads(line) for line in (tmp_path / "stage2" / "metrics.jsonl").read_text().splitlines()]
    curve = [step["matching_loss"] for step in steps if "matching_loss" in step]
    assert len(curve) == 40
    assert sum(curve[-5:]) < 0.7 * sum(curve[:5])
    before, after = (load_file(Path(folder) / "model.safetensors") for folder in
                     (init, tmp_path / "stage2" / "step-000040"))  # fmt: skip
    added = {name for name in after if name not in before}
    assert added
    assert all(name.startswith("adapter.") for name in added)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert all(name.startswith("embedder.") for name in moved)
    [report] = validations(tmp_path / "stage2")
    assert report["agreement_after"].keys() == {"composed", "single"}
    assert len(report["base_agreement"]) == 4  # of the micro-steps too, though none was trained
    dial = {"trunk": {"mode": "frozen"}, "objective": {**AGREEMENT, "stop_target": "fidelity"}}
    third = recipe(base, init=str(tmp_path / "stage2" / "step-000040"), graft=FUSED, max_steps=2, **dial)
    assert train(third, data, tmp_path / "stage3")
    last = load_file(tmp_path / "stage3" / "step-000002" / "model.safetensors")
    moved = {name.partition(".")[0] for name in after if not torch.equal(after[name], last[name])}
    assert moved == {"micro_decoder", "stop_head"}


def test_a_run_that_is_killed_between_checkpoints_repeats_the_lost_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random_source(8)
    made = recipe(write_base(tmp_path / "base"), max_steps=5, checkpoint_every=2, keep=1)
    assert train(made, data, tmp_path / "whole")
    step = Trainer._train_step

    def killed(self: Trainer, stop: bool) -> Any:
        if self.step == 3:
            raise KeyboardInterrupt
        return step(self, stop)

    monkeypatch.setattr(Trainer, "_train_step", killed)
    with pytest.raises(KeyboardInterrupt):
        train(made, data, tmp_path / "parts")
    monkeypatch.undo()
    assert (tmp_path / "parts" / "latest").read_text() == "step-000002\n"
    assert train(made, data, tmp_path / "parts", resume=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    kept = sorted(path.name for path in (tmp_path / "parts").glob("step-*"))
    assert kept == ["step-000005"]


def test_the_loss_is_that_of_the_step_whatever_its_packs_are(tmp_path: Path) -> None:
    """Losses and gradients are normalised over the step, not over each pack."""
    data = random_source(6)
    base = write_base(tmp_path / "base")
    many = recipe(base, max_steps=3, slots_per_pack=1, packs_per_step=6)
    one = recipe(base, max_steps=3, slots_per_pack=10_000, packs_per_step=1)
    train(many, data, tmp_path / "many")
    train(one, data, tmp_path / "one")
    for name in ("loss", "grad_norm"):
        assert losses(tmp_path / "many", name) == pytest.approx(losses(tmp_path / "one", name), rel=1e-4)


def test_a_loss_that_is_not_finite_is_skipped_and_then_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe(write_base(tmp_path / "base"), max_steps=12, clip=1.0)
    job = Job(made, [random_source(8)], tmp_path / "run", device="cpu")
    trainer, forward = job.trainer, job.trainer.core.forward
    weight = trainer.core.model.embed_tokens.weight
    broken: set[int] = {1, 5, 6, 7, 8, 9}

    def sometimes(batch: Any) -> Any:
        outcome = forward(batch)
        bad = float("nan") if trainer.step in broken else 1.0
        return dataclasses.replace(outcome, token_loss=outcome.token_loss * bad)

    monkeypatch.setattr(trainer.core, "forward", sometimes)
    with pytest.raises(TrainingError, match="not finite for 5 steps in a row, up to step 10"):
        job.run(QUIET, StopRequest())
    assert trainer.skipped == 6
    assert bool(weight.isfinite().all())


def breaking_job(folder: Path, monkeypatch: pytest.MonkeyPatch, is_broken: Callable[[int], bool]) -> Job:
    """A run with a checkpoint at each step, of which one is kept. is_broken: whether a step's loss is not finite."""
    made = recipe(write_base(folder / "base"), max_steps=9, checkpoint_every=1, keep=1)
    job = Job(made, [random_source(8)], folder / "run", device="cpu")
    trainer, forward = job.trainer, job.trainer.core.forward

    def breaking(batch: Any) -> Any:
        outcome = forward(batch)
        factor = float("nan") if is_broken(trainer.step) else 1.0
        return dataclasses.replace(outcome, token_loss=outcome.token_loss * factor)

    monkeypatch.setattr(trainer.core, "forward", breaking)
    return job


def test_no_checkpoint_is_written_while_the_loss_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = breaking_job(tmp_path, monkeypatch, lambda step: step >= 2)
    with pytest.raises(TrainingError, match=r"not finite for 5 steps in a row, up to step 7: .* checkpoint \(--init"):
        job.run(QUIET, StopRequest())
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-000002"]
    assert (tmp_path / "run" / "latest").read_text() == "step-000002\n"


def test_where_no_checkpoint_was_written_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = breaking_job(tmp_path, monkeypatch, lambda step: True)
    with pytest.raises(TrainingError, match="up to step 5: begin anew with lower trunk_lr and graft_lr"):
        job.run(QUIET, StopRequest())


def test_a_stop_while_the_loss_is_broken_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = breaking_job(tmp_path, monkeypatch, lambda step: step == 2)
    assert not job.run(QUIET, stop_after(3))
    assert sorted(path.name for path in (tmp_path / "run").glob("step-*")) == ["step-000002", "step-000003"]


def test_a_signal_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    made = recipe(write_base(tmp_path / "base"), max_steps=3, checkpoint_every=50)
    before = signal.getsignal(signal.SIGTERM)
    with _stop_signals(QUIET) as stop:
        job = Job(made, [random_source(8)], tmp_path / "run", device="cpu")
        os.kill(os.getpid(), signal.SIGTERM)
        assert not job.run(QUIET, stop)
    assert signal.getsignal(signal.SIGTERM) is before
    assert (tmp_path / "run" / "latest").read_text() == "step-000001\n"


def test_a_run_goes_on_only_as_it_was_started(tmp_path: Path) -> None:
    data, made = random_source(8), recipe(write_base(tmp_path / "base"), max_steps=1)
    with pytest.raises(TrainingError, match="no checkpoint to resume from"):
        train(made, data, tmp_path / "run", resume=True)
    assert train(made, data, tmp_path / "run")
    with pytest.raises(TrainingError, match="already holds a run"):
        train(made, data, tmp_path / "run")
    with pytest.raises(TrainingError, match="another clip, seed"):
        train(made.model_copy(update={"seed": 1, "clip": 2.0}), data, tmp_path / "run", resume=True)
    with pytest.raises(TrainingError, match="8 examples, the data has 7"):
        train(made, random_source(7), tmp_path / "run", resume=True)
    turned = MadeSource(data.records[::-1])
    with pytest.raises(TrainingError, match="started with other examples, or the same in another order"):
        train(made, turned, tmp_path / "run", resume=True)
    path = tmp_path / "run" / "step-000001" / "training" / "state.pt"
    state = torch.load(path, weights_only=True)
    del (
        state["data"],
        state["recipe"]["optimizer"],
        state["recipe"]["objective"]["matching"],
    )  # written before there were these
    torch.save(state, path)
    other = {"optimizer": "muon", "objective": made.objective.model_copy(update={"matching": 1.0})}
    with pytest.raises(TrainingError, match="another objective, optimizer"):
        train(made.model_copy(update=other), data, tmp_path / "run", resume=True)
    assert train(made.model_copy(update={"keep": 5}), data, tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"graft": {**GRAFT, "max_group": 2}}, "graft.max_group is 2"),
        (
            {"graft": {**GRAFT, "max_group": 2}, "groups": {"kind": "jitter", "data_share": 0.5}},
            r"groups\.kind jitter with groups\.data_share 0",
        ),
        ({"objective": {"distillation": 1}}, "--top-k"),
    ],
)
def test_data_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    made = recipe(write_base(tmp_path / "base"), **changes)
    with pytest.raises(TrainingError, match=message):
        Job(made, [random_source(8, teacher_k=0)], tmp_path / "run", device="cpu")
    small = recipe(write_base(tmp_path / "small", vocab_size=20))
    with pytest.raises(TrainingError, match="token id"):
        Job(small, [random_source(8)], tmp_path / "run", device="cpu")


def test_the_learning_rate_rises_and_falls(tmp_path: Path) -> None:
    made = recipe(tmp_path, warmup_steps=4, min_lr_ratio=0.2)
    factors = [rate_factor(step, 12, made) for step in range(12)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert factors[8] == pytest.approx(0.6)
    assert 0.2 < factors[-1] < 0.25
    made = recipe(write_base(tmp_path / "base"), max_steps=3, warmup_steps=4, trunk_lr=1e-4, graft_lr=1e-3)
    job = Job(made, [random_source(8)], tmp_path / "run", device="cpu")
    job.run(QUIET, stop_after(2))
    groups = [group for optimizer in job.trainer.optimizers for group in optimizer.param_groups]
    assert [group["lr"] for group in groups] == pytest.approx([2e-4 / 3, 2e-3 / 3])


@pytest.mark.parametrize("graft", [GRAFT, FUSED], ids=["positions", "fused"])
def test_bfloat16_computes_near_float32(tmp_path: Path, graft: dict[str, Any]) -> None:
    data, base = random_source(8), write_base(tmp_path / "base")
    for precision in ("float32", "bfloat16"):
        made = recipe(base, precision=precision, graft=graft, trunk=ADAPTER | {"dropout": 0.0}, max_steps=2)
        train(made, data, tmp_path / precision)
    expected = losses(tmp_path / "float32")
    assert losses(tmp_path / "bfloat16") == pytest.approx(expected, rel=0.03)
    assert torch.is_autocast_enabled("cpu") is False


def test_a_frozen_trunks_states_can_come_from_the_data(tmp_path: Path) -> None:
    """They are those of the trunk, so that the losses are the same but for their rounding to bfloat16."""
    base = write_base(tmp_path / "base")
    changes = {"graft": FUSED, "trunk": {"mode": "frozen"}, "groups": {"kind": "single"}}
    # Each example is a pack, as stored states leave more room in one.
    made = recipe(base, objective=AGREEMENT | {"first_token": False}, max_steps=3, slots_per_pack=1, **changes)
    data = random_source(8)
    train(made, data, tmp_path / "computed")
    stored = MadeSource([dataclasses.replace(r, states=states_of(base, r)) for r in data.records], (0, 1))
    cached = made.model_copy(update={"cached_states": True})
    train(cached, stored, tmp_path / "stored")
    assert losses(tmp_path / "stored") == pytest.approx(losses(tmp_path / "computed"), rel=5e-3)
    with pytest.raises(TrainingError, match="segment it with --states 0,1"):
        train(cached, data, tmp_path / "none")
    other = cached.model_copy(update={"graft": made.graft.model_copy(update={"feature_layers": 1})})
    with pytest.raises(TrainingError, match=r"states after the layers \[1\]"):
        train(other, stored, tmp_path / "other")
    elsewhere = MadeSource(stored.records, (0, 2))  # as many layers, but others
    with pytest.raises(TrainingError, match=r"those of \[0, 2\]"):
        train(cached, elsewhere, tmp_path / "elsewhere")
    train(cached.model_copy(update={"init": str(tmp_path / "stored" / "step-000003")}), stored, tmp_path / "further")
    train(recipe(base, graft=FUSED, trunk=ADAPTER, max_steps=1), data, tmp_path / "adapted")
    changed = cached.model_copy(update={"init": str(tmp_path / "adapted" / "step-000001")})
    with pytest.raises(TrainingError, match=r"cached_states are .*step-000001 has a trunk of its own: leave out"):
        train(changed, stored, tmp_path / "changed")


def states_of(base: Path, record: MadeRecord) -> torch.Tensor:
    """What gives each trained token, after both layers of the base."""
    scorer = Scorer.load(str(base), device="cpu", dtype="float32")
    n = len(record.token_ids)
    slots = Slots(record.token_ids.long()[:, None], torch.ones(n, dtype=torch.int64), torch.arange(n), [n])
    with torch.no_grad():
        _, features = trunk_states(scorer.model, slots, (0, 1))
    return features[record.response.nonzero()[:, 0] - 1].bfloat16()
