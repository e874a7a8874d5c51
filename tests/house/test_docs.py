"""Every setting, metric and route is in the docs as it is in the code, and the docs name none that is not there."""

import re
from pathlib import Path

import yaml

from fake_engines import fake_engine
from fakes import ByteTokenizer
from hamburger.model.checkpoints.config.hf import SUPPORTED
from hamburger.server.additional_models import OWN_SETTINGS
from hamburger.server.app import create_app
from hamburger.server.config import ServeSettings
from hamburger.server.operation.metrics import ServerMetrics
from hamburger.server.operation.request_log import FIELDS
from hamburger.server.replicas.scale_options import ScaleOptions
from hamburger.server.setting_values import parse_bytes

DOCS = Path(__file__).parents[2] / "docs"


def rows(page: str) -> dict[str, str]:
    """The table rows that open with a code span: its text -> the second column."""
    found = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", (DOCS / page).read_text(), flags=re.MULTILINE)
    return dict(found)


def test_settings_and_their_page_agree() -> None:
    assert set(rows("configuration.md")) == set(ServeSettings.model_fields)


def test_the_settings_of_further_models_and_their_list_agree() -> None:
    page = (DOCS / "configuration.md").read_text()
    listed = page.partition("**Its own settings** follow after commas:")[2].partition(". What is not given")[0]
    assert set(re.findall(r"`(\w+)`", listed)) == OWN_SETTINGS


def test_options_of_replicas_and_their_page_agree() -> None:
    assert set(rows("ray.md")) == set(ScaleOptions.model_fields)
    for name, column in rows("ray.md").items():
        if column.startswith("`"):
            assert yaml.safe_load(column.strip("`")) == ScaleOptions.model_fields[name].default, name
        else:  # words: none, or what follows from the settings
            assert ScaleOptions.model_fields[name].default is None, name


def test_defaults_are_the_documented_ones() -> None:
    for name, column in rows("configuration.md").items():
        default = ServeSettings.model_fields[name].default
        written = column.strip("`")
        if column.startswith("`"):
            assert _read(written, default) == default, name
        else:  # words, for what is only known later
            assert default in (None, []), name


def _read(written: str, default: object) -> object:
    value = yaml.safe_load(written)
    return parse_bytes(value) if type(default) is int else value


async def test_metrics_and_their_page_agree() -> None:
    metrics = ServerMetrics("name")
    async with fake_engine() as engine:
        metrics.add_gauges(engine)
        text = metrics.render().decode()
    served = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, flags=re.MULTILINE))
    served = {name: kind for name, kind in served.items() if not name.endswith("_created")}
    documented: dict[str, str] = {}
    for section in (DOCS / "metrics.md").read_text().split("\n## "):
        kind = section.split("\n", 1)[0].lower().removesuffix("s")
        documented |= dict.fromkeys(re.findall(r"^\| `(\w+)`", section, flags=re.MULTILINE), kind)
    assert documented == served


async def test_routes_and_their_page_agree() -> None:
    metrics = ServerMetrics("name")
    async with fake_engine(observer=metrics) as engine:
        paths = create_app(engine, ByteTokenizer(), metrics, ServeSettings(), "name").openapi()["paths"]
    served = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    documented = set(re.findall(r"`((?:GET|POST|DELETE) /[^`]*)`", (DOCS / "api.md").read_text()))
    assert documented == {re.sub(r"\{[^}]*\}", "{id}", route) for route in served}


def test_fields_of_the_requests_line_and_their_table_agree() -> None:
    section = (DOCS / "operations.md").read_text().split("## Logs")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]+) \|", section, flags=re.MULTILINE)
    assert [name for cell in cells for name in re.findall(r"`(\w+)`", cell)] == list(FIELDS)


def test_kinds_of_models_and_their_table_agree() -> None:
    section = (DOCS / "serving.md").read_text().split("| `model_type` |")[1].split("\n\n")[0]
    cells = re.findall(r"^\| (`[^|]+) \|", section, flags=re.MULTILINE)
    assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} == set(SUPPORTED)
