"""The figures of compare.py from scripted times: what each of them is, medians and ratios, and their table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from comparison.figures import Cell, Figures, figures_of, medians, ratios, slots_over_time, weight_bytes_per_second
from comparison.limits import WeightBytes, gguf_sizes, hamburger_bytes
from comparison.report import RESULTS, TABLE, Results, load_results, plot
from hamburger.clients.figures import Answer
from hamburger.clients.wire import Usage
from hamburger.model.checkpoints.sources import embedded_gguf, resolve_source


def answer(started: float, *arrivals: tuple[float, int], prompt: int = 10) -> Answer:
    tokens = sum(count for _, count in arrivals)
    return Answer(
        started,
        first=arrivals[0][0],
        last=arrivals[-1][0],
        arrivals=list(arrivals),
        usage=Usage(prompt, tokens, len(arrivals)),
        ended=arrivals[-1][0],
    )


# Two answers side by side: 2 + 4 + 1 tokens in three groups, and three tokens of one.
PAIR = [answer(0.0, (1.0, 2), (2.0, 4), (4.0, 1)), answer(0.5, (2.5, 1), (3.0, 1), (5.0, 1))]


def figures(tokens_per_second: float) -> Figures:
    made = figures_of(PAIR, [10, 10], 100.0)
    return replace(made, tokens_per_second=tokens_per_second, decode_tokens_per_second=2 * tokens_per_second)


def test_the_figures_of_two_answers() -> None:
    found = figures_of(PAIR, [10, 10], 64.0)
    assert found.seconds == 5.0
    assert found.tokens_per_second == pytest.approx(10 / 5)
    assert found.decode_tokens_per_second == pytest.approx(7 / 4)  # after the first arrivals; past one from 1 to 5
    assert found.ttft_p50 == pytest.approx((1.0 + 2.0) / 2)
    assert found.tpot_p50 == pytest.approx((3.0 / 5 + 2.5 / 2) / 2)
    assert found.tokens_per_kv == pytest.approx(10 / 6)
    assert found.peak_memory_mib == 64.0
    # Four steps; two groups of more than one token come in; the later groups add three tokens.
    read = 4 * 100 + 2 * 7 + 3 * 30
    weights = WeightBytes(step=100, composed=7, micro_step=30)
    assert weight_bytes_per_second(PAIR, weights) == pytest.approx(read / (3.0 + 2.5))


def test_decode_time_leaves_out_when_nobody_decodes() -> None:
    apart = [answer(0.0, (1.0, 1), (2.0, 1)), answer(8.0, (9.0, 1), (10.0, 1))]
    assert figures_of(apart, [10, 10], None).decode_tokens_per_second == pytest.approx(2 / 2)


def test_slots_over_time() -> None:
    # 10 from 0 to 0.5, 20 to 1, 21 to 2, 22 to 2.5, 23 to 3, 24 to 4, then the second's 12 to 5
    area = 5 + 10 + 21 + 11 + 11.5 + 24 + 12
    mean, peak = slots_over_time(PAIR, [10, 10])
    assert mean == pytest.approx(area / 5)
    assert peak == 24


def test_one_token_answers_have_no_time_per_token() -> None:
    found = figures_of([answer(0.0, (1.0, 1))], [10], None)
    assert found.tpot_p50 is None
    assert found.decode_tokens_per_second is None
    assert weight_bytes_per_second([answer(0.0, (1.0, 1))], WeightBytes(100)) is None


def cells() -> list[Cell]:
    speeds = {"ours": [10.0, 30.0, 20.0], "peer": [20.0, 10.0, 10.0]}
    made = [Cell(4, r, name, figures(speed)) for name, all_ in speeds.items() for r, speed in enumerate(all_)]
    return [*made, Cell(4, 3, "ours", figures(99.0)), Cell(4, 3, "peer", None, "it died")]


def test_medians_leave_failed_cells_out() -> None:
    assert medians([cell for cell in cells() if cell.name == "peer"], None)["tokens_per_second"] == 10.0
    assert medians([Cell(1, 0, "x", None, "no")], 1.0)["tokens_per_second"] is None


def test_ratios_are_taken_round_by_round() -> None:
    [ratio] = ratios(cells(), ["ours"], ["ours", "peer"], "tokens_per_second")
    assert (ratio.median, ratio.low, ratio.high, ratio.rounds) == (2.0, 0.5, 3.0, 3)  # not 25 / 10: round 4 has no pair


@pytest.fixture
def results() -> Results:
    settings = {"context": 512}
    return Results(settings, {"CPU": "one"}, ["ours", "peer"], ["ours"], {}, {"third": "not here"}, [5e9], cells())


def test_the_table_says_it_all(results: Results) -> None:
    table = results.table()
    assert "CPU one; 5.0 GB/s read at best; contexts of 512 tokens; medians of 4 rounds." in table
    row = next(line for line in table.splitlines() if line.startswith("| peer | 10.0 | 20.0 |"))
    assert row.count("|") == next(line for line in table.splitlines() if line.startswith("| 4 streams")).count("|")
    assert "\n\nOf fewer rounds: peer 3.\n\n" in table
    assert "| ours | 4 | 2.00 (0.50 to 3.00) |" in table
    assert "- third: not here" in table
    assert "- peer, 4 streams, round 4: it died" in table


def test_results_are_read_back_as_written(results: Results, tmp_path: Path) -> None:
    results.write(tmp_path)
    assert load_results(tmp_path / RESULTS) == results
    assert (tmp_path / TABLE).read_text() == results.table()
    value = json.loads((tmp_path / RESULTS).read_text())
    assert value["medians"][1]["tokens_per_second"] == 10.0
    assert {ratio["figure"] for ratio in value["ratios"]} == {"tokens_per_second", "decode_tokens_per_second"}
    assert not list(tmp_path.glob("*.new"))


def test_plots_are_drawn(results: Results, tmp_path: Path) -> None:
    plot(results, tmp_path)
    for name in ("speed.png", "latency.png", "memory.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_bytes_of_a_macro_step_grow_with_the_group() -> None:
    weights = WeightBytes(step=100, composed=7, micro_step=30)
    assert weights.of_answer([4]) == 0  # of the prompt's step, which read more
    assert weights.of_answer([1, 1, 1]) == 2 * 100
    assert weights.of_answer([2, 1, 3]) == 2 * 100 + 7 + 2 * 30


def test_the_limit_is_of_the_best_bandwidth_of_the_run() -> None:
    made = [Cell(1, 0, "a", replace(figures(10.0), weight_bytes_per_second=4e9))]
    results = Results({}, {}, ["a"], [], bandwidths=[8e9, 5e9], cells=made)
    assert results.medians(made)["limit_fraction"] == 0.5
    assert Results({}, {}, ["a"], [], cells=made).medians(made)["limit_fraction"] is None


@pytest.mark.slow
def test_bytes_of_the_embedded_models() -> None:
    """The graft's files are counted whole, and its micro decoder's share of the head once more for every token."""
    file, source = embedded_gguf(), resolve_source(None)
    base = gguf_sizes(file)
    ours = hamburger_bytes(source, base)
    assert 0.9 < base.bytes / file.stat().st_size <= 1
    assert 0.5 < base.bytes / base.parameters < 1  # more than 4 bits, less than 8
    assert 0 < base.head_bytes < base.bytes / 2
    graft = sum(weights.stat().st_size for weights in source.path.glob("*.safetensors"))
    assert base.bytes < ours.step < base.bytes + graft
    head = ours.step - base.bytes + ours.composed + ours.micro_step - graft
    assert head == pytest.approx(base.head_bytes / 4, rel=0.03)  # 12,288 of 49,152 tokens; files have headers
