"""What tensor parallelism adds to building an engine: rank 0's side, and the whole of every other rank's.

    rank 0          start the ranks, read the checkpoint, take its part ─► meet ─► measure ─► size the pool ─► lead
    other ranks                      read the checkpoint, take their part ─► meet ─► measure ─► tell ─► cache ─► follow

Each rank reads the files itself and moves only its part to its device. On GPUs all of them measure what the largest
steps take of their own memory, in steps that they run together. Torch is imported here.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from hamburger.engine.device.load import rank_pool_bytes, resolve, shard_steps_of
from hamburger.engine.device.runner import Runner
from hamburger.engine.ranks.ranks import LeadingRunner, OnLost, Ranks
from hamburger.engine.transport.wire import RankMeet, RankPool
from hamburger.engine.types.config import EngineArgs
from hamburger.model.config import ConfigError
from hamburger.model.device.out_of_memory import out_of_memory_reason
from hamburger.model.graphs.step_memory import NUM_LARGEST, CudaMeter, Meter, most_bytes, small_cache
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.parallel.collectives import Collectives
from hamburger.model.parallel.step_shape import StepShape
from hamburger.model.parallel.steps import ParallelSteps


class Leader:
    """Rank 0 and the processes beside it. on_lost: as for build_core."""

    def __init__(self, args: EngineArgs, on_lost: OnLost | None) -> None:
        self._args = args
        self.collectives = collectives = Collectives(0, args.tensor_parallel_size)
        self.ranks = Ranks(args, on_lost or (lambda failed: collectives.abort()))

    def meet(self, steps: ParallelSteps, *, measures: bool) -> None:
        """Meet the other ranks, and lead them from now on. Waits until every rank has its weights, and raises what kept
        one from it. measures: the first steps are those that step_bytes (memory.py) measures."""
        self.ranks.loaded()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.ranks.tell(RankMeet(listener.getsockname()[1], NUM_LARGEST if measures else 0))
            self.collectives.host(steps.device, listener)
        steps.lead(self.ranks.tell)

    def pool_bytes(self, own: int) -> int:
        """Bytes for the whole pool, by the rank that has least; own: what this one has."""
        return self._args.tensor_parallel_size * min(self.ranks.memory(), own)

    def runner(self, runner: Runner, num_blocks: int) -> LeadingRunner:
        """runner: has this rank's part of the pool, of num_blocks; the others make theirs now."""
        self.ranks.tell(RankPool(num_blocks))
        return LeadingRunner(runner, self.ranks)


class RankBuild:
    """Another rank's part of the weights. Raises CheckpointError or ConfigError."""

    def __init__(self, args: EngineArgs, rank: int) -> None:
        self._args = args
        self._collectives = Collectives(rank, args.tensor_parallel_size)
        resolved = resolve(args, rank)
        self._device, self._kv_dtype = resolved.device, resolved.kv_dtype
        self.steps = shard_steps_of(resolved, args, self._collectives)

    def meet(self, meet: RankMeet, next_shape: Callable[[], StepShape], meter: Meter | None = None) -> int:
        """Meet the others. Bytes for this rank's part of the KV pool, after the steps that are to be measured.

        meter: a GPU's unless it is given."""
        self._collectives.join(self._device, meet.port)
        for_steps = 0
        if meet.num_measured:
            meter = meter or CudaMeter(self._device)
            for_steps = self._measured(meet.num_measured, next_shape, meter)
            meter.begin()  # all of it can be had again
        return rank_pool_bytes(self._args, self._device, for_steps)

    def _measured(self, number: int, next_shape: Callable[[], StepShape], meter: Meter) -> int:
        cache = small_cache(self.steps, self._args.max_num_batched_slots, self._args.block_size, self._kv_dtype)
        return most_bytes(number, lambda: self.steps.follow(next_shape(), cache), meter)

    def cache(self, pool: RankPool) -> PagedKVCache:
        """This rank's part of the pool. Raises ConfigError."""
        try:
            return PagedKVCache(
                self.steps.trunk_config, pool.num_blocks, self._args.block_size, self._kv_dtype, self._device
            )
        except (RuntimeError, MemoryError) as error:
            if (said := out_of_memory_reason(error)) is None:
                raise
            raise ConfigError(
                f"The KV pool does not fit beside the weights on {self._device}: lower kv_cache_memory. ({said})"
            ) from error
