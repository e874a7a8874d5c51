"""Every setting, metric and route is documented, and nothing is documented that is not there."""

import re
from pathlib import Path

from hamburger.server.config import ServeSettings

DOCS = Path(__file__).parents[2] / "docs"


def first_column(page: str) -> list[str]:
    """The code spans that open the table rows of a page."""
    return re.findall(r"^\| `([^`]+)`", (DOCS / page).read_text(), flags=re.MULTILINE)


def test_every_setting_is_documented_and_every_documented_one_exists() -> None:
    assert sorted(first_column("configuration.md")) == sorted(ServeSettings.model_fields)
