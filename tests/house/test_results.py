"""The tables in docs/results are what the benchmarks make of the figures beside them."""

import json
from pathlib import Path

import pytest

import drafts
import step
from comparison.report import load_results

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.mark.parametrize("name", ["compare", "compare-4-64"])
def test_comparisons_are_those_of_the_figures(name: str) -> None:
    assert (RESULTS / f"{name}.md").read_text() == load_results(RESULTS / f"{name}.json").table()


def test_the_parts_of_a_step_are_those_of_the_figures() -> None:
    found = json.loads((RESULTS / "step.json").read_text())
    text = (RESULTS / "step.md").read_text()
    assert step.table(found["rows"]) in text
    assert f"`python benchmarks/step.py --steps {found['steps']} --rounds {found['rounds']}`" in text
    assert found["date"] in text


def test_the_tables_of_drafts_are_those_of_the_figures() -> None:
    files = sorted(RESULTS.glob("drafts*.json"))
    assert (RESULTS / "drafts.md").read_text() == drafts.page(files)
    for file in files:
        rows = json.loads(file.read_text())["rows"]
        assert all(row["same"] == row["answers"] for row in rows), file  # what the card says


def test_the_page_and_the_readme_tell_these_figures() -> None:
    """Decode tokens/s of the README's table, for the contestants in its order."""
    results = load_results(RESULTS / "compare.json")
    names = ["hamburger", "base", "llama.cpp server", "llama.cpp", "transformers generate"]
    speeds = [
        [round(results.medians(results.of(streams, name))["decode_tokens_per_second"] or 0) for streams in (1, 16)]
        for name in names
    ]
    readme = (RESULTS.parents[1] / "README.md").read_text()
    table = readme.partition("| | 1 stream | 16 streams |\n")[2].partition("\n\n")[0].splitlines()[1:]
    assert [[int(cell) for cell in row.strip("| ").split(" | ")[1:]] for row in table] == speeds
