"""benchmarks/gpu_suite/decode_step.py on a tiny model: both forms run, and a line says what was measured."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from gpu_suite import decode_step
from hamburger.model.graphs.capture import EagerCapture
from hamburger.model.graphs.decode_graphs import DecodeGraphs
from hamburger.model.kv_cache import PagedKVCache
from peers.our_engine import ShortGroups
from small_models import CPU


def test_a_line_for_each_number_of_rows_and_confidence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", "tiny", "--rows", "1,3", "--context", "70", "--confidences", "0,1", "--repeats", "1"]
    monkeypatch.setattr("sys.argv", ["decode_step", *options])
    decode_step.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["rows"], line["confidence"], line["tokens_per_group"]) for line in lines] == [
        (1, 0, 4), (1, 1, 1), (3, 0, 4), (3, 1, 1),
    ]  # fmt: skip
    assert all(line["milliseconds"].keys() == {"eager", "graphs"} for line in lines)
    assert all(value > 0 for line in lines for value in line["milliseconds"].values())


def test_groups_that_gpu_py_shortens_cost_what_the_host_cannot_foresee(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of 2 by a model of max_group 4: its own first tokens, and every micro-step of whole groups replayed."""
    model = decode_step.random_model("tiny", "published", 70, CPU)
    cache = PagedKVCache(model.config.trunk, 9, decode_step.BLOCK, model.state_dtype, CPU)
    graphs = DecodeGraphs(model, cache, EagerCapture(), max_rows=3, max_columns=3)
    graphs.prepare(only=3)
    batch = decode_step.decoding(model, 3, 70, 3, 0.0)
    whole = graphs.step(batch, cache)
    assert whole.group_sizes.tolist() == [4, 4, 4]
    done: list[None] = []
    micro_step = model.backend.micro_step

    def counted(*given: Any) -> Any:
        done.append(None)
        return micro_step(*given)

    monkeypatch.setattr(model.backend, "micro_step", counted)
    short = ShortGroups(graphs.step, 2)(batch, cache=cache)
    assert short.group_sizes.tolist() == [2, 2, 2]
    assert torch.equal(short.token_ids[:, :2], whole.token_ids[:, :2])
    assert not short.token_ids[:, 2:].any()
    assert len(done) == 3
    assert ShortGroups(graphs.step)(batch, cache=cache).group_sizes.tolist() == [4, 4, 4]
