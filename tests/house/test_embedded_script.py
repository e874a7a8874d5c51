"""training/embedded.sh calls commands that exist, in order, and goes on where it was."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

from hamburger.server.cli import build_parser
from hamburger.training.recipe import read_recipe

ROOT = Path(__file__).parents[2]
RECORDER = """#!/usr/bin/env bash
# Stands for `hamburger`: notes its arguments, and leaves a run's pointer as `train` does.
printf '%q ' "$@" >> "$LOG"; echo >> "$LOG"
if [ "$1" = train ] && [ -n "${STOPPED:-}" ]; then exit 130; fi
if [ "$1" = train ]; then mkdir -p "$WORK"/stage{1,2,3}; echo step-000007 > "$WORK/$(basename "$6")/latest"; fi
"""


def calls(tmp_path: Path, **extra: str) -> list[list[str]]:
    recorder, log, work = tmp_path / "hamburger", tmp_path / "log", tmp_path / "work"
    recorder.write_text(RECORDER)
    recorder.chmod(0o755)
    log.write_text("")
    env = {
        **os.environ,
        "HAMBURGER": str(recorder),
        "LOG": str(log),
        "WORK": str(work),
        "STAGE2": "--set seed=3",
        **extra,
    }
    done = subprocess.run([ROOT / "training" / "embedded.sh", "prompts", work], env=env, timeout=60)
    assert done.returncode == (130 if "STOPPED" in extra else 0)
    return [shlex.split(line) for line in log.read_text().splitlines()]


def test_verified_groups_take_one_stage(tmp_path: Path) -> None:
    first = calls(tmp_path, INIT="model/builtin/graft")
    assert [call[0] for call in first] == ["distill", "segment", "train", "export"]
    for call in first:
        build_parser().parse_args(call)
    recipe = read_recipe(first[2][1], build_parser().parse_args(first[2]).overrides)
    assert recipe.graft.feature_layers == (7, 14, 22, 29)
    assert first[2][-2:] == ["--init", "model/builtin/graft"]
    assert first[3][first[3].index("--groups") + 1] == "verified"


def test_each_command_parses_and_a_second_call_resumes(tmp_path: Path) -> None:
    first, second = calls(tmp_path, COMPOSED="1"), calls(tmp_path, COMPOSED="1")
    names = ["distill", "segment", "train", "regroup", "train", "train", "export", "eval-quality"]
    assert [call[0] for call in first] == [call[0] for call in second] == names
    for call in first + second:
        args = build_parser().parse_args(call)
        if args.command == "train":
            read_recipe(args.recipe, args.overrides)
    inits = {call[call.index("--init") + 1] for call in first if "--init" in call}
    assert inits == {str(tmp_path / "work" / stage / "step-000007") for stage in ("stage1", "stage2")}
    assert first[4][-2:] == ["--set", "seed=3"]
    assert not any("--resume" in call for call in first)
    assert [call[-1] for call in second if call[0] == "train"] == ["--resume"] * 3


def test_nothing_follows_a_run_that_was_stopped(tmp_path: Path) -> None:
    assert [call[0] for call in calls(tmp_path, STOPPED="1")] == ["distill", "segment", "train"]


def test_the_command_is_that_of_the_installation_or_of_the_path(tmp_path: Path) -> None:
    script, log = tmp_path / "ours" / "training" / "embedded.sh", tmp_path / "log"
    own, other = tmp_path / "ours" / ".venv" / "bin" / "hamburger", tmp_path / "bin" / "hamburger"
    script.parent.mkdir(parents=True)
    shutil.copy(ROOT / "training" / "embedded.sh", script)
    for place in (own, other):
        place.parent.mkdir(parents=True)
        place.write_text('#!/usr/bin/env bash\necho "$0" >> "$LOG"; exit 3\n')
        place.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name != "HAMBURGER"}
    env |= {"LOG": str(log), "PATH": f"{other.parent}:{env['PATH']}"}
    for _ in range(2):
        assert subprocess.run([script, "prompts", tmp_path / "work"], env=env, timeout=60).returncode == 3
        own.unlink(missing_ok=True)
    assert [Path(line).resolve() for line in log.read_text().splitlines()] == [own, other]
