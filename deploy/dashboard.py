"""Writes deploy/grafana/dashboards/hamburger.json, the Grafana dashboard of one or several servers.

    python deploy/dashboard.py           write the file
    python deploy/dashboard.py --check   exit 1 unless the file is what would be written

dashboard_panels.py says what is on it. Standard library only.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dashboard_panels import ROWS
from panel import Panel

DASHBOARD = Path(__file__).resolve().parent / "grafana" / "dashboards" / "hamburger.json"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24  # of Grafana's grid
WIDTHS = {"stat": 4, "timeseries": 8, "heatmap": 8}
CHOSEN = '{model_name=~"$model", instance=~"$instance"'  # what {S} stands for in the queries


def grafana_panel(panel: Panel, number: int, x: int, y: int, height: int) -> dict[str, Any]:
    """The panel as Grafana's JSON."""
    heat = panel.kind == "heatmap"
    options: dict[str, Any] = {}
    custom: dict[str, Any] = {}
    if panel.kind == "timeseries":
        custom = {
            "fillOpacity": 20 if panel.stacked else 5,
            "stacking": {"mode": "normal" if panel.stacked else "none"},
        }
        options = {"legend": {"showLegend": True, "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    elif panel.kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area"}
    else:
        options = {"calculate": False, "yAxis": {"axisLabel": "tokens of a group"}, "color": {"scheme": "Oranges"}}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTHS[panel.kind], "h": height},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": DATASOURCE,
                "expr": expression.replace("{S", CHOSEN).replace("[R]", "[$__rate_interval]"),
                "legendFormat": legend,
                "format": "heatmap" if heat else "time_series",
                "instant": False,
                "range": True,
            }
            for place, (expression, legend) in enumerate(panel.queries)
        ],
    }


def panels() -> list[dict[str, Any]]:
    """Rows and panels, laid out from left to right."""
    found: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        position = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        found.append({"id": len(found) + 1, "type": "row", "title": title, "gridPos": position, "panels": []})
        x, y = 0, y + 1
        for place, panel in enumerate(row):
            height = 4 if panel.kind == "stat" else 8
            found.append(grafana_panel(panel, len(found) + 1, x, y, height))
            x += WIDTHS[panel.kind]
            if x == WIDTH or place == len(row) - 1:
                x, y = 0, y + height
    return found


def variable(name: str, label: str) -> dict[str, Any]:
    """A choice among the values of a label."""
    query = f"label_values(hamburger_cache_config_info, {label})"
    return {
        "name": name,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def dashboard() -> dict[str, Any]:
    """The whole file."""
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    return {
        "uid": "hamburger",
        "title": "HAMburger Serve",
        "description": "Written by deploy/dashboard.py. docs/metrics.md says what each metric means.",
        "tags": ["hamburger"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source, variable("model", "model_name"), variable("instance", "instance")]},
        "annotations": {"list": []},
        "panels": panels(),
    }


def main(arguments: list[str]) -> int:
    """Write or check; returns an exit status."""
    text = json.dumps(dashboard(), indent=1) + "\n"
    if arguments != ["--check"]:
        DASHBOARD.write_text(text)
        return 0
    if DASHBOARD.read_text() != text:
        print(f"{DASHBOARD.name} is not what deploy/dashboard.py writes: run it.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
