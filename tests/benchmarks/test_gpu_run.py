"""benchmarks/gpu.py with every stage of a GPU, played by workers that compute nothing: memory, time, failures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

import gpu
from comparison.capacity import Capacity
from comparison.contestants import Launch, Worker
from comparison.processes import ContestantError
from gpu_suite import contestants as gpu_contestants
from gpu_suite import probe as gpu_probe
from gpu_suite.budget import Budget, OutOfTime, ScriptError, run_script
from gpu_suite.report import Results, load_results
from gpu_suite.stages import FORMS_STAGE, FUSED, OURS, OURS_INT8, PEER, PLAIN_INT8, Stage, sizes_of, stages
from peers.device_memory import fitting_pool
from processes import is_alive
from slow_cases import slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Every program that the command starts, by the name that it is started by. WORLD: a folder with a file for each worker
# that lives; `healed` ends what goes wrong, `stuck` has the base never answer.
SCRIPTS = {
    "start.py": """
import runpy
runpy.run_path(str(Path(__file__).with_name(sys.argv.pop(1))), run_name="__main__")
""",
    "gpu_suite.probe": """
print("a library says hello")
print(json.dumps({"name": "a GPU", "torch": "2.11", "read": 1e12, "copied": 1e12, "bandwidth": 1e12,
                  "bfloat16_rate": 1e14}))
""",
    "gpu_suite.models": """
folder = Path(sys.argv[1])
folder.mkdir()
(folder / models.MADE).write_text(json.dumps(models._settings("tiny", 2, "float32")))
""",
    "gpu_suite.decode_step": """
import argparse
parser = argparse.ArgumentParser()
for name in ("device", "model", "rows", "context", "confidences", "repeats"):
    parser.add_argument("--" + name)
args = parser.parse_args()
for rows in map(int, args.rows.split(",")):
    if rows == 3 and not healed:
        raise MemoryError("CUDA out of memory")
    for confidence in map(float, args.confidences.split(",")):
        times = {"eager": 1.0, "graphs": 0.5}
        print(json.dumps({"rows": rows, "context": int(args.context), "confidence": confidence,
                          "tokens_per_group": 2, "milliseconds": times}), flush=True)
""",
    "peers.our_engine": """
from peers.wire import Timing, serve

def load(options):
    model = Path(options.get("model", options.get("folder"))).name
    kind = options.get("engine", {}).get("quantization", "none")
    alive = [pid for pid in os.listdir(world / "pids") if Path("/proc", pid).is_dir()]
    (world / "pids" / str(os.getpid())).touch()
    with (world / "log").open("a") as log:
        print(sys.argv[0].rpartition("/")[2], model, len(alive), file=log)
    if model == "fused" and not healed:
        os.kill(os.getpid(), 9)
    if kind == "int8" and alive:
        raise MemoryError("CUDA out of memory")

    def measure(asks, streams):
        if (world / "stuck").exists() and options["model"].endswith("base"):
            time.sleep(600)
        timings = [Timing(len(ask.prompt_ids)) for ask in asks]
        for timing, ask in zip(timings, asks):
            while timing.tokens < ask.output_tokens:
                timing.add(min(ask.group or 2, ask.output_tokens - timing.tokens), time.perf_counter())
        return timings

    pool = {"pool_slots": 9999, "pool_bytes": 1 << 30, "asked_bytes": 1 << 30}
    return measure, pool | {"free_bytes": 6 << 30, "device": options.get("device", "cuda")}

serve(load)
""",
}
HEAD = f"""
import json, os, sys, time
from pathlib import Path
sys.path.insert(0, {str(BENCHMARKS)!r})
from gpu_suite import models
world = Path(os.environ["WORLD"])
healed = (world / "healed").exists()
"""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pids").mkdir()
    (tmp_path / "scripts").mkdir()
    (tmp_path / "tests").mkdir()
    for name, text in (SCRIPTS | {"peers.hf_static_cache": SCRIPTS["peers.our_engine"]}).items():
        (tmp_path / "scripts" / name).write_text(HEAD + text)
    test = "import pytest\n\n@pytest.mark.gpu\ndef test_right():\n    pass\n"
    (tmp_path / "tests" / "test_marked.py").write_text(test)
    monkeypatch.setenv("WORLD", str(tmp_path))
    monkeypatch.setattr(gpu_contestants, "_has", lambda package: True)
    return tmp_path


def run(world: Path, *options: str) -> tuple[int, Results, list[str]]:
    """Exit code, results, and the starts of this call: script, model, how many others lived."""
    (world / "log").unlink(missing_ok=True)
    given = ["--out", str(world / "out"), "--scripts", str(world / "scripts"), "--tests", str(world / "tests")]
    code = gpu.main([*given, "--geometry", "tiny", "--dtype", "float32", "--threads", "1", *options])
    log = world / "log"
    return code, load_results(world / "out" / "results.json"), log.read_text().splitlines() if log.exists() else []


@pytest.mark.slow
def test_all_stages_of_a_gpu_and_a_second_call_with_more_minutes(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, results, starts = run(world, "--minutes", "4")
    table, said = capsys.readouterr()
    assert code == 1
    assert results.to_come == [FORMS_STAGE, "a cheaper graft"]
    assert results.failed == {FORMS_STAGE: "it ended with exit code 1: MemoryError: CUDA out of memory"}
    assert {(line["rows"], line["confidence"]) for line in results.forms} == {(1, 0), (1, 1)}
    assert "it was ended by SIGKILL" in results.given_up.get(FUSED, "") + str(results.cells["a cheaper graft"])
    assert results.parity is not None
    assert (results.parity.passed, results.parity.error) == (1, None)
    assert "Parity tests: 1 passed, 0 failed, 0 skipped; 1 files" in table
    assert "forms of the decode step: it ended with exit code 1: MemoryError: CUDA out of memory" in table
    assert all((world / "out" / name).stat().st_size > 1000 for name in ("streams.png", "contexts.png"))
    # 1.5 GiB and more each, of 6: three at once, and one alone that was refused beside others.
    others = [int(line.rpartition(" ")[2]) for line in starts]
    assert max(others) == 2
    assert f"{OURS_INT8} is tried once more, alone: MemoryError: CUDA out of memory" in said
    assert results.cells["int8 weights"]
    assert all(cell.error is None for name, cells in results.cells.items() for cell in cells if cell.name != FUSED)
    kept = {(name, cell.key): cell for name, cells in results.cells.items() for cell in cells if cell.figures}

    (world / "healed").touch()
    code, results, starts = run(world, "--minutes", "30")
    assert code == 0
    assert (results.to_come, results.failed, results.given_up) == ([], {}, {})
    assert {line["rows"] for line in results.forms} == {1, 3}
    assert sorted(line.split()[1] for line in starts) == ["fused"]  # the rest was measured before
    after = {(name, cell.key): cell for name, cells in results.cells.items() for cell in cells}
    assert {key: after[key] for key in kept} == kept
    measured = [stage for stage in stages(sizes_of("tiny"), "cuda") if isinstance(stage, Stage)]
    assert len(after) == sum(len(stage.contestants) * stage.rounds for stage in measured)
    assert {PLAIN_INT8, PEER, FUSED} <= {name for _, (_, _, name) in after}
    capsys.readouterr()

    code, results, starts = run(world, "--minutes", "1")
    assert (code, starts) == (0, [])
    assert "starting" not in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 130), slow(signal.SIGKILL, -signal.SIGKILL)])
def test_a_call_that_is_ended_leaves_results_and_no_process_and_the_next_goes_on(
    number: signal.Signals, code: int, world: Path
) -> None:
    """Two workers live then: one stands still, one computes for ever."""
    (world / "stuck").touch()
    given = ["--out", str(world / "out"), "--scripts", str(world / "scripts"), "--tests", str(world / "tests")]
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *given, "--geometry", "tiny", "--dtype", "float32"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([*command, "--threads", "1"], stderr=subprocess.DEVNULL, env=env)
    deadline = time.monotonic() + 60
    while len(pids := [int(file.name) for file in (world / "pids").iterdir()]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.2)
    process.send_signal(number)
    assert process.wait(30) == code
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    before = load_results(world / "out" / "results.json").cells["1 stream"]
    assert [cell.key for cell in before if cell.figures] == [(1, 0, OURS)]
    (world / "stuck").unlink()
    code, results, starts = run(world, "--only", "1 stream")
    assert (code, len(starts), results.to_come) == (0, 2, [])
    assert results.cells["1 stream"][0] == before[0]
    assert len(results.cells["1 stream"]) == 4


def test_who_was_measured_longest_ago_makes_room() -> None:
    capacity = Capacity({"a": 4, "b": 3, "c": 2}, most=3)
    assert capacity.too_many(["a", "b"], 5) == []  # how much is free, nobody has said
    capacity.learn({"device": "cpu"})
    capacity.learn({"free_bytes": 10})
    assert capacity.too_many(["a", "b"], 3) == []
    assert capacity.too_many(["a", "b"], 4) == ["a"]
    assert capacity.too_many(["b", "a"], 7) == ["b", "a"]
    assert capacity.too_many(["a", "b"], 99) == ["a", "b"]  # it may try alone
    assert capacity.too_many(["c", "c", "c"], 1) == ["c"]


def test_a_pool_is_what_was_asked_for_or_what_is_left() -> None:
    assert fitting_pool(10, 100, 50) == 10
    assert fitting_pool(10, 55, 50) == 5
    assert fitting_pool(10, 40, 50) == 1  # the engine says what it would need


def test_what_a_memory_gives_at_most_follows_from_its_clock_and_width() -> None:
    """An H100 (SXM): 2,619 MHz, 5,120 bits."""
    told = SimpleNamespace(name="a GPU", total_memory=80 << 30, memory_clock_rate=2_619_000, memory_bus_width=5120)
    assert gpu_probe._stated(told) == {
        "name": "a GPU",
        "memory_gib": 80.0,
        "bandwidth_at_most": pytest.approx(3352e9, 1e-3),
    }
    told = SimpleNamespace(name="a GPU", total_memory=80 << 30)  # an older torch
    assert gpu_probe._stated(told) == {"name": "a GPU", "memory_gib": 80.0}


def test_a_worker_has_no_more_time_than_the_run(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    worker = Worker(Launch(command, {}, tmp_path / "log", start_seconds=60), left=lambda: 1.0)
    with pytest.raises(ContestantError, match="did not answer within 1 s"):
        worker.start()
    worker.end()


def test_a_wait_that_nobody_thought_of_ends_with_the_time() -> None:
    budget = Budget(1.0, time.monotonic(), 0.2)
    with pytest.raises(OutOfTime), budget.enforced():
        time.sleep(30)
    assert time.monotonic() - budget.started < 5
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


@pytest.mark.parametrize(
    ("code", "seconds", "told"),
    [
        ("print('{}'); raise MemoryError('CUDA out of memory')", 60, "exit code 1: MemoryError: CUDA out of memory"),
        ("import os; print('{}', flush=True); os.kill(os.getpid(), 9)", 60, "it was ended by SIGKILL"),
        ("import time; print('{}', flush=True); time.sleep(60)", 1, "it did not end within 1 s"),
    ],
)
def test_a_script_that_fails_says_why_and_keeps_what_it_printed(
    code: str, seconds: float, told: str, tmp_path: Path
) -> None:
    command: Sequence[str] = [sys.executable, "-c", code]
    with pytest.raises(ScriptError, match=told) as error:
        run_script("x", command, seconds, tmp_path)
    assert json.loads(error.value.output) == {}
