"""Runs the tests that are marked `gpu`, and tells how they ended. Only the files that hold such tests are loaded, with
settings of our own: the project's name plugins that a machine without our packages lacks.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
MARK = re.compile(r"\bmark\.gpu\b|\bkernel_device\b")  # the fixture marks what takes it (tests/model/conftest.py)
NO_TESTS = 5  # pytest's exit code
LEAST = 5.0  # seconds: with less left, no file is begun
SETTINGS = """[pytest]
addopts = --import-mode=importlib --strict-markers -p no:cacheprovider -m gpu
markers =
    gpu: needs a GPU
    interop: runs programs of others
    scale: runs replicas on Ray Serve
    timeout(seconds): how long a test may take, where pytest-timeout is installed
pythonpath = {paths}
"""


@dataclass(slots=True)
class Parity:
    """How the tests ended. failures: names and first lines. finished: files of which all is told. error: why some are
    not."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    error: str | None = None

    @property
    def is_done(self) -> bool:
        return self.error is None


def marked_files(folder: Path) -> list[Path]:
    """The test files that have a test marked gpu."""
    return sorted(path for path in folder.rglob("test_*.py") if MARK.search(path.read_text(encoding="utf-8")))


def run_tests(files: Sequence[Path], out: Path, seconds: float, earlier: Parity | None = None) -> Parity:
    """Run them, file by file, and go on from an earlier run; output goes to out/logs/parity.log. A file that cannot be
    loaded counts as one failure; one that did not end in time is begun again by the next run.
    """
    found = Parity() if earlier is None else replace(earlier, error=None)
    if not files:
        found.error = "no test is marked gpu"
        return found
    settings, log = out / "pytest.ini", out / "logs" / "parity.log"
    paths = " ".join(shlex.quote(str(ROOT / name)) for name in ("tests", "benchmarks"))
    settings.write_text(SETTINGS.format(paths=paths), encoding="utf-8")
    end = time.monotonic() + seconds
    with log.open("ab") as output:
        for file in files:
            name = f"{file.parent.name}/{file.name}"
            if name in found.finished:
                continue
            try:
                if end - time.monotonic() < LEAST and file is not files[0]:
                    raise subprocess.TimeoutExpired("pytest", seconds)
                _run_file(file, settings, out / "parity.xml", output, end - time.monotonic(), found)
            except subprocess.TimeoutExpired:
                found.error = f"{file.name} did not end within {seconds:.0f} s; {log} says how far it came"
                return found
            found.finished.append(name)
    return found


def _run_file(file: Path, settings: Path, report: Path, output: IO[bytes], seconds: float, found: Parity) -> None:
    """Adds to `found`. Raises TimeoutExpired."""
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-c", str(settings), "--rootdir", str(ROOT)]
    code = subprocess.run(
        [*command, f"--junitxml={report}", str(file)],
        stdout=output,
        stderr=subprocess.STDOUT,
        timeout=max(seconds, 1.0),
        cwd=report.parent,  # `-m pytest` puts the working folder on the path: not the repository's root
        # Without nvidia-smi the tests' own set-up would take the machine for one without a GPU, and interpret.
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "TRITON_INTERPRET": "0"},
        check=False,
    ).returncode
    if code in (0, 1, NO_TESTS) and report.is_file():
        read_report(report, found)
    else:
        found.failed += 1
        found.failures.append(f"{file.name}: pytest ended with exit code {code}; {output.name} says why")


def read_report(file: Path, found: Parity) -> None:
    """Add what pytest's JUnit file tells."""
    for case in ElementTree.parse(file).iter("testcase"):
        wrong = case.find("failure")
        wrong = case.find("error") if wrong is None else wrong
        if wrong is not None:
            found.failed += 1
            found.failures.append(f"{case.get('name')}: {(wrong.get('message') or '').partition(chr(10))[0][:200]}")
        elif case.find("skipped") is not None:
            found.skipped += 1
        else:
            found.passed += 1
