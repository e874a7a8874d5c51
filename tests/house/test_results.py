"""The tables in docs/results are what the benchmarks make of the figures beside them."""

import json
import re
from pathlib import Path

import pytest

import drafts
import step
from comparison.report import load_results

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.mark.parametrize("name", ["compare", "compare-1-64"])
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
    dates = re.findall(r"^## .*, ([0-9-]{10}), ", (RESULTS / "drafts.md").read_text(), flags=re.MULTILINE)
    assert dates == sorted(dates, reverse=True)  # who follows a link meets the newest
    assert len(dates) == len(files)
    for file in files:
        rows = json.loads(file.read_text())["rows"]
        assert all(row["same"] == row["answers"] for row in rows), file  # what the card says


STREAMS = (1, 4, 16, 64)


def table_behind(page: Path, head: str) -> list[list[str]]:
    """The cells of a table's rows, but for the first of each."""
    rows = page.read_text().partition(head)[2].partition("\n\n")[0].splitlines()[2:]
    assert rows
    return [row.strip("| ").split(" | ")[1:] for row in rows]


def test_the_page_and_the_readme_tell_these_figures() -> None:
    """Decode tokens/s, and on the page time to the first token and memory too, for the contestants in its order."""
    results, root = load_results(RESULTS / "compare-1-64.json"), RESULTS.parents[1]

    def medians(name: str) -> list[tuple[int, int, int]]:
        factors = {"decode_tokens_per_second": 1, "ttft_p50": 1000, "peak_memory_mib": 1}
        found = [results.medians(results.of(streams, name)) for streams in STREAMS]
        speed, ttft, memory = ([round((each[key] or 0) * by) for each in found] for key, by in factors.items())
        return list(zip(speed, ttft, memory, strict=True))

    names = ["hamburger", "base", "engine", "llama.cpp", "llama.cpp server", "transformers batching"]
    page = table_behind(root / "docs" / "performance.md", "| decode tok/s (TTFT p50, ms; memory, MiB) |")
    assert page == [[f"{speed} ({ttft}; {memory})" for speed, ttft, memory in medians(name)] for name in names]
    names = ["hamburger", "base", "llama.cpp server", "llama.cpp", "transformers batching"]
    readme = table_behind(root / "README.md", "| | 1 stream | 4 | 16 | 64 |")
    assert readme == [[str(speed) for speed, _, _ in medians(name)] for name in names]
