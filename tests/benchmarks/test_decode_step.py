"""benchmarks/decode_step.py on a tiny model: every form runs, and a line says what was measured."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import conditional_step
import decode_step
from conditional_step import ConditionalStep, why_not
from hamburger.model.gpu.availability import Backend
from hamburger.model.graphs.capture import EagerCapture
from hamburger.model.graphs.decode_graphs import FORMS, Compiling, DecodeGraphs, Form
from hamburger.model.kv_cache import PagedKVCache
from peers.our_engine import ShortGroups
from small_models import CPU

TIMED = set(FORMS) - {"auto"}


def test_a_line_for_each_number_of_rows_and_confidence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", "tiny", "--rows", "1,3", "--context", "70", "--confidences", "0,1", "--repeats", "1"]
    monkeypatch.setattr("sys.argv", ["decode_step.py", *options])
    decode_step.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["rows"], line["confidence"], line["tokens_per_group"]) for line in lines] == [
        (1, 0, 4), (1, 1, 1), (3, 0, 4), (3, 1, 1),
    ]  # fmt: skip
    assert all(line["milliseconds"].keys() == {"eager", *TIMED, "conditional"} for line in lines)
    assert all(value > 0 for line in lines for value in line["milliseconds"].values())


def test_compiled_steps_are_timed_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Compiling] = []

    def uncompiled(rows: int, backend: Backend) -> Compiling:
        made.append(Compiling(rows, backend, lambda function: function))
        return made[-1]

    monkeypatch.setattr(decode_step, "Compiling", uncompiled)
    model = decode_step.random_model("tiny", "published", 70, CPU)
    figures = decode_step.measure(model, 2, 70, 0.0, 1, compiled=True)
    assert figures["milliseconds"].keys() == {"eager", *TIMED, "compiled", "conditional"}  # type: ignore[attr-defined]
    assert [compiling.seconds.keys() for compiling in made] == [{2}]


def test_a_step_that_stops_by_itself_gives_the_groups_of_the_others() -> None:
    model = decode_step.random_model("tiny", "published", 70, CPU)
    cache = PagedKVCache(model.config.trunk, 9, decode_step.BLOCK, model.state_dtype, CPU)
    conditional = ConditionalStep(model, cache, 3, 3)
    sizes = set()
    for confidence in (0.0, 0.85, 0.86, 0.87, 0.88, 0.89, 1.0):
        batch = decode_step.decoding(model, 3, 70, 3, confidence)
        expected, found = model.step(batch, cache), conditional.step(batch, cache)
        width = expected.token_ids.shape[1]  # 1 where the host knows that nothing goes on
        assert torch.equal(found.token_ids[:, :width], expected.token_ids)
        assert not found.token_ids[:, width:].any()
        assert torch.equal(found.group_sizes, expected.group_sizes)
        torch.testing.assert_close(found.stop_probs[:, :width], expected.stop_probs, atol=1e-5, rtol=1e-5)
        sizes |= set(expected.group_sizes.tolist())
    assert {1, 4} < sizes


@pytest.mark.parametrize(("form", "computed"), [("steps", 3), ("early_exit", 1)])
def test_groups_that_gpu_py_shortens_cost_what_the_host_cannot_foresee(
    form: Form, computed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of 2 by a model of max_group 4: its own first tokens, and every micro-step of whole groups replayed."""
    model = decode_step.random_model("tiny", "published", 70, CPU)
    cache = PagedKVCache(model.config.trunk, 9, decode_step.BLOCK, model.state_dtype, CPU)
    graphs = DecodeGraphs(model, cache, EagerCapture(), max_rows=3, max_columns=3, form=form)
    graphs.prepare(only=3)
    batch = decode_step.decoding(model, 3, 70, 3, 0.0)
    whole = graphs.step(batch, cache)
    assert whole.group_sizes.tolist() == [4, 4, 4]
    done: list[None] = []
    micro_step = model.micro_step

    def counted(*given: Any) -> Any:
        done.append(None)
        return micro_step(*given)

    monkeypatch.setattr(model, "micro_step", counted)
    short = ShortGroups(graphs.step, 2)(batch, cache=cache)
    assert short.group_sizes.tolist() == [2, 2, 2]
    assert torch.equal(short.token_ids[:, :2], whole.token_ids[:, :2])
    assert not short.token_ids[:, 2:].any()
    assert len(done) == computed
    assert ShortGroups(graphs.step)(batch, cache=cache).group_sizes.tolist() == [4, 4, 4]


def test_where_there_are_no_conditional_nodes_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Older:
        pass

    assert why_not(CPU) is None
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Older)
    assert "captures no conditional nodes" in str(why_not(torch.device("cuda")))


def test_a_captured_micro_step_lies_in_a_node_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []

    class Graph:
        @staticmethod
        def get_currently_capturing_graph() -> Graph:
            return Graph()

        def begin_capture_to_if_node(self, going: torch.Tensor) -> None:
            done.append(going.shape)

        def end_capture_to_conditional_node(self) -> None:
            done.append("end")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert why_not(torch.device("cuda")) is None
    conditional_step._captured(torch.tensor(True), lambda: done.append("then"))
    assert done == [(), "then", "end"]
    monkeypatch.setattr(torch.version, "cuda", "12.1")
    assert "came with CUDA 12.4" in str(why_not(torch.device("cuda")))
