"""benchmarks/replay.py: what its simulation promises. Every replay goes through the real core and scheduler."""

import gzip
import json
import math
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import replay as command
from hamburger.engine.dial.confidence_dial import ConfidenceDial
from hamburger.engine.types.config import EngineConfig
from hamburger.engine.types.messages import EngineInfo
from replayed import BY_ROWS, ONE_SECOND, SETTLING, engine_config
from simulation.costs import StepWork
from simulation.live_replay import LiveRun, compare
from simulation.simulator import Dialled, DrawnSizes, Outcome, Replay, drawn_with_mean, replay
from simulation.studies import Scenario, Studies, decoding_seconds
from simulation.summaries import Target, latencies, summary, table
from simulation.traces import SAMPLES, Trace, TraceError, TraceRow, known_prefix_tokens, read_trace, scale

ONE_TOKEN = DrawnSizes((1.0,))


def azure(requests: int = 60, rate: float = 1.0, outputs: Fraction = Fraction(1, 8)) -> Trace:
    trace = scale(read_trace(SAMPLES / "azure_conv.jsonl.gz", requests), Fraction(1, 8), outputs, 1024)
    return trace.at_rate(rate)


def mooncake(requests: int, rate: float) -> Trace:
    path = SAMPLES / "mooncake_conversation.jsonl.gz"
    return scale(read_trace(path, requests), Fraction(1, 16), Fraction(1, 32), 8192).at_rate(rate)


def facts(result: Replay) -> list[tuple[object, ...]]:
    return [(o.row.request_id, o.scheduled, o.first_token, o.finished, *o.group_sizes) for o in result.outcomes]


def test_a_replay_repeats_itself_and_depends_on_its_seed() -> None:
    runs = [replay(azure(), engine_config(), BY_ROWS, drawn_with_mean(2.0, 4, seed)) for seed in (0, 0, 1)]
    assert facts(runs[0]) == facts(runs[1]) != facts(runs[2])


def test_every_request_gets_its_tokens_however_small_the_pool() -> None:
    trace = azure(rate=50.0, outputs=Fraction(1))
    small = engine_config(num_blocks=32)
    for sizes in (ONE_TOKEN, drawn_with_mean(1.3, 4)):
        result = replay(trace, small, BY_ROWS, sizes)  # raises where a token, a request or a block is lost
        assert [sum(o.group_sizes) for o in result.outcomes] == [row.output_tokens for row in trace.rows]
        assert result.preemptions == sum(o.preemptions for o in result.outcomes) > 0
        assert 0 < result.replayed_slots < result.prompt_slots
        prompts = sum(row.prompt_tokens for row in trace.rows)
        assert (
            result.prompt_slots - result.replayed_slots == prompts
        )  # nobody shares, so each is computed once at first
    roomy = replay(trace, engine_config(num_blocks=4096), BY_ROWS, ONE_TOKEN)
    assert roomy.preemptions == roomy.replayed_slots == 0


@pytest.mark.parametrize("mean", [1.0, 1.5, 2.0, 3.0])
def test_kv_memory_grows_by_one_over_g(mean: float) -> None:
    prompt, output = 64, 900
    trace = Trace("one", [TraceRow("1", 0.0, prompt, output)])
    sizes = drawn_with_mean(mean, 4)
    result = replay(trace, engine_config(), BY_ROWS, sizes)
    [outcome] = result.outcomes
    groups = len(outcome.group_sizes)
    assert groups == pytest.approx(output / sizes.mean, rel=0.1)
    # The last group's slot is never written; blocks have 32 slots.
    assert max(moment.used_slots for moment in result.moments) == math.ceil((prompt + groups - 1) / 32) * 32
    assert max(moment.answer_slots for moment in result.moments) == groups - 1


def test_settled_slots_are_given_back_and_cost_their_time() -> None:
    prompt, output = 64, 900
    trace = Trace("one", [TraceRow("1", 0.0, prompt, output)])
    costs = replace(ONE_SECOND, settled_chunk=0.5)
    result = replay(trace, engine_config(groups="verified", settling=SETTLING), costs, ONE_TOKEN)
    [outcome] = result.outcomes
    num_chunks = len([*SETTLING.places(output)])
    assert outcome.dropped_slots == SETTLING.settled_slots(output) == num_chunks * 56 > 0
    assert result.busy_seconds == output + num_chunks / 2  # the prompt's step emits the first
    assert max(moment.answer_slots for moment in result.moments) == SETTLING.most_slots(output)
    figures = summary(result, engine_config(), Target(1e9, 1e9))
    assert figures["tokens_per_kv"] == pytest.approx(output / SETTLING.slots(output))


def test_settling_preempts_less_and_replays_what_it_had() -> None:
    trace, small = azure(rate=50.0, outputs=Fraction(1)), engine_config(num_blocks=40)
    whole = replay(trace, small, BY_ROWS, ONE_TOKEN)
    settled = replay(trace, replace(small, groups="verified", settling=SETTLING), BY_ROWS, ONE_TOKEN)
    assert 0 < settled.preemptions < whole.preemptions
    prompts = sum(row.prompt_tokens for row in trace.rows)
    for result in (whole, settled):
        assert result.prompt_slots - result.replayed_slots == prompts


def test_prefix_hits_are_those_of_a_brute_force_count() -> None:
    trace = mooncake(120, rate=1.0)
    rows = [replace(row, arrival=1000.0 * index) for index, row in enumerate(trace.rows)]  # one after the other
    trace = replace(trace, rows=rows)
    result = replay(trace, engine_config(num_blocks=8192, max_model_len=8192), BY_ROWS, ONE_TOKEN)
    found = known_prefix_tokens(trace)
    assert [outcome.cached_slots for outcome in result.outcomes] == found
    assert sum(found) > 0


def test_a_small_pool_and_requests_at_once_find_less_and_never_more() -> None:
    trace = mooncake(120, rate=100.0)
    result = replay(trace, engine_config(num_blocks=256, max_model_len=8192), BY_ROWS, ONE_TOKEN)
    pairs = [
        (outcome.cached_slots, most) for outcome, most in zip(result.outcomes, known_prefix_tokens(trace), strict=True)
    ]
    assert all(found <= most for found, most in pairs)
    assert sum(found for found, _ in pairs) < sum(most for _, most in pairs)


def test_known_prefixes_by_hand() -> None:
    rows = [
        TraceRow("1", 0.0, 70, 1, (1, 2, 3)),  # two whole blocks, and 6 tokens of a third
        TraceRow("2", 1.0, 96, 1, (1, 2, 3)),  # 3 was not whole before
        TraceRow("3", 2.0, 96, 1, (1, 2, 3)),  # the last token is computed, so its block is
        TraceRow("4", 3.0, 96, 1, (9, 2, 3)),
        TraceRow("5", 4.0, 97, 1, (1, 2, 3, 4)),
    ]
    assert known_prefix_tokens(Trace("t", rows, 32)) == [0, 64, 64, 0, 96]


def test_no_starvation() -> None:
    """Everybody begins in order, an answer that runs is never passed over, and a first token waits for no more than the
    prompts that came before it, however long these are."""
    config = engine_config(num_blocks=8192, max_num_seqs=64)
    long = [TraceRow(f"{1000 + i}", i / 3, 1000, 4) for i in range(12)]
    trace = azure(60, rate=0.5)
    trace = replace(trace, rows=sorted([*trace.rows, *long], key=lambda row: row.arrival))
    result = replay(trace, config, ONE_SECOND, ONE_TOKEN)  # so that times count steps
    outcomes = result.outcomes
    assert [o.scheduled for o in outcomes] == sorted(o.scheduled for o in outcomes)
    assert max(o.passed_over for o in outcomes) == 0
    assert max(o.longest_gap for o in outcomes) == 1
    for index, outcome in enumerate(outcomes):
        ahead = [o for o in outcomes[:index] if o.first_token > outcome.arrival]
        slots = sum(o.row.prompt_tokens for o in [*ahead, outcome])
        assert outcome.ttft <= 2 + slots / (config.max_num_batched_slots - config.max_num_seqs)


def test_figures_of_a_replay() -> None:
    config, trace = engine_config(num_blocks=4096), azure()
    result = replay(trace, config, BY_ROWS, drawn_with_mean(2.0, 4))
    figures = summary(result, config, Target(1e9, 1e9))
    assert figures["goodput"] == figures["requests_per_second"] == pytest.approx(60 / result.seconds)
    assert summary(result, config, Target(0, 1e9))["goodput"] == 0
    assert figures["tokens_per_kv"] == pytest.approx(2.0, rel=0.1)
    assert figures["mean_answer_slots"] <= figures["mean_slots"] <= figures["peak_slots"] <= config.total_slots
    assert figures["out_of_order"] == figures["passed_over"] == figures["preemptions"] == 0
    assert [part["part"] for part in figures["by_prompt_length"]] == ["shortest", "short", "long", "longest"]


def test_an_answer_of_one_token_has_no_time_a_token() -> None:
    outcome = Outcome(TraceRow("1", 0.0, 4, 1), 0.0, 0.0, 1.0, 1.0, 1, [1])
    assert Target(2, 0).holds(outcome)
    assert latencies([outcome])["tpot_p99"] == 0


def test_a_live_run_as_simulated_shows_no_error() -> None:
    trace, sizes, costs = azure(20, rate=0.5), drawn_with_mean(2.0, 4), BY_ROWS
    info = EngineInfo("m", False, 1024, 4, 0.8, 50_000, [], 32, 4096, 4096, 16, 512, "cpu", "float32")
    same = engine_config(num_blocks=128, max_num_seqs=16)
    result = replay(trace, same, costs.times(2.0), sizes)
    found = compare(LiveRun(result.outcomes, result.busy_seconds, 1), info, trace, costs)
    assert found["slowdown"] == pytest.approx(2.0, rel=0.02)
    assert found["errors"]["adjusted"]["ttft_p50"] == pytest.approx(0, abs=0.05)
    assert found["errors"]["simulated"]["tpot_mean"] == pytest.approx(-0.5, abs=0.1)


def test_drawn_sizes_have_the_mean_that_was_asked() -> None:
    sizes = drawn_with_mean(2.0, 4)
    drawn = [sizes.size("r", index) for index in range(4000)]
    assert sizes.mean == pytest.approx(2.0)
    assert sum(drawn) / len(drawn) == pytest.approx(2.0, rel=0.03)
    assert {*drawn} == {1, 2, 3, 4}
    with pytest.raises(ValueError, match="must be in"):
        drawn_with_mean(4.5, 4)


def test_scaling_keeps_every_request_inside_the_context() -> None:
    rows = [TraceRow("1", 0.0, 4000, 3000), TraceRow("2", 10.0, 3, 1)]
    trace = scale(Trace("t", rows), Fraction(1, 2), Fraction(1, 2), 1024)
    assert [(row.prompt_tokens, row.output_tokens) for row in trace.rows] == [(512, 512), (2, 1)]
    assert trace.num_shortened == 1
    assert [row.arrival for row in trace.at_rate(4.0).rows] == [0, 0.25]
    assert len(trace.prompt_ids(trace.rows[0])) == 512
    hashed = Trace("t", [TraceRow("1", 0.0, 600, 1, (7, 8))])
    assert [row.hash_ids for row in scale(hashed, Fraction(1, 16), Fraction(1), 32).rows] == [(7,)]
    with pytest.raises(TraceError, match="cannot be scaled"):
        scale(hashed, Fraction(1, 1000), Fraction(1), 1024)


@pytest.mark.parametrize(
    "line", ["{", '{"t": 1}', '{"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1]}', "[]"]
)
def test_a_wrong_trace_names_file_and_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "wrong.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write('{"t": 0, "prompt_tokens": 1, "output_tokens": 1}\n' + line)
    with pytest.raises(TraceError, match=r"wrong\.jsonl\.gz, line 2"):
        read_trace(path)


def test_tables() -> None:
    assert table([{"a": "x", "b": 0.1234, "c": 12345.6}], {"a": "A", "b": "B", "c": "C"}).splitlines() == [
        "| A | B | C |",
        "| --- | ---: | ---: |",
        "| x | 0.123 | 12,346 |",
    ]


def test_the_studies_compare_the_models_that_they_are_given() -> None:
    config = EngineConfig(
        max_model_len=1024, max_num_seqs=64, max_num_batched_slots=128, block_size=32, num_blocks=512, eos_token_ids=(),
        max_group=4, max_queue_seconds=math.inf,
    )  # fmt: skip
    scenarios = [Scenario("base", BY_ROWS, ONE_TOKEN), Scenario("two", BY_ROWS, drawn_with_mean(2.0, 4))]
    studies = Studies(config, scenarios, Target(10, 1), lambda line: None)
    trace = azure(24)
    capacity = studies.capacity(trace)
    pools = studies.pools(
        trace,
        capacity,
    )
    most = {name: max(row["preemptions"] for row in pools if row["model"] == name) for name in ("base", "two")}
    assert most["two"] <= most["base"]
    assert {row["budget"] for row in studies.budgets(trace, capacity)} == {64, 128, 256, 512}
    alone = decoding_seconds(scenarios[0], 8, 256, 64)
    assert alone == pytest.approx(64 * BY_ROWS.seconds(StepWork(8, 8, 0, 0, 0, 0, 0)))
    assert decoding_seconds(scenarios[1], 8, 256, 64) < 0.65 * alone  # groups of two, the slowest of eight streams
    for row in studies.growth((1.0, 2.0), 4):
        assert row["slots_a_token"] == pytest.approx(row["one_over_g"], rel=0.1)


def test_the_dial_holds_its_target_under_load_and_leaves_the_confidence_alone_without() -> None:
    """Steps take time by their rows, so further tokens cost nothing: a lower confidence always pays."""
    sizes = {0.8: DrawnSizes((0.9, 0.1)), 0.7: DrawnSizes((0.6, 0.4)), 0.6: DrawnSizes((0.2, 0.8))}
    config = engine_config()
    crowded = azure(60, rate=1e9)
    felt = {c: float(np.mean([o.tpot for o in replay(crowded, config, BY_ROWS, sizes[c]).outcomes])) for c in sizes}
    assert felt[0.6] < felt[0.7] < felt[0.8]
    for target, expected in ((2 * felt[0.8], {0.8}), (felt[0.6] / 2, {0.8, 0.7, 0.6})):
        dialled = Dialled(ConfidenceDial(0.6, 0.8, target), sizes)
        trace = azure(300, rate=2.0)
        assert len(replay(trace, config, BY_ROWS, dialled).outcomes) == len(dialled.chosen) == 300
        assert set(dialled.chosen.values()) == expected


def test_the_command_writes_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = {
        name: {
            "model": name,
            "dtype": "d",
            "costs": {**BY_ROWS.as_json(), "settled_chunk": 0.001},
            "group_shares": shares,
        }
        for name, shares in (("base", {}), ("hamburger", {"0.5": [0.5, 0.5], "0.4": [0.2, 0.8]}))
    }
    known = tmp_path / "known.json"
    known.write_text(json.dumps({"machine": {"cores": 1}, "models": models}))
    options = "--requests 6 --live-requests 0 --max-model-len 512 --seats 8 --budget 64 --pool-slots 1024"
    out = tmp_path / "made" / "report"
    argv = ["replay.py", "--costs", str(known), "--out", str(out), *options.split()]
    monkeypatch.setattr(sys, "argv", [*argv, "--confidences", "0.5", "0.3"])
    with pytest.raises(SystemExit, match=r"tells of no groups at 0\.3: measure again"):
        command.main()
    monkeypatch.setattr(sys, "argv", [*argv, "--confidences", "0.5", "0.4"])
    assert command.main() == 0
    result = json.loads(out.with_suffix(".json").read_text())
    assert {row["model"] for row in result["loads"]} == {
        "plain base",
        "plain base, settled slots",
        "composed at 0.5 (g 1.50)",
        "composed at 0.4 (g 1.80)",
        "groups drawn (g 2.00)",
    }
    assert {(row["load"], row["way"]) for row in result["dial"]} == {
        (load, way) for load in (0.7, 0.85, 1.0) for way in ("default, 0.5", "auto, 0.5 to 0.4", "floor, 0.4")
    }
    text = out.with_suffix(".md").read_text()
    assert "auto, 0.5 to 0.4" in text
    pictures = sorted(path.name for path in out.parent.glob("*.png"))
    assert pictures == [f"report-{name}.png" for name in ("cost", "load", "pool", "slots")]
    assert all(f"({name})" in text for name in pictures)
    assert all(path.stat().st_size < 200_000 for path in out.parent.glob("*.png"))
