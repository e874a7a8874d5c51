"""Dashboard, alerts and runbook: each metric and label in a query is exported, each alert is explained and tested."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import check_dashboard
import dashboard
from fake_engines import fake_engine
from hamburger.server.operation.metrics import ServerMetrics

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
ALERTS: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
PROMETHEUS: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
# Labels that Prometheus adds to what it scrapes.
SCRAPED = {"job", "instance"}


async def exported() -> dict[str, set[str]]:
    """The names of all samples that the server exports -> their labels."""
    metrics = ServerMetrics("name")
    metrics.on_failure(500, None)
    async with fake_engine(groups="verified") as engine:
        metrics.add_gauges(engine)
        text = metrics.render().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {sample.name: set(sample.labels) for sample in samples}


def metrics_of(expression: str) -> dict[str, set[str]]:
    """The metrics of a PromQL expression -> the labels that it matches on."""
    found: dict[str, set[str]] = {}
    for name, matchers in re.findall(r"\b(hamburger_\w+)(?:\{([^}]*)\})?", expression):
        found.setdefault(name, set()).update(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
    return found


def dashboard_expressions() -> list[str]:
    return [
        target["expr"]
        for path in DASHBOARDS
        for panel in json.loads(path.read_text())["panels"]
        for target in panel.get("targets", [])
    ]


def unknown(expressions: list[str], samples: dict[str, set[str]]) -> set[str]:
    """What the expressions name and the server does not export: metrics, and labels as metric.label."""
    wrong = set()
    for expression in expressions:
        grouped = {
            label.strip() for labels in re.findall(r"\bby \(([^)]*)\)", expression) for label in labels.split(",")
        }
        for name, labels in metrics_of(expression).items():
            if name not in samples:
                wrong.add(name)
                continue
            for label in (labels | grouped) - SCRAPED - samples[name]:
                wrong.add(f"{name}.{label}")
    return wrong


async def test_every_metric_of_the_dashboard_is_exported() -> None:
    expressions = dashboard_expressions()
    assert len(expressions) > 30
    assert not unknown(expressions, await exported())


async def test_every_metric_of_the_alerts_is_exported() -> None:
    assert not unknown([rule["expr"] for rule in ALERTS], await exported())


async def test_a_wrong_metric_or_label_would_be_noticed() -> None:
    samples = await exported()
    assert unknown(['rate(hamburger_no_such_total{model_name="a"}[1m])'], samples) == {"hamburger_no_such_total"}
    assert unknown(['hamburger_num_requests_running{code="1"}'], samples) == {"hamburger_num_requests_running.code"}
    assert unknown(["sum by (le) (hamburger_kv_slots_total)"], samples) == {"hamburger_kv_slots_total.le"}


async def test_the_dashboard_shows_every_family_but_the_pools_shape() -> None:
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in await exported() if not name.endswith("_created")}
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for text in dashboard_expressions() for name in metrics_of(text)}
    assert families - shown == {"hamburger_cache_config_info"}


async def test_lines_of_single_engines_are_named_by_them() -> None:
    """Replicas on Ray are all behind one address."""
    samples = await exported()
    named = [
        target["legendFormat"]
        for path in DASHBOARDS
        for panel in json.loads(path.read_text())["panels"]
        for target in panel.get("targets", [])
        if not re.search(r"\b(sum|avg|min|max)\b", target["expr"])
        and any("engine" in samples[name] for name in metrics_of(target["expr"]))
    ]
    assert len(named) == 3
    assert all("{{engine}}" in legend for legend in named)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_panels_have_ids_places_and_the_chosen_data_source(path: Path) -> None:
    board = json.loads(path.read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        taken = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert place["x"] + place["w"] <= 24, panel["title"]
        assert not cells & taken, panel["title"]
        cells |= taken
        for target in panel.get("targets", []):
            assert panel["datasource"]["uid"] == target["datasource"]["uid"] == "${datasource}"
            used = set(re.findall(r"\$(\w+)", target["expr"]))
            assert used <= {"__rate_interval", "__range", *variables}, panel["title"]
            assert "$" not in dict(check_dashboard.queries(board))[panel["title"]]


def test_the_dashboard_is_what_its_script_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert dashboard.main(["--check"]) == 0
    monkeypatch.setattr(dashboard, "DASHBOARD", tmp_path / "board.json")
    (tmp_path / "board.json").write_text("{}")
    assert dashboard.main(["--check"]) == 1


def test_grafana_finds_its_dashboards_and_prometheus() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    [provider] = yaml.safe_load((provisioning / "dashboards" / "hamburger.yml").read_text())["providers"]
    mounted = dict(volume.split(":")[:2] for volume in COMPOSE["services"]["grafana"]["volumes"])
    assert mounted["./deploy/grafana/dashboards"] == provider["options"]["path"]
    assert mounted["./deploy/grafana/provisioning"] == "/etc/grafana/provisioning"
    home = COMPOSE["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert [f"{provider['options']['path']}/{path.name}" for path in DASHBOARDS] == [home]
    [source] = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in COMPOSE["services"]
    assert source["jsonData"]["timeInterval"] == PROMETHEUS["global"]["scrape_interval"]


def test_prometheus_scrapes_the_server_under_the_name_that_alerts_use() -> None:
    jobs = {job["job_name"]: job["static_configs"][0]["targets"] for job in PROMETHEUS["scrape_configs"]}
    assert jobs["hamburger"] == ["hamburger:8000"]
    named = {name for rule in ALERTS for name in re.findall(r'job="(\w+)"', rule["expr"])}
    assert named == {"hamburger"}
    assert [(DEPLOY / "prometheus" / name).is_file() for name in PROMETHEUS["rule_files"]] == [True]


def test_every_alert_has_a_section_in_the_runbook_and_links_to_it() -> None:
    sections = re.findall(r"^## (\w+)$", (ROOT / "docs" / "runbook.md").read_text(), flags=re.MULTILINE)
    assert sections == [rule["alert"] for rule in ALERTS]
    for rule in ALERTS:
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_every_section_says_what_it_means_what_to_look_at_and_what_to_do() -> None:
    _, *sections = (ROOT / "docs" / "runbook.md").read_text().split("\n## ")
    for section in sections:
        bold = re.findall(r"^\*\*(.+?)\.\*\*", section, flags=re.MULTILINE)
        assert bold == ["What it means", "What to look at", "What to do"], section.split("\n", 1)[0]


def test_the_runbook_lists_every_alert_with_its_severity() -> None:
    rows = re.findall(r"^\| \[(\w+)\]\(#\w+\) \| (\w+) \|", (ROOT / "docs" / "runbook.md").read_text(), re.MULTILINE)
    assert dict(rows) == {rule["alert"]: rule["labels"]["severity"] for rule in ALERTS}


async def test_the_runbook_names_only_metrics_that_are_exported() -> None:
    assert not unknown([(ROOT / "docs" / "runbook.md").read_text()], await exported())


def test_promtool_tests_each_alert_firing_and_silent() -> None:
    tests = yaml.safe_load((DEPLOY / "prometheus" / "alerts_test.yml").read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    for rule in ALERTS:
        expected = [bool(case["exp_alerts"]) for case in cases if case["alertname"] == rule["alert"]]
        assert True in expected, rule["alert"]
        assert False in expected, rule["alert"]
