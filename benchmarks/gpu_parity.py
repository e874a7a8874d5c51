"""Runs the tests that are marked `gpu`, and tells how they ended. Only the files that hold such tests are loaded, with
settings of our own: the project's name plugins that a machine without our packages lacks.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
MARK = re.compile(r"\bmark\.gpu\b")
SETTINGS = """[pytest]
addopts = --import-mode=importlib --strict-markers -p no:cacheprovider -m gpu
markers =
    gpu: needs a GPU
    interop: runs programs of others
    scale: runs replicas on Ray Serve
pythonpath = {paths}
"""


@dataclass(frozen=True, slots=True)
class Parity:
    """How the tests ended. failures: names and first lines. error: why there is nothing to tell."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: list[str] = field(default_factory=list)
    error: str | None = None

    @property
    def is_done(self) -> bool:
        return self.error is None


def marked_files(folder: Path) -> list[Path]:
    """The test files that have a test marked gpu."""
    return sorted(path for path in folder.rglob("test_*.py") if MARK.search(path.read_text(encoding="utf-8")))


def run_tests(files: Sequence[Path], out: Path, seconds: float) -> Parity:
    """Run them; their output goes to out/logs/parity.log. An error is a run that came to no end."""
    if not files:
        return Parity(error="no test is marked gpu")
    settings, report, log = out / "pytest.ini", out / "parity.xml", out / "logs" / "parity.log"
    paths = " ".join(shlex.quote(str(ROOT / name)) for name in ("tests", "benchmarks"))
    settings.write_text(SETTINGS.format(paths=paths), encoding="utf-8")
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-c", str(settings), "--rootdir", str(ROOT)]
    command += [f"--junitxml={report}", *map(str, files)]
    with log.open("wb") as output:
        try:
            code = subprocess.run(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                cwd=out,  # `-m pytest` puts the working folder on the path: not the repository's root
                env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return Parity(error=f"the tests did not end within {seconds:.0f} s; {log} says how far they came")
    if code not in (0, 1) or not report.is_file():
        return Parity(error=f"pytest ended with exit code {code}; {log} says why")
    return read_report(report)


def read_report(file: Path) -> Parity:
    """A run from pytest's JUnit file."""
    counts: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0}
    failures = []
    for case in ElementTree.parse(file).iter("testcase"):
        wrong = case.find("failure")
        wrong = case.find("error") if wrong is None else wrong
        if wrong is not None:
            counts["failed"] += 1
            failures.append(f"{case.get('name')}: {(wrong.get('message') or '').partition(chr(10))[0][:200]}")
        elif case.find("skipped") is not None:
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
    return Parity(**counts, failures=failures)
