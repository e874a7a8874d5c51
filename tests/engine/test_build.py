"""What the start of an engine tells of the graphs that it captures."""

from __future__ import annotations

from hamburger.engine.build import tell_captures
from hamburger.engine.device.memory import decode_graphs
from hamburger.engine.types.config import EngineArgs
from hamburger.model.config import ModelConfig
from hamburger.model.kv_cache import PagedKVCache
from small_models import CPU, graft_config, random_model, trunk_config


def test_a_start_tells_of_each_quarter_of_its_graphs() -> None:
    args = EngineArgs(max_num_seqs=32, block_size=4)
    model = random_model(ModelConfig(trunk=trunk_config(), graft=graft_config()), static_shapes=True)
    cache = PagedKVCache(model.config.trunk, 8, 4, model.state_dtype, CPU)
    told: list[str] = []
    decode_graphs(model, cache, args, "composed", 16).prepare(
        lambda done, total: tell_captures(told.append, done, total)
    )
    assert told == [f"capturing CUDA graphs: {done} of 7 batch sizes" for done in (0, 2, 4, 6)]
