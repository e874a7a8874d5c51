"""One process of a distributed run, for tests: python training_worker.py BASE OUT, started by a launcher."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState  # type: ignore[import-untyped]
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from hamburger.model.modules.layers import DecoderLayer
from hamburger.training.recipe import Recipe
from hamburger.training.run.train import Job
from training_runs import AGREEMENT, FUSED, random_source, recipe


def distributed_recipe(base: Path) -> Recipe:
    """Some packs have no merged group, so they leave the merger without a gradient."""
    return recipe(
        base,
        graft=FUSED,
        objective=AGREEMENT,
        groups={"kind": "jitter", "single_share": 0.5},
        packs_per_step=4,
        max_steps=6,
        validation_share=0.3,
        validation_every=3,
        checkpoint_every=50,
    )


class _Sharding:
    """What accelerate's FSDP 2 does with a network on GPUs, for CPUs, where accelerate offers none."""

    @staticmethod
    def prepare(accelerator: Accelerator, network: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (accelerator.num_processes,))
        for module in network.modules():
            if isinstance(module, DecoderLayer):
                fully_shard(module, mesh=mesh)
        fully_shard(network, mesh=mesh)
        return network

    @staticmethod
    @contextmanager
    def no_sync(accelerator: Accelerator, network: FSDPModule) -> Iterator[None]:
        network.set_requires_gradient_sync(False)
        yield
        network.set_requires_gradient_sync(True)

    @staticmethod
    def clip_grad_norm_(accelerator: Accelerator, parameters: list[Tensor], most: float) -> Tensor:
        norm = torch.nn.utils.clip_grad_norm_(parameters, most)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


def shard() -> None:
    """From here on this process shards its networks' parameters over all processes."""
    for name in ("prepare", "no_sync", "clip_grad_norm_"):
        setattr(Accelerator, name, getattr(_Sharding, name))


def train(base: Path, out: Path) -> int:
    """Train, stop and go on; 0 if all was as it should be."""
    made, data = distributed_recipe(base), [random_source(24)]
    job = Job(made, data, out, device="cpu")
    rank = job.accelerator.process_index
    # Only the second process is asked to stop, in its third step.
    if job.run(Console(quiet=True), lambda: rank == 1 and job.trainer.step == 2):
        return 1
    return 0 if Job(made, data, out, device="cpu", resume=True).run(Console(quiet=True), lambda: False) else 2


def main(base: Path, out: Path) -> int:
    """Train in OUT/replicated (DDP) and in OUT/sharded (FSDP 2)."""
    failed = train(base, out / "replicated")
    shard()
    failed = failed or train(base, out / "sharded")
    PartialState().destroy_process_group()  # its threads would else be alive when the interpreter is not
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
