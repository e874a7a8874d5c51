"""Pieces made for torch.compile: the plain way's texts, with the functions left as they are, and once compiled for real.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from graph_cores import CONTEXT, MODELS, ROWS, assert_same, graphs_core, requests
from hamburger.model.backends import Backend
from hamburger.model.capture import EagerCapture
from hamburger.model.compiled_pieces import CACHE_VARIABLE, compile_cache, inductor
from hamburger.model.config import ConfigError, ModelConfig
from hamburger.model.decode_graphs import Compiling
from playing import play
from small_models import CPU, core_of, graft_config, random_model, trunk_config

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


@pytest.mark.parametrize("name", MODELS)
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
