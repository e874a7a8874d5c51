"""gpu_train.sh ends in time and passes exit codes on; pieces.sh proves that a file arrived whole."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Stands for training/embedded.sh.
STEPS = """#!/usr/bin/env bash
set -e
"$HAMBURGER" first "$2"
"$HAMBURGER" second "$2"
"""
# Stands for the command. WORK/does says what it does; a run that is asked to end writes a checkpoint first.
COMMAND = """
import os, signal, sys, time
from importlib.metadata import version
from pathlib import Path

def main():
    step, work = sys.argv[1], Path(sys.argv[2])
    does = (work / "does").read_text()
    if does == "hang":
        def stop(number, frame):
            (work / "checkpoint").write_text(step)
            sys.exit(130)
        signal.signal(signal.SIGTERM, stop)
        time.sleep(600)
    if does == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    print(step, version("hamburger-serve"))
    return 3 if does == "fail" else 0
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository whose training takes no time."""
    folder = tmp_path / "repository"
    (folder / "benchmarks" / "gpu_suite").mkdir(parents=True)
    for name in ("gpu_train.sh", "gpu_suite/environment.sh"):
        shutil.copy(ROOT / "benchmarks" / name, folder / "benchmarks" / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name in ("server", "training"):
        (folder / name).mkdir()
    (folder / "server" / "cli.py").write_text(COMMAND)
    (folder / "training" / "embedded.sh").write_text(STEPS)
    return folder


def train(root: Path, does: str, *options: str) -> subprocess.CompletedProcess[str]:
    work = root / "work"
    work.mkdir(exist_ok=True)
    (work / "does").write_text(does)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PATH": path}
    command = ["bash", str(root / "benchmarks" / "gpu_train.sh"), "prompts", str(work), *options]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_a_step_that_outlasts_the_call_is_ended_and_the_next_call_goes_on(root: Path) -> None:
    stopped = train(root, "hang", "--minutes", "1.3")  # eighteen seconds, and a minute to end
    assert stopped.returncode == 75
    assert (root / "work" / "checkpoint").read_text() == "first"
    assert "the same call goes on from here" in stopped.stderr
    finished = train(root, "finish")
    assert finished.returncode == 0
    assert finished.stdout.splitlines() == [f"{step} {version('hamburger-serve')}" for step in ("first", "second")]


def test_a_step_that_fails_is_not_called_stopped(root: Path) -> None:
    assert train(root, "fail").returncode == 3


def test_a_step_that_is_killed_before_its_time_is_a_failure(root: Path) -> None:
    done = train(root, "die")
    assert done.returncode == 137
    assert "did the machine's memory suffice?" in done.stderr


def test_minutes_are_a_number(root: Path) -> None:
    done = train(root, "finish", "--minutes", "abc")
    assert (done.returncode, done.stderr) == (2, "gpu_train.sh: --minutes is 'abc': write a number of minutes\n")


def test_both_folders_must_be_named(root: Path) -> None:
    done = train(root, "finish", "another")
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")


def pieces(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "benchmarks" / "pieces.sh"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_file_arrives_whole_or_not_at_all(tmp_path: Path) -> None:
    file, folder, joined = tmp_path / "model.bin", tmp_path / "pieces", tmp_path / "joined.bin"
    file.write_bytes(bytes(range(256)) * 40)
    assert pieces("split", file, folder, "3000").returncode == 0
    assert [path.stat().st_size for path in sorted(folder.glob("*.00?"))] == [3000, 3000, 3000, 1240]
    assert pieces("join", folder / "model.bin", joined).returncode == 0
    assert joined.read_bytes() == file.read_bytes()
    joined.unlink()
    (folder / "model.bin.002").write_bytes(bytes(3000))
    broken = pieces("join", folder / "model.bin", joined)
    assert broken.returncode == 1
    assert "do not make the file" in broken.stderr
    assert not joined.exists()
    assert pieces("mend", file).returncode == 2
