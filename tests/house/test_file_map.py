"""docs/architecture.md names every module once, each with a few words, and none that is not there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("server", "engine", "model", "clients", "training")


def test_the_map_and_the_modules_agree() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text().partition("\n## The files\n")[2]
    mapped = re.findall(r"^- `(\S+\.py)` — \S", page, flags=re.MULTILINE)
    files = {
        str(file.relative_to(ROOT))
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
        if file.name != "__init__.py"
    }
    assert sorted(set(mapped) - files) == []  # gone from the disk
    assert sorted(files - set(mapped)) == []  # without a line in the map
    assert len(mapped) == len(set(mapped))
