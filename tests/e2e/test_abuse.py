"""A short run of benchmarks/abuse.py against a real server."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import abuse


@pytest.mark.slow
def test_a_real_server_stays_whole(grafted_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "report.json"
    options = [str(grafted_folder), "--dtype", "float32", "--kv-cache-memory", "64MiB"]
    # The server looks each second whether clients that have said all are still there.
    given = ["--bodies", "600", "--settle-seconds", "5", "--growth", "3", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["abuse.py", *given, "--", *options])
    code = abuse.main()
    report = json.loads(out.read_text())
    assert report["faults"] == []
    assert code == 0
    counts = report["counts"]
    assert counts["status 200"] > 50
    assert counts["status 400"] > 50
    assert counts["raw"] >= 12
    assert report["stream_gap_seconds"]["max"] > 0
