"""What tensor parallelism adds to building an engine: rank 0's side, and the whole of every other rank's.

    rank 0          read the checkpoint, start the ranks, take its part, size the pool ─► share it ─► meet ─► lead
    other ranks     read the checkpoint, take their part, tell what they have for the pool ──────► meet ─► follow

Each rank reads the files itself and moves only its part to its device. Torch is imported here.
"""

from __future__ import annotations

import socket

import torch

from hamburger.engine.config import EngineArgs
from hamburger.engine.load import find, model_of, rank_pool_bytes
from hamburger.engine.ranks import LeadingRunner, OnLost, Ranks
from hamburger.engine.runner import Runner
from hamburger.engine.wire import RankPool
from hamburger.model.config import TrunkConfig
from hamburger.model.group import Group
from hamburger.model.hamburger import HamburgerModel
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.parallel import ParallelModel
from hamburger.model.shards import shard_trunk


class Leader:
    """Rank 0 and the processes beside it. on_lost: as for build_core."""

    def __init__(self, args: EngineArgs, on_lost: OnLost | None) -> None:
        self._args = args
        self.group = group = Group(0, args.tensor_parallel_size)
        self.ranks = Ranks(args, on_lost or (lambda failed: group.abort()))

    def pool_bytes(self, device: torch.device) -> int:
        """Bytes for the whole pool, by the rank that has least. Waits until every rank has its weights, and raises
        what kept one from it."""
        return self._args.tensor_parallel_size * min(self.ranks.loaded(), rank_pool_bytes(self._args, device))

    def runner(self, model: HamburgerModel, num_blocks: int, dtype: torch.dtype, device: torch.device) -> LeadingRunner:
        """Share the pool, meet the other ranks, and lead them from now on."""
        parallel = _parallel(model)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.ranks.share(RankPool(num_blocks, listener.getsockname()[1]))
            self.group.host(device, listener)
        parallel.lead(self.ranks.announce)
        cache = _cache(model.config.trunk, self._args, num_blocks, dtype, device)
        return LeadingRunner(Runner(parallel, cache), self.ranks)


class RankBuild:
    """Another rank's part of the weights. pool_bytes: what it has for its part of the KV pool.

    Raises CheckpointError or ConfigError.
    """

    def __init__(self, args: EngineArgs, rank: int) -> None:
        self._args = args
        self._group = Group(rank, args.tensor_parallel_size)
        found = find(args, rank)
        self._device, self._dtype = found.device, found.dtype
        self.model = _parallel(model_of(found, args, self._group))
        self.pool_bytes = rank_pool_bytes(args, found.device)

    def meet(self, pool: RankPool) -> PagedKVCache:
        """Meet the others, and make this rank's KV cache."""
        self._group.join(self._device, pool.port)
        return _cache(self.model.config.trunk, self._args, pool.num_blocks, self._dtype, self._device)


def _parallel(model: HamburgerModel) -> ParallelModel:
    if not isinstance(model, ParallelModel):
        raise TypeError("a model that was made with a group is a ParallelModel.")
    return model


def _cache(
    trunk: TrunkConfig, args: EngineArgs, num_blocks: int, dtype: torch.dtype, device: torch.device
) -> PagedKVCache:
    return PagedKVCache(shard_trunk(trunk, args.tensor_parallel_size), num_blocks, args.block_size, dtype, device)
