"""DecodeGraphs with eager replay, of batches that no graph holds whole, and forms that stop early."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from graph_cores import CONTEXT, MODELS, ROWS, ascii_grammars, assert_same, graphs_core, guided, requests
from hamburger.engine.core.core import EngineCore
from hamburger.engine.text.grammar import regex_grammar
from hamburger.engine.types.messages import SubmitRequest
from hamburger.model.graphs.capture import EagerCapture, Work
from hamburger.model.graphs.decode_graphs import FORMS, Compiling, Form
from hamburger.model.graphs.pieces import Pieces
from playing import play
from slow_cases import slow_but
from small_models import core_of, params, random_model


class Watched(EagerCapture):
    """Counts the pieces that are replayed, by their names; each takes `seconds` of `now`."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.replayed: Counter[str] = Counter()
        self.now, self._seconds = 0.0, seconds

    def __call__(self, work: Work) -> Work:
        function = work.func if hasattr(work, "func") else work
        name = {Pieces.compute.__name__: "compute", Pieces.choose.__name__: "choose"}.get(function.__name__, "whole")

        def replay() -> None:
            self.replayed[name] += 1
            self.now += self._seconds
            work()

        return replay


def ask(core: EngineCore, name: str, prompt: list[int], **how: object) -> None:
    fields = {"confidence": 0.0, "max_tokens": 3, "ignore_eos": True, **how}
    core.add(SubmitRequest(name, prompt, params(**fields), 0.0))


# Neither how pieces follow each other nor overlap depends on the model's shape.
CASES: list[tuple[str, Form, bool]] = [
    *((name, "auto", False) for name in MODELS),
    *(("positions", form, overlap) for form in FORMS for overlap in (False, True) if form != "auto" or overlap),
]


@pytest.mark.parametrize(
    ("name", "form", "overlap"),
    slow_but([("positions", "auto", False), ("short_list", "auto", False), ("positions", "steps", True)], CASES),
)
def test_batches_with_prompts_and_grammars_give_the_texts_of_the_plain_way(
    name: str, form: Form, overlap: bool
) -> None:
    longest = MODELS[name].trunk.max_position_embeddings
    asked = [
        replace(r, params=replace(r.params, max_tokens=min(r.params.max_tokens or 0, longest - len(r.prompt_ids))))
        for r in guided(requests(len(name) + 20, number=18))
    ]
    model = random_model(MODELS[name], seed=2, masked=True)
    capture = Watched()
    ours = play(graphs_core(model, capture, form, 400, overlap=overlap), asked, at_once=1, every=2)
    plain = core_of(
        random_model(MODELS[name], seed=2),
        max_num_seqs=ROWS,
        max_model_len=CONTEXT,
        num_blocks=400,
        grammars=ascii_grammars(),
    )
    assert_same(ours.outputs, play(plain, asked, at_once=1, every=2).outputs)
    assert capture.replayed.total() > 50
    if name == "positions":
        sizes = {len(o.token_ids) for i in range(0, 18, 3) for o in ours.outputs[str(i)]}
        assert max(sizes) > 1  # groups of rows with a grammar, too


def test_compiled_pieces_take_over_from_other_trunks() -> None:
    asked = guided(requests(31))
    model = random_model(MODELS["positions"], seed=2, masked=True)
    compiling = Compiling(4, "torch", lambda function: function)
    ours = play(graphs_core(model, EagerCapture(), "steps", 400, compiling=compiling), asked, every=2)
    plain = core_of(
        random_model(MODELS["positions"], seed=2),
        max_num_seqs=ROWS,
        max_model_len=CONTEXT,
        num_blocks=400,
        grammars=ascii_grammars(),
    )
    assert_same(ours.outputs, play(plain, asked, every=2).outputs)


def test_a_step_with_a_prompt_replays_everything_but_the_trunk() -> None:
    capture = Watched()
    core = graphs_core(random_model(MODELS["positions"], seed=2, masked=True), capture, "steps", 40)
    ask(core, "a", [5, 6, 7])
    ask(core, "b", [5], max_tokens=2)
    core.step()
    assert capture.replayed == {"compute": 2, "choose": 3}


def test_a_row_with_a_grammar_takes_no_graph_from_the_others() -> None:
    capture = Watched()
    core = graphs_core(random_model(MODELS["positions"], seed=2, masked=True), capture, "steps", 40)
    ask(core, "a", [5])
    ask(core, "b", [6], grammar=regex_grammar("[a-z]{9}"))
    core.step()
    assert capture.replayed == {"compute": 3, "choose": 3}
    capture.replayed.clear()
    core.step()  # of the row with the grammar alone: the trunk
    assert capture.replayed == {"compute": 1}


def test_the_others_replay_no_micro_steps_that_only_a_grammar_asks_for() -> None:
    capture = Watched()
    core = graphs_core(random_model(MODELS["positions"], seed=2, masked=True), capture, "steps", 40)
    ask(core, "a", [5], confidence=1.0)
    ask(core, "b", [6], grammar=regex_grammar("[a-z]{9}"))
    groups = {output.request_id: output.token_ids for output in core.step().outputs}
    assert capture.replayed == {"compute": 1, "choose": 1}
    assert len(groups["a"]) == 1
    assert len(groups["b"]) > 1


def test_early_exit_replays_a_choice_and_goes_on_only_for_groups_that_do() -> None:
    model = random_model(MODELS["positions"], seed=2, masked=True)
    for confidence, replays in ((0.9999999, {"compute": 1, "choose": 1}), (0.0, {"compute": 4, "choose": 4})):
        capture = Watched()
        core = graphs_core(model, capture, "early_exit", 40)
        ask(core, "a", [5], confidence=confidence, max_tokens=9)
        core.step()
        assert capture.replayed == replays


@pytest.mark.parametrize(("overlap", "exits"), [(False, True), (True, False)])
def test_auto_exits_early_from_what_it_saw_unless_the_host_would_lose_more(overlap: bool, exits: bool) -> None:
    """Three micro-steps of 8 seconds may be spared for a check that takes none; the host takes 100 a step."""
    capture = Watched(seconds=4.0)

    def host() -> float:
        capture.now += 100.0
        return 0.0

    model = random_model(MODELS["positions"], seed=2, masked=True)
    clocks: tuple[Callable[[], float], Callable[[], float]] = (host, lambda: capture.now)
    core = graphs_core(model, capture, "auto", 40, overlap=overlap, clocks=clocks)
    capture.replayed.clear()
    ask(core, "a", [5], confidence=0.9999999, max_tokens=40)
    core.step()
    full = {"compute": 4, "choose": 4}
    assert capture.replayed == ({name: 2 * n for name, n in full.items()} if overlap else full)  # nothing was seen yet
    for _ in range(10):
        capture.replayed.clear()
        core.step()
    assert capture.replayed == ({"compute": 1, "choose": 1} if exits else full)
