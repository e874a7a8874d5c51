"""Runs the tests that are marked `gpu`, and tells how they ended. Only the files that hold such tests are loaded, with
settings of our own: the project's name plugins that a machine without our packages lacks.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO
from xml.etree import ElementTree

from comparison.processes import ended_with
from gpu_suite.budget import run_within

ROOT = Path(__file__).parents[2]
# Not in a string. The fixture marks what takes it (tests/model/conftest.py).
MARK = re.compile(r"""^[^"'\n]*\b(mark\.gpu|kernel_device)\b""", re.MULTILINE)
NO_TESTS = 5  # pytest's exit code
LEAST = 5.0  # seconds: with less left, no file is begun
ENVIRONMENT = {
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # those of other projects take seconds a file, and may change what tests do
    # Else the tests' own set-up hides the GPU, and interprets.
    "TRITON_INTERPRET": "0",
}
SETTINGS = """[pytest]
addopts = --import-mode=importlib --strict-markers -p no:cacheprovider -m gpu
markers =
    gpu: needs a GPU
    slow: left out elsewhere
    compilers: minutes of compilers
    page: needs a browser
    interop: runs programs of others
    scale: runs replicas on Ray Serve
    timeout(seconds): how long a test may take elsewhere; here its file is cut
pythonpath = {paths}
"""


@dataclass(slots=True)
class FileTests:
    """How the tests of one file ended. failures: names and first lines. cut: its time was over before all had."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    cut: bool = False


@dataclass(slots=True)
class Parity:
    """How the tests ended, by file. error: why some are still to come, or none can run."""

    files: dict[str, FileTests] = field(default_factory=dict)
    error: str | None = None

    @property
    def is_done(self) -> bool:
        return self.error is None

    @property
    def passed(self) -> int:
        return sum(file.passed for file in self.files.values())

    @property
    def failed(self) -> int:
        return sum(file.failed for file in self.files.values())

    @property
    def skipped(self) -> int:
        return sum(file.skipped for file in self.files.values())

    @property
    def failures(self) -> list[str]:
        return [line for file in self.files.values() for line in file.failures]


def marked_files(folder: Path) -> list[Path]:
    """The test files that have a test marked gpu."""
    return sorted(path for path in folder.rglob("test_*.py") if MARK.search(path.read_text(encoding="utf-8")))


def run_tests(
    files: Sequence[Path],
    out: Path,
    seconds: float,
    earlier: Parity | None = None,
    tell: Callable[[Parity], None] = lambda found: None,
) -> Parity:
    """Run them, file by file, and go on from an earlier run; output goes to out/logs/parity.log. `tell` is given what
    is known after each file.

    A file that cannot be loaded counts as one failure. One whose time was over counts as far as it came; the next run
    begins it again, after those that were not begun.
    """
    found = Parity() if earlier is None else Parity(dict(earlier.files))
    if not files:
        found.error = "no test is marked gpu"
    elif lacking := [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]:
        found.error = f"not installed: {', '.join(lacking)}"
    if found.error is not None:
        return found
    settings, log = out / "pytest.ini", out / "logs" / "parity.log"
    paths = " ".join(shlex.quote(str(ROOT / name)) for name in ("tests/helpers", "benchmarks"))
    settings.write_text(SETTINGS.format(paths=paths), encoding="utf-8")
    end = time.monotonic() + seconds
    names = {f"{file.parent.name}/{file.name}": file for file in files}
    todo = [name for name in names if name not in found.files or found.files[name].cut]
    todo.sort(key=lambda name: name in found.files)
    begun = 0
    with log.open("ab") as output:
        for name in todo:
            left = end - time.monotonic()
            if begun and left < LEAST:
                break
            found.files[name] = _run_file(names[name], settings, out / "parity.xml", output, max(left, 1.0))
            begun += 1
            found.error = _to_come(list(names), found, seconds)
            tell(found)
    return found


def _to_come(names: Sequence[str], found: Parity, seconds: float) -> str | None:
    cut = [name for name in names if name in found.files and found.files[name].cut]
    waiting = [name for name in names if name not in found.files]
    said = [f"{', '.join(cut)} did not end in time"] if cut else []
    said += [f"{len(waiting)} of {len(names)} files were not begun"] if waiting else []
    return f"{' and '.join(said)} ({seconds:.0f} s)" if said else None


def _run_file(file: Path, settings: Path, report: Path, output: IO[bytes], seconds: float) -> FileTests:
    found, began = FileTests(), time.monotonic()
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-c", str(settings), "--rootdir", str(ROOT)]
    code = 0
    try:
        code = run_within(
            [*command, f"--junitxml={report}", str(file)],
            seconds,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=report.parent,  # `-m pytest` puts the working folder on the path: not the repository's root
            env={**os.environ, **ENVIRONMENT},
            ask=True,  # then it still reports the tests that ended
        )
    except subprocess.TimeoutExpired:
        found.cut = True
    found.seconds = time.monotonic() - began
    if report.is_file() and (found.cut or code in (0, 1, NO_TESTS)):
        with suppress(ElementTree.ParseError):  # it was killed while it wrote
            read_report(report, found)
    elif not found.cut:
        found.failed += 1
        found.failures.append(f"{file.name}: pytest: {ended_with(code)}; {output.name} says why")
    return found


def read_report(file: Path, found: FileTests) -> None:
    """Add what pytest's JUnit file tells."""
    for case in ElementTree.parse(file).iter("testcase"):
        if case.get("name") is None:  # the test that was running when the time was over
            continue
        wrong = case.find("failure")
        wrong = case.find("error") if wrong is None else wrong
        if wrong is not None:
            found.failed += 1
            found.failures.append(f"{case.get('name')}: {(wrong.get('message') or '').partition(chr(10))[0][:200]}")
        elif case.find("skipped") is not None:
            found.skipped += 1
        else:
            found.passed += 1
