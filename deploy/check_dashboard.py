"""Evaluates every query of the dashboards, and every alert's expression, on a running Prometheus.

    python deploy/check_dashboard.py http://127.0.0.1:9090

Exits 1 when a query of a dashboard returns no number in the last ten minutes, or when Prometheus does not understand an
expression. The server should have been under load, with some requests that it refused. Standard library only.
"""

from __future__ import annotations

import json
import math
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DASHBOARDS = Path(__file__).resolve().parent / "grafana" / "dashboards"
# What Grafana puts in the place of its variables.
VALUES = {"$__rate_interval": "1m", "$__range": "10m", "$model": ".*", "$instance": ".*"}
RANGE_SECONDS, STEP_SECONDS = 600, 10


def queries(dashboard: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(panel's title, PromQL) with Grafana's variables filled in."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"]
            for name, value in VALUES.items():
                expression = expression.replace(name, value)
            yield panel["title"], expression


def ask(prometheus: str, path: str, **parameters: object) -> Any:
    """The `data` of an answer. Raises OSError, with Prometheus' own words where it refused."""
    url = f"{prometheus.rstrip('/')}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            return json.load(response)["data"]
    except urllib.error.HTTPError as error:
        raise OSError(error.read().decode(errors="replace")) from error


def count_samples(prometheus: str, expression: str) -> int:
    """How many finite samples the expression has in the last minutes."""
    now = time.time()
    found = ask(
        prometheus, "query_range", query=expression, start=now - RANGE_SECONDS, end=now, step=f"{STEP_SECONDS}s"
    )
    return sum(math.isfinite(float(value)) for series in found["result"] for _, value in series["values"])


def main(arguments: list[str]) -> int:
    """Check; returns an exit status."""
    [prometheus] = arguments
    failed = evaluated = 0
    for path in sorted(DASHBOARDS.glob("*.json")):
        for title, expression in queries(json.loads(path.read_text())):
            evaluated += 1
            try:
                count = count_samples(prometheus, expression)
            except OSError as error:
                count, title = 0, f"{title}: {error}"
            if not count:
                failed += 1
                print(f"no data: {title}\n  {expression}", file=sys.stderr)
    groups = ask(prometheus, "rules", type="alert")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    for rule in rules:
        if rule["health"] != "ok":
            failed += 1
            print(f"alert {rule['name']} is {rule['health']}: {rule.get('lastError')}", file=sys.stderr)
    firing = sorted(rule["name"] for rule in rules if rule["state"] == "firing")
    print(
        f"{evaluated} queries and {len(rules)} alerts evaluated, {failed} failed; firing: {', '.join(firing) or 'none'}"
    )
    return 1 if failed or not evaluated or not rules else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
