"""DecodeGraphs with eager replay, of batches that no graph holds whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from captures import Watched
from graph_cores import CONTEXT, MODELS, ROWS, ascii_grammars, assert_same, graphs_core, guided, requests
from hamburger.engine.core.core import EngineCore
from hamburger.engine.grammar.writing import regex_grammar
from hamburger.engine.types.messages import SubmitRequest
from playing import play
from slow_cases import slow_but
from small_models import core_of, params, random_model


def ask(core: EngineCore, name: str, prompt: list[int], **how: object) -> None:
    fields = {"confidence": 0.0, "max_tokens": 3, "ignore_eos": True, **how}
    core.add(SubmitRequest(name, prompt, params(**fields), 0.0))


# Overlap does not depend on the model's shape.
CASES = [*((name, False) for name in MODELS), ("positions", True)]


@pytest.mark.parametrize(
    ("name", "overlap"), slow_but([("positions", False), ("short_list", False), ("positions", True)], CASES)
)
def test_batches_with_prompts_and_grammars_give_the_texts_of_the_plain_way(name: str, overlap: bool) -> None:
    longest = MODELS[name].trunk.max_position_embeddings
    asked = [
        replace(r, params=replace(r.params, max_tokens=min(r.params.max_tokens or 0, longest - len(r.prompt_ids))))
        for r in guided(requests(len(name) + 20, number=21))
    ]
    model = random_model(MODELS[name], seed=2, static_shapes=True)
    capture = Watched()
    ours = play(graphs_core(model, capture, 400, overlap=overlap), asked, at_once=1, every=2)
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
        sizes = {len(o.token_ids) for i in range(0, 21, 3) for o in ours.outputs[str(i)]}
        assert max(sizes) > 1  # groups of rows with a grammar, too


def test_a_step_with_a_prompt_replays_everything_but_the_trunk() -> None:
    capture = Watched()
    core = graphs_core(random_model(MODELS["positions"], seed=2, static_shapes=True), capture, 40)
    ask(core, "a", [5, 6, 7])
    ask(core, "b", [5], max_tokens=2)
    core.step()
    assert capture.replayed == {"compute": 2, "choose": 3}


def test_a_row_with_a_grammar_takes_no_graph_from_the_others() -> None:
    capture = Watched()
    core = graphs_core(random_model(MODELS["positions"], seed=2, static_shapes=True), capture, 40)
    ask(core, "a", [5])
    ask(core, "b", [6], grammar=regex_grammar("[a-z]{9}"))
    core.step()
    assert capture.replayed == {"compute": 3, "choose": 3}
    capture.replayed.clear()
    core.step()  # of the row with the grammar alone: the trunk
    assert capture.replayed == {"compute": 1}


def test_the_others_replay_no_micro_steps_that_only_a_grammar_asks_for() -> None:
    capture = Watched()
    core = graphs_core(random_model(MODELS["positions"], seed=2, static_shapes=True), capture, 40)
    ask(core, "a", [5], confidence=1.0)
    ask(core, "b", [6], grammar=regex_grammar("[a-z]{9}"))
    groups = {output.request_id: output.token_ids for output in core.step().outputs}
    assert capture.replayed == {"compute": 1, "choose": 1}
    assert len(groups["a"]) == 1
    assert len(groups["b"]) > 1
