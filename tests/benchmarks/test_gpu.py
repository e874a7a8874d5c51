"""benchmarks/gpu.sh on the CPU with tiny models: the whole way, without the packages that a bare machine lacks."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

import gpu
from comparison.contestants import Worker
from comparison.figures import Cell
from gpu_suite import contestants as gpu_contestants
from gpu_suite.contestants import KINDS, Setup, beside_pool, contestants, needed_bytes, pool_bytes
from gpu_suite.models import BASE, GRAFTS, is_made, shapes, weight_bytes, write_models
from gpu_suite.report import Results, load_results
from gpu_suite.stages import (
    FUSED,
    OURS,
    PEER,
    PLAIN,
    UNDRAFTED,
    VERIFIED,
    WIDE,
    WIDE_GROUPS,
    WIDE_STAGE,
    Forms,
    Stage,
    output_of,
    sizes_of,
    stages,
)

ROOT = Path(__file__).parents[2]
# What a machine lacks that has torch and transformers but none of our own packages.
ABSENT = "fastapi gguf llguidance msgspec openai pydantic pydantic_core pydantic_settings pytest_asyncio sse_starlette"
BLOCKER = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT.split()!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())

if "peers.hf_static_cache" in sys.argv:  # a peer that is killed, say for its memory
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run_script(out: Path, blocked: Path, *options: str) -> subprocess.CompletedProcess[str]:
    blocked.mkdir(exist_ok=True)
    (blocked / "sitecustomize.py").write_text(BLOCKER)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PYTHONPATH": str(blocked), "PATH": path}
    command = ["bash", str(ROOT / "benchmarks" / "gpu.sh"), "--out", str(out), *options]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)


@pytest.mark.slow
def test_every_stage_of_a_dry_run_with_a_peer_that_crashes(tmp_path: Path) -> None:
    """What ends or resumes it is tested in test_gpu_run.py, whose workers start sooner."""
    out = tmp_path / "out"
    done = run_script(out, tmp_path / "blocked", "--tiny", "--threads", "1", "--minutes", "4")
    assert done.returncode == 1  # the parity tests are not run without a GPU, and transformers died
    results = load_results(out / "results.json")
    assert results.to_come == ["beside transformers"]
    assert list(results.cells) == [s.name for s in stages(sizes_of("tiny"), "cpu") if isinstance(s, Stage)]
    for cell in (cell for cells in results.cells.values() for cell in cells):
        if cell.name == PEER:
            assert "it was ended by SIGKILL" in str(cell.error)
            continue
        assert cell.error is None
        assert cell.figures is not None
        assert cell.figures.weight_bytes_per_second is not None
        if cell.name == VERIFIED:
            assert cell.figures.tokens_per_kv >= 1
        else:
            assert cell.figures.tokens_per_kv == {PLAIN: 1.0, UNDRAFTED: 1.0, **WIDE_GROUPS}.get(cell.name, 2.0)
    assert {(line["rows"], line["confidence"]) for line in results.forms} == {(1, 0), (1, 1), (3, 0), (3, 1)}
    assert results.machine is not None
    assert results.machine["bandwidth"] > 0
    assert results.facts[OURS]["device"] == "cpu"
    assert results.facts[OURS]["pool_bytes"] == results.facts[OURS]["asked_bytes"]
    assert results.starts.keys() == {OURS, PLAIN, WIDE, FUSED, VERIFIED, UNDRAFTED}
    table = done.stdout
    for said in (
        "A dry run: it shows",
        "Parity tests: they need a GPU.",
        "## forms of the decode step",
        "KV pool, slots",
    ):
        assert said in table
    assert "Not measured yet: beside transformers." in table
    assert (out / "table.md").read_text() == table.removesuffix("\n")
    assert {plot.name for plot in out.glob("*.png")} == {"streams.png", "contexts.png"}


def test_what_is_missing_is_said_in_one_line(tmp_path: Path) -> None:
    code = (
        f'source {ROOT}/benchmarks/gpu_suite/environment.sh; need json no_such_module another_one; echo "not reached"'
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("not installed here: no_such_module another_one. ")


def test_the_bytes_of_a_step_are_those_of_the_files(tmp_path: Path) -> None:
    write_models(tmp_path, "tiny", 3, "float32", "cpu")
    assert is_made(tmp_path, "tiny", 3, "float32")
    assert not is_made(tmp_path, "tiny", 2, "float32")
    configs = shapes("tiny", 3)
    base = _bytes(tmp_path / BASE)
    assert weight_bytes(configs[BASE], 4).step == sum(base.values())
    for name in GRAFTS:
        own, counted = _bytes(tmp_path / name), weight_bytes(configs[name], 4)
        head = base["model.embed_tokens.weight"] * (configs[name].graft.short_list_size or 16384) // 16384  # type: ignore[union-attr]
        stop = sum(size for key, size in own.items() if key.startswith("stop_head."))
        assert counted.step == sum(base.values()) + stop
        assert (
            counted.step + counted.composed + counted.micro_step == sum(base.values()) + sum(own.values()) + head + stop
        )


def _bytes(folder: Path) -> dict[str, int]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name).nbytes for name in file.keys() if name != "short_list"}  # noqa: SIM118


def test_a_stage_is_done_when_all_who_are_there_were_measured() -> None:
    stage = Stage("1 stream", 1, 8, 4, ("hamburger", PEER))
    results = Results({})
    results.add(stage, Cell(1, 0, "hamburger", None, "it ended"))
    assert not results.done(stage)
    results.absent[PEER] = "transformers is not installed"
    assert not results.is_done(stage)
    assert not any(results.is_done(stage) for stage in stages(sizes_of("llama-3.2-1b"), "cuda"))
    forms = Forms("forms", (1, 8), (0.0, 1.0), 8, 1)
    for rows in (1, 8):
        for confidence in (0.0, 1.0):
            assert not results.is_done(forms)
            results.add_form({"rows": rows, "confidence": confidence})
    assert results.is_done(forms)


def test_eight_bit_weights_are_half_of_what_they_are_in_bfloat16() -> None:
    """Llama-3.2-1B: 973 M parameters of layers, a head of 263 M; a published graft has four layers like the trunk's."""
    configs = shapes("llama-3.2-1b", 2)
    plain, small = (weight_bytes(configs[BASE], 2, eight_bits=small).step for small in (False, True))
    assert plain == pytest.approx(2 * (973e6 + 263e6), rel=1e-3)
    assert small == pytest.approx(973e6 + 2 * 263e6, rel=1e-3)
    micro, small_micro = (weight_bytes(configs["published"], 2, eight_bits=f).micro_step for f in (False, True))
    assert micro == pytest.approx(2 * (243e6 + 263e6 + 8.4e6), rel=1e-2)
    assert small_micro == pytest.approx(243e6 + 263e6 + 2 * 8.4e6, rel=1e-2)
    on_gpu, on_cpu = ({s.name for s in stages(sizes_of("llama-3.2-1b"), device)} for device in ("cuda", "cpu"))
    assert on_gpu - on_cpu == {"int8 weights"}


def setup_of(folder: Path, device: str = "cuda") -> Setup:
    sizes = sizes_of("llama-3.2-1b")
    return Setup(
        folder, folder, folder, "llama-3.2-1b", 2, device, "bfloat16", 1, sizes, {"max_queue": 7}, 60, lambda: math.inf
    )


def options_of(found: object) -> dict[str, object]:
    assert isinstance(found, Worker)
    options: dict[str, object] = json.loads(found.launch.command[-1])
    return options


def test_transformers_take_part_where_they_are_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for installed in (False, True):
        monkeypatch.setattr(gpu_contestants, "_has", lambda package, installed=installed: installed)
        found, absent = contestants(setup_of(tmp_path))
        assert (PEER in found) == installed == (PEER not in absent)
        for name in KINDS:
            engine = options_of(found[name])["engine"]
            assert isinstance(engine, dict)
            assert engine["max_queue"] == 7


def test_pools_are_as_large_as_the_stages_of_a_contestant_want(tmp_path: Path) -> None:
    """32 KiB a slot; 256 streams of 1,536 tokens, or one context of 32,768, each with a block more."""
    setup = setup_of(tmp_path)
    assert pool_bytes(setup, OURS) == pool_bytes(setup, PLAIN) == 256 * (1536 + 32) * 32768
    assert pool_bytes(setup, WIDE) == 64 * (1536 + 32) * 32768
    assert pool_bytes(setup, FUSED) == (32768 + 32) * 32768
    assert needed_bytes(setup).keys() == {*KINDS, PEER}
    assert needed_bytes(setup)[OURS] == pool_bytes(setup, OURS) + beside_pool(setup, OURS)
    assert 4 << 30 < beside_pool(setup, PLAIN) < beside_pool(setup, OURS) < 9 << 30
    found, _ = contestants(setup)
    for name, streams in ((OURS, 256), (WIDE, 64), (FUSED, 1)):
        options = options_of(found[name])
        assert options["kv_cache_memory"] == pool_bytes(setup, name)
        assert options["beside_pool"] == beside_pool(setup, name)
        assert isinstance(options["engine"], dict)
        assert options["engine"]["max_num_seqs"] == streams


def test_a_report_says_whose_pool_did_not_hold_all_streams() -> None:
    results = Results({"device": "cuda", "geometry": "tiny", "dtype": "float32", "group": 2, "date": "", "engine": {}})
    results.machine = {"name": "a GPU", "read": 9e11, "copied": 1e12, "bfloat16_rate": 1e14, "bandwidth_at_most": 2e12}
    stage = Stage(WIDE_STAGE, 4, 100, 40, (OURS, "hamburger 1 of 4", "hamburger 4 of 4", PLAIN))
    for name in stage.contestants:
        results.add(stage, Cell(4, 0, name, None, "no"))
    results.facts = {
        name: {"pool_slots": 520, "pool_bytes": 1 << 30, "asked_bytes": 2 << 30} for name in (OURS, WIDE, PLAIN)
    }
    table = results.table()
    assert "hamburger's KV pool" not in table  # 4 (100 + 40 / 2) = 480
    assert "hamburger 4 of 4's KV pool" not in table
    assert "hamburger 1 of 4's KV pool held 520 of the 560 slots of all streams: some waited." in table
    assert "base's KV pool held 520 of the 560 slots" in table
    assert "| hamburger of 4 |  | 520 | 1.00 | 2.00 |" in table
    assert "clock and width of its memory give 2000 GB/s at most" in table
    assert "A dry run" not in table


def test_answers_shrink_with_the_time_of_the_first_call() -> None:
    assert output_of("llama-3.2-1b", 8) == 512
    assert output_of("llama-3.2-1b", 20) == 512
    assert output_of("llama-3.2-1b", 2) == 128
    for output in (128, 512):
        sizes = replace(sizes_of("llama-3.2-1b"), output=output)
        measured = [stage for stage in stages(sizes, "cuda") if isinstance(stage, Stage)]
        assert all(stage.prompt + stage.output <= 32768 for stage in measured)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--group", "17"], "group is 17"),
        (["--only", "2 streams"], "choose from 1 stream"),
        (["--engine", "micro_steps=2"], "engine names micro_steps: choose from model, "),
    ],
)
def test_settings_that_cannot_be_used(
    options: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(["--out", str(tmp_path), *options]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_a_device_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = run_script(tmp_path / "out", tmp_path / "blocked", "--device", "cuda:9", "--geometry", "tiny")
    assert done.returncode == 1
    assert "machine: it ended with exit code 1: " in done.stderr
    results = load_results(tmp_path / "out" / "results.json")
    assert results.machine is None
    assert results.failed.keys() == {"machine"}
