"""What a recipe steps by: AdamW, or Muon for the graft's matrices and AdamW for all else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hamburger.model.device.devices import choose_dtype
from hamburger.training.errors import TrainingError
from hamburger.training.forward.trainable import is_graft
from hamburger.training.recipe import Recipe
from hamburger.training.run.muon import Muon


def optimizers(network: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Over the trunk's and the graft's trained parameters. A group's `peak` is its highest learning rate.

    Raises TrainingError where Muon is asked of matrices that are held in parts.
    """
    trained = {name.rpartition("model.")[2]: p for name, p in network.named_parameters() if p.requires_grad}
    whole = _matrices(network) if recipe.optimizer == "muon" else []
    matrices = {name: p for name, p in trained.items() if is_graft(name) and any(p is matrix for matrix in whole)}
    rates = {False: recipe.trunk_lr, True: recipe.graft_lr}
    groups: list[dict[str, Any]] = []
    for graft, rate in rates.items():
        rest = [p for name, p in trained.items() if is_graft(name) == graft and name not in matrices]
        if rest:
            groups.append({"params": rest, "peak": rate, "lr": rate})
    made: list[torch.optim.Optimizer] = []
    if groups:
        made.append(torch.optim.AdamW(groups, betas=recipe.betas, weight_decay=recipe.weight_decay))
    if matrices:
        made.append(_muon(list(matrices.values()), recipe))
    return made


def _matrices(network: nn.Module) -> list[Tensor]:
    """The weights of linears. One with a single output is a vector: orthogonal to nothing."""
    return [m.weight for m in network.modules() if isinstance(m, nn.Linear) and m.out_features > 1]


def _muon(matrices: Sequence[Tensor], recipe: Recipe) -> torch.optim.Optimizer:
    if any(matrix.ndim != 2 or hasattr(matrix, "full_tensor") for matrix in matrices):
        raise TrainingError("optimizer muon needs whole matrices, which FSDP cuts up: use optimizer adamw with it.")
    group = {"params": list(matrices), "peak": recipe.graft_lr, "lr": recipe.graft_lr}
    return Muon([group], dtype=choose_dtype("auto", matrices[0].device), weight_decay=recipe.weight_decay)
