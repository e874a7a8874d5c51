"""Which parameters step by what, and how far Muon goes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from hamburger.training.errors import TrainingError
from hamburger.training.recipe import read_recipe
from hamburger.training.run.muon import Muon
from hamburger.training.run.optimizers import optimizers
from hamburger.training.run.train import Job, StopRequest
from training_runs import AGREEMENT, FUSED, random_source, recipe, write_base

FROZEN = {"graft": FUSED, "trunk": {"mode": "frozen"}, "objective": AGREEMENT, "optimizer": "muon"}


def job_of(folder: Path, **changes: object) -> Job:
    made = recipe(write_base(folder / "base"), max_steps=1, warmup_steps=0, weight_decay=0.0, **changes)
    return Job(made, [random_source(8)], folder / "run", device="cpu")


def test_muon_steps_the_grafts_matrices_by_orthogonal_ones(tmp_path: Path) -> None:
    job = job_of(tmp_path, graft_lr=1e-3, **FROZEN)
    before = {name: p.detach().clone() for name, p in job.trainer.network.named_parameters() if p.requires_grad}
    assert job.run(Console(quiet=True), StopRequest())
    moved = {name: p.detach() - before[name] for name, p in job.trainer.network.named_parameters() if name in before}
    matrices = [name for name in moved if "micro_decoder.layers" in name and name.endswith("_proj.weight")]
    assert len(matrices) >= 4
    for name in matrices:
        step = moved[name]
        values = torch.linalg.svdvals(step) / (1e-3 * 0.2 * max(step.shape) ** 0.5)
        assert values.max() < 1.4, name
        assert values[5] > 0.6, name  # however much larger the gradient's first direction is
    # A vector steps by AdamW, whose first step is the rate in each direction.
    vector = moved[next(name for name in moved if name.endswith("stop_head.4.weight"))]
    assert vector.abs().max() == pytest.approx(1e-3, rel=1e-2)


def test_only_the_grafts_matrices_step_by_muon(tmp_path: Path) -> None:
    job = job_of(tmp_path, graft=FUSED, objective=AGREEMENT, groups={"kind": "jitter"}, optimizer="muon")
    adamw, muon = job.trainer.optimizers
    names = {id(p): name for name, p in job.trainer.network.named_parameters()}
    by_muon = [names[id(p)] for group in muon.param_groups for p in group["params"]]
    by_adamw = [names[id(p)] for group in adamw.param_groups for p in group["params"]]
    assert sorted(by_muon + by_adamw) == sorted(names.values())
    assert all("trunk" not in name and "embed_tokens" not in name and name.endswith("weight") for name in by_muon)
    assert any("embedder" in name for name in by_muon)
    assert any("trunk" in name for name in by_adamw)
    assert [len(job_of(tmp_path / "plain").trainer.optimizers), adamw.param_groups[0]["betas"]] == [1, (0.9, 0.95)]


def test_matrices_in_parts_are_refused(tmp_path: Path) -> None:
    job = job_of(tmp_path, **FROZEN)
    linear = next(m for m in job.trainer.network.modules() if isinstance(m, torch.nn.Linear) and m.weight.requires_grad)
    linear.weight = torch.nn.Parameter(linear.weight.detach().flatten())  # as FSDP leaves it
    with pytest.raises(TrainingError, match="use optimizer adamw"):
        optimizers(job.trainer.network, job.trainer.recipe)


def test_the_drafters_recipe_steps_by_muon() -> None:
    assert {name: read_recipe(name).optimizer for name in ("frozen", "adapter", "published")} == {
        "frozen": "muon",
        "adapter": "adamw",
        "published": "adamw",
    }


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
def test_muon_is_pytorchs_in_bfloat16_and_near_it_in_float32(shape: tuple[int, int]) -> None:
    """Three steps, with momentum and weight decay; and the state of one is the other's."""
    generator = torch.Generator().manual_seed(3)
    start, grads = torch.randn(shape, generator=generator), torch.randn(3, *shape, generator=generator)

    def stepped(made: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]) -> tuple[torch.Tensor, dict[str, Any]]:
        weight = torch.nn.Parameter(start.clone())
        optimizer = made([{"params": [weight], "lr": 0.02}])
        for grad in grads:
            weight.grad = grad.clone()
            optimizer.step()
        return weight.detach(), optimizer.state_dict()

    theirs, state = stepped(lambda groups: torch.optim.Muon(groups, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))
    same, own = stepped(lambda groups: Muon(groups, dtype=torch.bfloat16, weight_decay=0.1))
    near, _ = stepped(lambda groups: Muon(groups, dtype=torch.float32, weight_decay=0.1))
    assert torch.equal(same, theirs)
    assert (near - theirs).norm() < 0.02 * (theirs - start).norm()
    assert own["param_groups"] == state["param_groups"]
    assert torch.equal(own["state"][0]["momentum_buffer"], state["state"][0]["momentum_buffer"])
