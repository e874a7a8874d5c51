"""deploy/render_dashboard.py: a picture of every panel, from what a Prometheus answers."""

import json
import math
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from PIL import Image

import render_dashboard
from dashboard import DASHBOARD
from http_answers import answering
from render_dashboard import Line, Span, bucket_counts, in_unit
from slow_cases import slow

PANELS = [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


@pytest.mark.parametrize("missing", [slow(""), "hamburger_group_size_bucket"])
def test_every_panel_is_drawn_and_empty_ones_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    queries = []

    def answer(path: str) -> tuple[int, bytes]:
        query = parse_qs(urlsplit(path).query)
        queries.append(query["query"][0])
        start, step = float(query["start"][0]), float(query["step"][0].removesuffix("s"))
        buckets = [{"le": name} for name in ("1.0", "2.0", "+Inf")] if "by (le)" in queries[-1] else [{}]
        values = [[start + i * step, str(i + 1)] for i in range(5)]
        found = [] if missing and missing in queries[-1] else [{"metric": m, "values": values} for m in buckets]
        return 200, json.dumps({"data": {"result": found}}).encode()

    out = tmp_path / "board.png"
    with answering(answer) as port:
        code = render_dashboard.main([f"http://127.0.0.1:{port}", "--minutes", "2", "--end", "1000", "--out", str(out)])
    assert code == (1 if missing else 0)
    assert capsys.readouterr().err == ("no data: Group sizes\n" if missing else "")
    assert len(queries) == sum(len(panel["targets"]) for panel in PANELS)
    assert not any("$" in query for query in queries)
    with Image.open(out) as image:
        assert image.width > 1000
        assert len(image.convert("RGB").getcolors(10**7) or []) > 20


def test_variables_are_filled_in_as_grafana_does() -> None:
    span = Span(1000, 1600, 10)
    assert span.step == 10
    assert span.filled_in("rate(x[$__rate_interval]) + y[$__range]") == "rate(x[40s]) + y[600s]"


def test_buckets_become_counts_of_their_own() -> None:
    lines = [
        Line("+Inf", [0.0], [9.0]),
        Line("2.0", [0.0], [7.0]),
        Line("1.0", [0.0], [4.0]),
        Line("4.0", [0.0], [9.0]),
    ]
    assert bucket_counts(lines) == (["1.0", "2.0", "4.0"], [[4.0], [3.0], [2.0]])
    assert bucket_counts([]) == ([], [])


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0.25, "percentunit", "25 %"), (0.0123, "s", "12.3 ms"), (2.5, "s", "2.5 s"), (12345.6, "short", "12,346"),
     (1.26, "short", "1.26"), (math.nan, "s", "–")],
)  # fmt: skip
def test_numbers_for_people(value: float, unit: str, text: str) -> None:
    assert in_unit(value, unit) == text


def test_the_committed_picture_is_small_enough_for_the_readme() -> None:
    picture = Path(render_dashboard.__file__).parents[1] / "docs" / "results" / "dashboard.png"
    assert 20_000 < picture.stat().st_size < 300_000
