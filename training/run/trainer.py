"""The training loop: packs in, steps, checkpoints out. It knows no files but through RunFolder and Journal.

A step is a function of (recipe, data, weights, optimizer state, step number): shuffling, jitter and dropout draw from
(seed, step) alone. So a run that is killed anywhere and resumed takes the same course (on a GPU but for kernels that
round differently from run to run).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from hamburger.training.batches.batches import TrainBatch
from hamburger.training.batches.packs import PackStream
from hamburger.training.errors import TrainingError
from hamburger.training.forward.trainable import Trainable
from hamburger.training.loss.objective import Objective, TrainingNetwork
from hamburger.training.recipe import Recipe
from hamburger.training.run.folder import RunFolder
from hamburger.training.run.journal import Journal, was_validated
from hamburger.training.run.optimizers import optimizers
from hamburger.training.run.validation import Validator

_BROKEN_STEPS = 5  # in a row, before training gives up
_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """What a trainer works with. num_examples, data_print: of the data, which a resumed run compares."""

    recipe: Recipe
    trainable: Trainable
    stream: PackStream
    validator: Validator | None
    accelerator: Accelerator
    run: RunFolder
    compute: torch.dtype
    num_examples: int
    data_print: str


class Trainer:
    """Trains one network. `load` puts it where a checkpoint's training state says."""

    def __init__(self, parts: Parts) -> None:
        recipe, self.accelerator = parts.recipe, parts.accelerator
        if recipe.packs_per_step % self.accelerator.num_processes:
            raise TrainingError(
                f"packs_per_step is {recipe.packs_per_step}: it must be a multiple of the "
                f"{self.accelerator.num_processes} processes."
            )
        self.parts, self.recipe = parts, recipe
        objective = Objective(**recipe.objective.model_dump())
        self.core = TrainingNetwork(parts.trainable.model, objective, checkpointing=recipe.gradient_checkpointing)
        self.network: nn.Module = self.accelerator.prepare(self.core)
        self.network.train()
        self.optimizers = optimizers(self.network, recipe)
        self.total_steps = recipe.max_steps or parts.stream.steps(recipe.epochs)
        self.step = 0
        self.skipped = 0
        self.lacks_validation = False
        self._broken = 0

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's state (folder.read_state); the weights must be that checkpoint's already."""
        self.step, self.skipped, self._broken = state["step"], state["skipped"], state["broken"]
        # A run may be killed between a checkpoint and its validation.
        self.lacks_validation = self._validation_is_due() and not was_validated(self.parts.run.path, self.step)
        set_optimizer_state_dict(self.network, self.optimizers, state["optimizer"], options=_FULL)

    def run(self, journal: Journal | None, stop: Callable[[], bool] = lambda: False) -> bool:
        """Train to the end, or until some process's `stop` says so; a checkpoint is written in both cases.

        journal: of the main process, None in the others. Returns whether the run is complete. Raises TrainingError
        when the loss is not finite several times in a row, or at the end.
        """
        if self.lacks_validation:
            self._validate(journal)
        while self.step < self.total_steps:
            stopped, values = self._train_step(stop())
            self.step += 1
            ended = self.step == self.total_steps
            if journal is not None:
                journal.step(self.step, values)
            # First the checkpoint: a stop may leave little time, and FSDP's weights are whole after a validation.
            # While the loss is broken the weights may be: `latest` stays with good ones.
            if ended or stopped or (self.step % self.recipe.checkpoint_every == 0 and not self._broken):
                self.save()
            if self._validation_is_due():
                self._validate(journal)
            if stopped:
                return ended
        if self._broken:
            raise TrainingError(
                f"the loss was not finite in the last {self._broken} steps, so the last checkpoint may be broken: "
                "begin from an earlier one (--init) with lower trunk_lr and graft_lr."
            )
        return True

    def _validation_is_due(self) -> bool:
        due = self.step == self.total_steps or self.step % self.recipe.validation_every == 0
        return due and self.parts.validator is not None

    def _validate(self, journal: Journal | None) -> None:
        assert self.parts.validator is not None
        report = self.parts.validator(self.network, self.core, self._amp())
        if journal is not None:
            journal.validation(self.step, report)

    def save(self) -> None:
        """Write a checkpoint; every process must call it."""
        state = {
            "step": self.step,
            "skipped": self.skipped,
            "broken": self._broken,
            "num_examples": self.parts.num_examples,
            "data": self.parts.data_print,
            "recipe": self.recipe.shaping(),
            "optimizer": get_optimizer_state_dict(self.network, self.optimizers, options=_FULL),
        }
        weights = get_model_state_dict(self.network, options=_FULL)
        if self.accelerator.is_main_process:
            own = {name.removeprefix("model."): t for name, t in weights.items() if isinstance(t, Tensor)}
            trainable, keep = self.parts.trainable, None if self._broken else self.recipe.keep
            self.parts.run.save(self.step, lambda folder: trainable.save(folder, own), state, keep)
        self.accelerator.wait_for_everyone()

    def _train_step(self, stop: bool) -> tuple[bool, dict[str, float]]:
        began = time.perf_counter()
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        packs = self.parts.stream.packs(self.step)
        torch.manual_seed(((self.recipe.seed * 1_000_003 + self.step) * 1009 + rank) % 2**63)  # of dropout
        max_group, cached = self.core.graft.max_group, self.recipe.cached_states
        matched = self.recipe.objective.matching > 0
        batches = [p.collate(max_group, cached_states=cached, with_base=matched) for p in packs[rank::world]]
        counts, stopped = self._agree(batches, stop)
        sums = torch.zeros(3, device=self.accelerator.device)
        for batch in batches:
            with nullcontext() if batch is batches[-1] else self.accelerator.no_sync(self.network):
                with self._amp():
                    outcome = self.network(batch.to(self.accelerator.device))
                # Processes average their gradients; the loss is a sum over all of them.
                (outcome.loss(counts, self.recipe.objective.stop) * world).backward()
            sums += outcome.losses().detach()
        token, stop_loss, matching = (self.accelerator.reduce(sums, "sum") / counts.clamp(min=1)).tolist()
        trained = [p for p in self.network.parameters() if p.requires_grad]
        norm = float(self.accelerator.clip_grad_norm_(trained, self.recipe.clip))
        rate = rate_factor(self.step, self.total_steps, self.recipe)
        self._update(rate, math.isfinite(norm) and math.isfinite(token + stop_loss + matching))
        tokens = sum(pack.num_response_tokens for pack in packs)
        return stopped, {
            "loss": token + self.recipe.objective.stop * stop_loss + matching,
            "token_loss": token,
            "stop_loss": stop_loss,
            **({"matching_loss": matching} if matched else {}),
            "grad_norm": norm,
            "trunk_lr": rate * self.recipe.trunk_lr,
            "graft_lr": rate * self.recipe.graft_lr,
            "response_tokens": float(tokens),
            "slots": float(sum(pack.num_slots for pack in packs)),
            "tokens_per_second": tokens / (time.perf_counter() - began),
            "skipped": float(self.skipped),
        }

    def _update(self, rate: float, finite: bool) -> None:
        """Step the optimizer, unless the gradient cannot be used."""
        if finite:
            self._broken = 0
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate * group["peak"]
                optimizer.step()
        else:
            self.skipped += 1
            self._broken += 1
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        if self._broken == _BROKEN_STEPS:
            begin = "anew" if self.parts.run.latest() is None else "from the last checkpoint (--init)"
            raise TrainingError(
                f"the loss was not finite for {_BROKEN_STEPS} steps in a row, up to step {self.step + 1}: begin "
                f"{begin} with lower trunk_lr and graft_lr."
            )

    def _agree(self, batches: Sequence[TrainBatch], stop: bool) -> tuple[Tensor, bool]:
        """What all processes' packs of the step count together (Objective.counts), and whether any process stops."""
        counts = torch.stack([self.core.objective.counts(batch) for batch in batches]).sum(0)
        mine = torch.cat((counts, torch.tensor([float(stop)]))).to(self.accelerator.device)
        total: Tensor = self.accelerator.reduce(mine, "sum")
        return total[:-1], bool(total[-1] > 0)

    def _amp(self) -> torch.autocast:
        kind = self.parts.compute
        enabled = kind != torch.float32
        return torch.autocast(self.accelerator.device.type, kind if enabled else torch.bfloat16, enabled=enabled)


def rate_factor(step: int, total: int, recipe: Recipe) -> float:
    """What the peak learning rates are multiplied with: up in a line over the warm-up, then down along a cosine."""
    warmup = min(recipe.warmup_steps, total)
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, total - warmup)
    return recipe.min_lr_ratio + (1 - recipe.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * done))
