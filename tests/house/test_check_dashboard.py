"""deploy/check_dashboard.py fails where a panel would be empty, a query is refused, or an alert cannot be evaluated."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

import check_dashboard
from http_answers import answering

ALERT = {"name": "A", "health": "ok", "state": "firing"}


@contextmanager
def prometheus(value: str, missing: str, rules: list[dict[str, Any]]) -> Iterator[str]:
    """Stands for Prometheus: every series has one sample of `value`, but queries with `missing` in them return none."""

    def answer(path: str) -> tuple[int, bytes]:
        url = urlsplit(path)
        status = 200
        data: dict[str, Any] = {"groups": [{"rules": rules}]}
        if url.path.endswith("/query_range"):
            query = parse_qs(url.query)["query"][0]
            series = [] if missing and missing in query else [{"values": [[0, value]]}]
            status, data = 400 if "$" in query else 200, {"result": series}  # Grafana's variables mean nothing here
        return status, json.dumps({"data": data}).encode()

    with answering(answer) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("value", "missing", "rules", "code"),
    [
        ("1.5", "", [ALERT], 0),
        ("NaN", "", [ALERT], 1),
        ("1.5", "hamburger_group_size_bucket", [ALERT], 1),
        ("1.5", "", [ALERT | {"health": "err", "lastError": "bad"}], 1),
        ("1.5", "", [], 1),
    ],
)
def test_it_fails_where_something_would_be_missing(
    value: str, missing: str, rules: list[dict[str, Any]], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with prometheus(value, missing, rules) as url:
        assert check_dashboard.main([url]) == code
    assert (missing in capsys.readouterr().err) if missing else True
