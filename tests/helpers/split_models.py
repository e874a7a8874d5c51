"""Rank 1 of test_parallel.py's models: `python split_models.py FD`. One process serves one model after another.

Frames on FD: RankMeet has the port where both meet. Progress names a case, RankPool begins it; then come the shapes of
its steps. `starve N M ...` before it: memory ends before these calls of the group.
"""

from __future__ import annotations

import socket
import sys
from dataclasses import replace

import torch
from torch import Tensor

from hamburger.engine.transport.wire import Progress, RankMeet, RankPool, frames
from hamburger.model.assemble import assemble_shard
from hamburger.model.config import ModelConfig
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.parallel.collectives import Collectives
from hamburger.model.parallel.step_calls import Kind, StepCalls
from hamburger.model.parallel.step_shape import shard_trunk
from hamburger.model.parallel.steps import ParallelSteps
from hamburger.model.rope_scaling import DynamicRopeScaling
from small_models import CPU, graft_config, grafted, random_tensors, trunk_config
from trunk_shapes import GEMMA3

SIZE, BLOCK_SIZE = 2, 4
_BIASED = trunk_config(qkv_bias=True, o_bias=True, mlp_bias=True)
_UNTIED = trunk_config(vocab_size=97, tie_word_embeddings=False)  # which 2 does not divide
CASES = {
    "positions": ModelConfig(trunk=trunk_config(), graft=graft_config()),
    "fused": ModelConfig(trunk=trunk_config(), graft=graft_config(features="fused", micro_norm=True)),
    "untied, biases": ModelConfig(trunk=replace(_BIASED, tie_word_embeddings=False), graft=graft_config()),
    "short list": ModelConfig(trunk=_UNTIED, graft=graft_config(features="fused", short_list_size=20)),
    "short list of one rank": ModelConfig(trunk=trunk_config(), graft=graft_config(short_list_size=9)),
    "qk norms": ModelConfig(trunk=trunk_config(qk_norm="head", head_dim=16), graft=graft_config(feature_layers=(0, 2))),
    "merge adapter": grafted(adapter_rank=32),
    "sliding": ModelConfig(trunk=trunk_config(sliding_window=5, sliding_layers=(1, 2)), graft=graft_config()),
    "norms after": ModelConfig(trunk=trunk_config(norms="after"), graft=graft_config()),
    "gemma": ModelConfig(trunk=trunk_config(**GEMMA3), graft=graft_config()),
    "unturned": ModelConfig(trunk=trunk_config(unturned_layers=(1, 3)), graft=graft_config()),
    "turned in part": ModelConfig(trunk=trunk_config(architecture="mistral", rotary_dim=4), graft=graft_config()),
    "plain": ModelConfig(trunk=trunk_config(num_kv_heads=4)),
    "plain, untied": ModelConfig(trunk=_UNTIED),
    "plain, dynamic rope": ModelConfig(
        trunk=trunk_config(max_position_embeddings=20, rope_scaling=DynamicRopeScaling(factor=16.0))
    ),
}


def tensors_of(case: str) -> dict[str, Tensor]:
    tensors = random_tensors(CASES[case], seed=1)
    if case == "short list of one rank":
        tensors["short_list"] = torch.arange(80, 89)
    return tensors


def shard_of(case: str, ranks: Collectives) -> ParallelSteps:
    """This rank's part of it."""
    return assemble_shard(CASES[case], tensors_of(case), ranks, dtype=torch.float32, device=CPU, max_positions=512)


class Starving(StepCalls):
    """Memory ends before some of the calls, counted over all steps from 0; those of an abandoned step do not count."""

    def __init__(self, steps: ParallelSteps, starved: set[int]) -> None:
        self.__dict__ |= steps.shard.calls.__dict__
        self.number, self._starved, self._suspended = 0, starved, False
        steps.shard.calls = self

    def abandon(self) -> list[int]:
        self._suspended = True
        lacking = super().abandon()
        self._suspended = False
        return lacking

    def _next(self, kind: Kind, x: Tensor) -> None:
        if not self._suspended and (kind, self.rank) != ("batch", 0):  # which needs no memory
            self.number += 1
            if self.number - 1 in self._starved:
                raise torch.OutOfMemoryError("starved")
        super()._next(kind, x)


def main() -> None:
    group, case = Collectives(1, SIZE), ""
    torch.set_num_threads(1)
    starved: set[int] = set()
    for value in frames(socket.socket(fileno=int(sys.argv[1]))):
        if isinstance(value, Progress):
            word, *numbers = value.line.split()
            if word == "starve":
                starved = set(map(int, numbers))
            else:
                case = value.line
        elif isinstance(value, RankMeet):
            group.join(CPU, value.port)
        elif isinstance(value, RankPool):
            steps = shard_of(case, group)
            Starving(steps, starved)
            starved = set()
            cache = PagedKVCache(shard_trunk(CASES[case].trunk, SIZE), value.num_blocks, BLOCK_SIZE, torch.float32, CPU)
        else:
            steps.follow(value, cache)


if __name__ == "__main__":
    main()
