"""What the start of an engine says of compiled decoding steps, and where it refuses them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import pytest

from hamburger.engine.build import build_core
from hamburger.engine.compiling import check_form, compiling_of, prepare
from hamburger.engine.device.memory import decode_graphs
from hamburger.engine.types.config import DecodeGraphForm, EngineArgs
from hamburger.model.compiled_pieces import CACHE_VARIABLE
from hamburger.model.config import ConfigError, ModelConfig
from hamburger.model.graphs.decode_graphs import Compiling, DecodeGraphs
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
    assert told[:-2] == [
        "capturing CUDA graphs: 0 of 4 batch sizes",
        "capturing CUDA graphs: 1 of 4 batch sizes",
        "compiling decoding steps of 2 sequences: 2 of 4 batch sizes are done",
        "compiling decoding steps of 1 sequence: 3 of 4 batch sizes are done",
    ]
    cost = r"a micro-step of {} takes \d+\.\d{{3}} ms, asking whether groups go on \d+\.\d{{3}} ms"
    assert re.fullmatch(f"early exit: {cost.format('1 sequence')}, {cost.format('8 sequences')}", told[-2])
    assert told[-1].startswith("decoding steps of 1, 2 sequences are compiled: ")
    assert told[-1].endswith(f" s; {tmp_path / 'kept'} keeps them")
    assert (tmp_path / "kept").is_dir()


def test_without_being_asked_nothing_is_compiled() -> None:
    assert compiling_of(EngineArgs(), "triton", captures=True) is None


def test_a_cpu_has_no_steps_to_compile() -> None:
    with pytest.raises(ConfigError, match=r"^compile_num_seqs is 3, but only steps that become CUDA graphs .* use 0"):
        build_core(EngineArgs(model="builtin", device="cpu", compile_num_seqs=3))


@pytest.mark.parametrize("form", ["steps", "early_exit", "whole"])
def test_a_form_of_graphs_that_there_are_not_is_refused(form: DecodeGraphForm) -> None:
    check_form(EngineArgs(), captures=False)
    check_form(EngineArgs(decode_graph_form=form), captures=True)
    said = f"^decode_graph_form is '{form}', but here no decoding step becomes CUDA graphs.* Use auto"
    with pytest.raises(ConfigError, match=said):
        build_core(EngineArgs(model="builtin", device="cpu", decode_graph_form=form))


def test_a_compiler_that_fails_is_told_in_one_line() -> None:
    from torch._dynamo.exc import TorchDynamoException

    class Failing:
        def __init__(self, error: Exception) -> None:
            self.error = error

        def prepare(self, tell: object) -> None:
            raise self.error

    compiling = Compiling(4, "triton")
    with pytest.raises(ConfigError, match=r"^compile_num_seqs is 4, but torch.compile fails .*: use 0. \(no cc\)$"):
        prepare(cast(DecodeGraphs, Failing(TorchDynamoException("\nno cc\nand more"))), 8, compiling, print)
    for known in (compiling, None):  # what is no compiler's stays what it is
        with pytest.raises(KeyError):
            prepare(cast(DecodeGraphs, Failing(KeyError("other"))), 8, known, print)
