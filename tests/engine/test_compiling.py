"""What the start of an engine says of compiled decoding steps, and where it refuses them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hamburger.engine.build import build_core
from hamburger.engine.compiling import compiling_of, prepare
from hamburger.engine.config import EngineArgs
from hamburger.engine.memory import decode_graphs
from hamburger.model.compiled_pieces import CACHE_VARIABLE
from hamburger.model.config import ConfigError, ModelConfig
from hamburger.model.kv_cache import PagedKVCache
from small_models import graft_config, random_model, trunk_config


def test_a_start_tells_what_it_compiles_how_long_that_took_and_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "kept"))
    args = EngineArgs(max_num_seqs=8, compile_num_seqs=2, block_size=4)
    compiling = compiling_of(args, "torch", captures=True)
    assert compiling is not None
    compiling.compiler = lambda function: function
    model = random_model(ModelConfig(trunk=trunk_config(), graft=graft_config()), masked=True)
    cache = PagedKVCache(model.config.trunk, 8, 4, model.state_dtype, model.embed_tokens.weight.device)
    told: list[str] = []
    prepare(decode_graphs(model, cache, args, 16, compiling), 8, compiling, told.append)
    assert told[:-1] == [
        "capturing CUDA graphs: 0 of 4 batch sizes",
        "capturing CUDA graphs: 1 of 4 batch sizes",
        "compiling decoding steps of 2 sequences: 2 of 4 batch sizes are done",
        "compiling decoding steps of 1 sequence: 3 of 4 batch sizes are done",
    ]
    assert told[-1].startswith("decoding steps of 1, 2 sequences are compiled: ")
    assert told[-1].endswith(f" s; {tmp_path / 'kept'} keeps them")
    assert (tmp_path / "kept").is_dir()


def test_without_being_asked_nothing_is_compiled() -> None:
    assert compiling_of(EngineArgs(), "triton", captures=True) is None


def test_a_cpu_has_no_steps_to_compile() -> None:
    with pytest.raises(ConfigError, match=r"^compile_num_seqs is 3, but only steps that become CUDA graphs .* use 0"):
        build_core(EngineArgs(model="builtin", device="cpu", compile_num_seqs=3))
