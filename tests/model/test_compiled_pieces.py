"""Pieces for torch.compile give the plain way's texts: their functions left as they are, and compiled for real."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import torch

from graph_cores import CONTEXT, MODELS, ROWS, TF32, assert_same, graphs_core, requests
from hamburger.model.compiled_pieces import CACHE_VARIABLE, compile_cache, release_compilers
from hamburger.model.config import ConfigError, ModelConfig
from hamburger.model.graphs.capture import EagerCapture
from hamburger.model.graphs.decode_graphs import Compiling
from playing import play
from slow_cases import slow_but
from small_models import core_of, graft_config, random_model, trunk_config

_Function = TypeVar("_Function", bound=Callable[..., object])


class Counting:
    """Compiles nothing, and counts the calls of each function."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}

    def __call__(self, function: _Function) -> _Function:
        def called(*args: Any) -> object:
            self.calls[function.__name__] = self.calls.get(function.__name__, 0) + 1
            return function(*args)

        return called  # type: ignore[return-value]


@pytest.mark.parametrize("name", slow_but(["positions", "short_list", "plain_base"], MODELS))
def test_texts_are_those_of_the_plain_way(name: str) -> None:
    compiler = Counting()
    model = random_model(MODELS[name], seed=2, masked=True)
    compiling = Compiling(4, "torch", compiler)  # buckets of 8 and 11 rows stay as they are
    asked = requests(len(name))
    ours = play(graphs_core(model, EagerCapture(), "steps", 400, compiling=compiling), asked, at_once=1, every=3)
    plain = core_of(random_model(MODELS[name], seed=2), max_num_seqs=ROWS, max_model_len=CONTEXT, num_blocks=400)
    assert_same(ours.outputs, play(plain, asked, at_once=1, every=3).outputs)
    assert compiling.seconds.keys() == {1, 2, 4}
    assert compiler.calls["_between"] == 3 * compiler.calls["_begin"]
    assert ("_further_micro" in compiler.calls) == (name != "plain_base")


def test_texts_are_the_same_over_the_attention_kernels() -> None:
    pytest.importorskip("triton", reason="the package triton is not installed")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("this machine has a GPU: test_decode_graphs_gpu.py runs it there")
    # The interpreter is slow: few tokens each.
    asked = [replace(r, params=replace(r.params, max_tokens=4, min_tokens=0)) for r in requests(3, number=3)]
    compiler = Counting()
    model = random_model(MODELS["sliding"], seed=2, masked=True, packed=False, backend="triton")
    core = graphs_core(model, EagerCapture(), "steps", 80, max_rows=3, compiling=Compiling(3, "triton", compiler))
    plain = core_of(random_model(MODELS["sliding"], seed=2), max_num_seqs=3, max_model_len=CONTEXT, num_blocks=80)
    assert_same(play(core, asked, at_once=1).outputs, play(plain, asked, at_once=1).outputs)
    assert compiler.calls["_between"] > 3


@pytest.mark.compilers
@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"positions"}))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_function_is_taken_whole(name: str) -> None:
    """torch's tracer leaves no operation of any kind of model to Python: what it traced is run as it is."""

    def traced(function: _Function) -> _Function:
        return cast(_Function, torch.compile(function, fullgraph=True, dynamic=False, backend="eager"))

    model = random_model(MODELS[name], seed=2, masked=True, packed=False)
    asked = [replace(r, params=replace(r.params, max_tokens=8, min_tokens=0)) for r in requests(3, number=3)]
    compiling = Compiling(2, "torch", traced)
    core = graphs_core(model, EagerCapture(), "steps", 80, max_rows=2, compiling=compiling)
    plain = core_of(random_model(MODELS[name], seed=2), max_num_seqs=2, max_model_len=CONTEXT, num_blocks=80)
    assert_same(play(core, asked, at_once=1).outputs, play(plain, asked, at_once=1).outputs)


@pytest.mark.compilers
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules, when it imports its compiler
@pytest.mark.filterwarnings(TF32)
def test_texts_are_the_same_once_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each function compiled for one row: a layer's, a micro-step's, both choices of a group of two."""
    from torch._inductor import config as inductor_config

    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(inductor_config, "compile_threads", 1)  # other processes would load torch first
    config = ModelConfig(
        trunk=trunk_config(num_layers=2), graft=graft_config(max_group=2, micro_layers=1, feature_layers=(0, 1))
    )
    asked = requests(3, number=6)
    model = random_model(config, seed=2, masked=True, packed=False)
    compiling = Compiling(1, "torch")
    core = graphs_core(model, EagerCapture(), "steps", 400, max_rows=1, compiling=compiling)
    found = play(core, asked, at_once=1, every=3).outputs
    plain = core_of(random_model(config, seed=2), max_num_seqs=1, max_model_len=CONTEXT, num_blocks=400)
    expected = play(plain, asked, at_once=1, every=3).outputs
    assert_same(found, expected)
    assert {len(output.token_ids) for outputs in expected.values() for output in outputs} == {1, 2}
    assert any(output.logprobs for outputs in expected.values() for output in outputs)
    release_compilers()  # without a fault, and what is compiled still runs
    assert_same(play(core, asked[:1], at_once=1).outputs, {"0": expected["0"]})
    assert [*tmp_path.rglob("*.so")]  # it was compiled, and is kept where it was told to be


def test_what_was_compiled_has_a_folder_of_its_own(tmp_path: Path) -> None:
    folder = compile_cache({"XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert folder == tmp_path / "cache" / "hamburger" / "compiled"
    assert folder.stat().st_mode & 0o777 == 0o700
    named = {CACHE_VARIABLE: str(tmp_path / "named"), "XDG_CACHE_HOME": "/nowhere"}
    assert compile_cache(named) == tmp_path / "named"
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=f"^compile_num_seqs is given, but .*file/x .*another folder in {CACHE_VARIABLE}"
    ):
        compile_cache({CACHE_VARIABLE: str(tmp_path / "file" / "x")})


def test_nothing_of_the_compiler_is_loaded_before_it_is_asked_for() -> None:
    program = "import sys, hamburger.engine.build; sys.exit('torch._inductor.compile_fx' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
