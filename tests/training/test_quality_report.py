"""Points, verdicts, tables and plots, from answers whose figures are known by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fake_engines import fake_config, fake_core, fake_info
from fakes import EOS, ByteTokenizer, ScriptedRunner
from hamburger.engine.llm import LLM
from hamburger.training.quality.answers import Engine
from hamburger.training.quality.plots import plot_curve, plot_reliability
from hamburger.training.quality.points import Bin, Point, make_point, reliability
from hamburger.training.quality.report import Evaluation, verdict_lines, write_json, write_markdown
from hamburger.training.quality.scores import Accepted, AnswerScore
from hamburger.training.quality.speed import Timed, micro_step_cost, time_decoding
from hamburger.training.quality.verdict import Verdict, keeps_quality, suggested_confidence, verdicts

DIAL = [Accepted(1, 0.85, 0.82), Accepted(2, 0.95, 0.92)] * 15


def scores(
    confidence: float, *, groups: int = 10, nll: float = 5.0, repeated: int = 1, ended: int = 20, number: int = 20
) -> list[AnswerScore]:
    """Answers of 20 tokens to `number` prompts of two kinds, of which the first `ended` end."""
    one = AnswerScore(
        prompt_id="", kind="", confidence=confidence, tokens=20, groups=groups, nll=nll, ngrams=17, repeated=repeated,
        ended=True, was_cut=False, whole_tokens=20, whole_groups=groups, whole_ended=True,
        accepted=DIAL if groups < 20 else [],
    )  # fmt: skip
    return [
        replace(one, prompt_id=f"p{i}", kind="ab"[i % 2], ended=i < ended, whole_ended=i < ended) for i in range(number)
    ]


BASE = scores(1.0, groups=20)


def point(confidence: float | None, mine: list[AnswerScore]) -> Point:
    return make_point(confidence, mine, BASE, rounds=50, seed=0)


def lines(points: list[Point], default: float = 0.8, micro_step: float | None = 0.1) -> dict[str, bool | None]:
    return {v.claim: v.passed for v in verdicts(points, default, micro_step)}


GOOD = point(0.8, scores(0.8))
ONE = point(1.0, scores(1.0, groups=20))


def test_a_point_by_hand() -> None:
    found = point(0.8, scores(0.8, nll=7.0, ended=15))
    assert found.figures["tokens_per_kv"].value == 2
    assert found.figures["nll_difference"].value == pytest.approx(0.1)
    assert found.figures["repetition_quotient"].value == 1
    assert found.figures["eos_difference"].value == -0.25
    assert found.figures["eos_difference"].low < -0.25 < found.figures["eos_difference"].high
    assert set(found.kinds) == {"a", "b"}
    assert found.dial["all"].count == 600
    assert found.dial["1"].probability.value == pytest.approx(0.82)
    assert found.dial["all"].predicted == pytest.approx(0.9)
    with pytest.raises(ValueError, match="not to the same prompts"):
        make_point(0.8, scores(0.8)[::-1], BASE, 50, 0)


def near(value: float) -> Any:
    return pytest.approx(value)


def test_reliability_by_position_and_tenth() -> None:
    found = reliability(scores(0.8, number=1))
    assert found == {
        "all": [Bin(15, near(0.85), near(0.82)), Bin(15, near(0.95), near(0.92))],
        "1": [Bin(15, near(0.85), near(0.82))],
        "2": [Bin(15, near(0.95), near(0.92))],
    }
    assert reliability(BASE) == {}
    certain = [replace(BASE[0], accepted=[Accepted(1, 1.0, 1.0)])]
    assert reliability(certain)["1"] == [Bin(1, 1.0, 1.0)]


def test_a_model_that_keeps_every_promise() -> None:
    found = lines([GOOD, ONE])
    assert len(found) == 9
    assert all(found.values())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"groups": 14}, "tokens per KV at least 1.5"),
        ({"nll": 8.1}, "above the base's own"),
        ({"repeated": 2}, "4-gram repetition"),
        ({"ended": 18}, "end with EOS within 5 points"),
    ],
)
def test_each_promise_can_be_broken_alone(change: dict[str, float], words: str) -> None:
    bad = point(0.8, scores(0.8, **change))  # type: ignore[arg-type]
    broken = [claim for claim, passed in lines([bad, ONE]).items() if not passed]
    assert len(broken) == 1
    assert words in broken[0]
    assert keeps_quality(bad) == ("tokens per KV" in words)


def test_the_dial_is_judged_at_every_position() -> None:
    dials = GOOD.dial | {"2": replace(GOOD.dial["2"], probability=replace(GOOD.dial["2"].probability, value=0.74))}
    [broken] = [claim for claim, passed in lines([replace(GOOD, dial=dials), ONE]).items() if not passed]
    assert "every confidence c and position" in broken
    few = dials | {"2": replace(dials["2"], count=29)}  # too few to say anything
    assert all(lines([replace(GOOD, dial=few), ONE]).values())
    over = point(0.95, scores(0.95))  # its tokens have 0.87
    assert not keeps_quality(over)
    assert [c for c, passed in lines([over, ONE], 0.95).items() if not passed] == [
        "at 0.95: accepted tokens have mean base probability of at least 0.9",
        "at every confidence c and position: mean base probability at least c - 0.05",
    ]


def test_confidence_one_must_be_the_base() -> None:
    merged = point(1.0, [*scores(1.0, groups=20)[:-1], *scores(1.0, groups=19)[-1:]])
    assert lines([GOOD, merged])["at 1: exactly 1 token per KV"] is False
    other = point(1.0, scores(1.0, groups=20, nll=5.1))
    assert lines([GOOD, other])["at 1: quality equal to the base's within the intervals"] is False


def test_what_was_not_measured_is_not_passed() -> None:
    found = lines([GOOD], micro_step=None)
    assert [claim[:4] for claim, passed in found.items() if passed is None] == ["at 1", "at 1", "a mi"]
    plain = lines([ONE], default=1.0)
    assert [passed for claim, passed in plain.items() if "base probability" in claim] == [None, None]


def test_nothing_of_nothing_is_no_failure() -> None:
    """Answers of fewer than four tokens have no 4-grams."""
    short = [replace(score, ngrams=0, repeated=0) for score in BASE]
    bare = [replace(score, ngrams=0, repeated=0) for score in scores(0.8)]
    found = lines([make_point(0.8, bare, short, rounds=50, seed=0), make_point(1.0, short, short, rounds=50, seed=0)])
    unknown = [claim for claim, passed in found.items() if passed is None]
    assert [claim.split(",")[0][:24] for claim in unknown] == ["at 0.8: 4-gram repetitio", "at 1: quality equal to t"]
    assert False not in found.values()


def test_the_suggestion_has_most_tokens_per_kv_of_those_that_keep_the_quality() -> None:
    fast, slow = point(0.5, scores(0.5, groups=5, nll=9.0)), point(0.82, scores(0.82, groups=12))
    assert suggested_confidence([fast, GOOD, slow, ONE]) == 0.8
    assert suggested_confidence([fast]) is None


def test_a_micro_step_is_what_longer_groups_take_more() -> None:
    base = [Timed([1, 1, 1], [0.9, 1.0, 1.1])]
    model = [Timed([1, 3, 1], [1.0, 1.2, 1.0]), Timed([2, 1], [1.1, 5.0])]
    assert micro_step_cost(base, model) == pytest.approx(0.1)
    assert micro_step_cost(base, [Timed([1], [1.0])]) is None
    assert micro_step_cost([], model) is None


def test_the_first_group_and_loops_are_not_timed() -> None:
    block = list(range(97, 109))
    script = [block[:2], block[2:5], block[5:9], block[9:], block[:4], block[4:8], block[8:], [EOS]]
    config = fake_config()
    runner = ScriptedRunner({"timed": script})
    ticks = iter(range(1000))
    core = fake_core(runner, config, clock=lambda: next(ticks))
    engine = Engine(LLM.from_core(core, fake_info(config), ByteTokenizer()), core)
    found = time_decoding(engine, [1, 2, 3], 0.5, 100)
    assert found.sizes == [3, 4, 3]
    assert found.seconds == [1, 1, 1]
    assert time_decoding(engine, [1, 2, 3], 0.5, 3).sizes == [1]  # max_tokens trims


def evaluation(points: list[Point], base: Point, default: float = 0.8) -> Evaluation:
    settings = {"max_tokens": 384, "rounds": 50, "seed": 0, "speed_prompts": 2, "threads": 1, "device": "cpu"}
    return Evaluation(
        model="burger",
        base="bun",
        default_confidence=default,
        suggested_confidence=suggested_confidence(points),
        settings=settings | {"dtype": "float32", "weights": "float32"},
        prompts={"a": ["p0"], "b": ["p1"]},
        base_point=base,
        points=points,
        reliability=reliability(scores(0.8)),
        micro_step_cost=None,
        verdicts=verdicts(points, default, None),
    )


def test_tables_and_json(tmp_path: Path) -> None:
    timed = [Timed([2, 2], [0.5, 0.5])] * 2, [Timed([1, 1], [0.5, 0.5])] * 2
    fast = make_point(0.8, scores(0.8, ended=18), BASE, 50, 0, timed)
    base = make_point(None, BASE, BASE, 50, 0, (timed[1], timed[1]))
    never = [replace(s, repeated=0) for s in BASE]
    no_quotient = make_point(1.0, BASE, never, 50, 0)
    found = evaluation([fast, no_quotient], base)
    write_json(tmp_path / "r.json", found)
    data = json.loads((tmp_path / "r.json").read_text())
    assert data["points"][0]["speed"]["speed_quotient"]["value"] == 2
    assert data["points"][1]["figures"]["repetition_quotient"] == {"value": None, "low": None, "high": None}
    write_markdown(tmp_path / "r.md", found)
    page = (tmp_path / "r.md").read_text()
    assert "| **0.8** | 2.00 [2.00, 2.00] | 0.250 | +0.000 [+0.000, +0.000] | 5.88 | 1.00 [1.00, 1.00] | 90.0 |" in page
    assert "| 4.0 | 2.00 [2.00, 2.00] |" in page
    assert "| **no** | at 0.8: answers that end with EOS" in page
    widths = {line.count("|") for line in page.splitlines() if line.startswith(("| **0.8", "| untouched", "| 1 |"))}
    assert widths == {13, 4}  # the curve's rows, and those by kind
    assert verdict_lines(found)[0] == "ok  at 0.8: tokens per KV at least 1.5: 2.000 [2.000, 2.000]"
    assert verdict_lines(found)[3].startswith("NO  at 0.8: answers that end with EOS")
    assert verdict_lines(found)[-2].startswith("--  a micro-step")
    assert Verdict("a", "b", None) not in found.verdicts


def test_plots_show_every_confidence(tmp_path: Path) -> None:
    points, base = [point(0.5, scores(0.5, groups=8, nll=6)), GOOD, ONE], point(None, BASE)
    plot_curve(tmp_path / "curve.png", "burger", base, points, 0.8)
    plot_reliability(tmp_path / "dial.png", "burger", reliability(scores(0.8)), points)
    for name in ("curve.png", "dial.png"):
        assert (tmp_path / name).stat().st_size > 10_000
