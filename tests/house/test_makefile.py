"""The Makefile's first minute: a machine that cannot do it is told why, and set-up happens once."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def make(*arguments: str) -> "subprocess.CompletedProcess[str]":
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


def test_a_missing_python_is_named(tmp_path: Path) -> None:
    result = make("setup", f"VENV={tmp_path / 'venv'}", "PYTHON=no-such-python")
    assert result.returncode == 2
    assert "no-such-python was not found: install Python 3.11 or newer" in result.stderr


@pytest.mark.parametrize(
    ("fails_on", "message"),
    [("version_info", "Python 3.11 or newer is needed"), ("ensurepip", "lacks the venv module")],
)
def test_an_unfit_python_is_told_what_it_lacks(tmp_path: Path, fails_on: str, message: str) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in *{fails_on}*) exit 1;; esac\n')
    python.chmod(0o755)
    result = make("setup", f"VENV={tmp_path / 'venv'}", f"PYTHON={python}")
    assert result.returncode == 2
    assert message in result.stderr
    assert not (tmp_path / "venv").exists()


def test_set_up_happens_once(tmp_path: Path) -> None:
    for stamp in (".ready", ".ready-dev"):
        (tmp_path / stamp).touch()
    for target, command in (("serve", "hamburger serve"), ("test", "pytest")):
        dry = make("--dry-run", target, f"VENV={tmp_path}")
        assert [line.strip() for line in dry.stdout.splitlines()] == [dry.stdout.strip()]  # one command
        assert dry.stdout.startswith(f"exec {tmp_path}/bin/{command}")
    assert "pip install" in make("--dry-run", "serve", f"VENV={tmp_path / 'other'}").stdout


def test_help_says_of_every_target_what_it_does_and_how_long_it_takes() -> None:
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    phony = re.findall(r"^\.PHONY:(.*)$", text, flags=re.MULTILINE)[0].split()
    listed = re.findall(r"^  make ([a-z-]+) +(\S.*?)  +(\S.*)$", make("help").stdout, flags=re.MULTILINE)
    assert sorted(name for name, _, _ in listed) == sorted(phony)
    assert {"serve", "test"} <= set(phony)
    assert all(re.search(r"\d+ (s|min)$|^(at once|seconds|minutes)$", time) for _, time, _ in listed)
    assert make().stdout == make("help").stdout


def test_ci_runs_the_readmes_command_and_whatever_else_there_is_once(tmp_path: Path) -> None:
    for stamp in (".ready", ".ready-dev"):
        (tmp_path / stamp).touch()
    [command] = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make test")]
    assert "make test" in (ROOT / "README.md").read_text()
    make_, *targets = command.split()
    assert (make_, targets) == ("make", ["test", "test-all"])
    dry = make("--dry-run", *targets, f"VENV={tmp_path}", f"CLIENTS_VENV={tmp_path}").stdout.splitlines()
    runs = [line.partition("/bin/pytest ")[2] for line in dry]
    assert [re.findall(r'-m ("[^"]*"|\S+)', run) for run in runs] == [
        [],
        ['"slow and not gpu"'],
        ["compilers"],
        ["page"],
        ["interop"],
    ]
