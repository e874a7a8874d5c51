"""benchmarks/gpu.sh on the CPU with tiny models: the whole way, without the packages that a bare machine lacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

import gpu
import gpu_stages
from compare_contestants import Worker
from compare_figures import Cell
from gpu_model import BASE, GRAFTS, is_made, shapes, weight_bytes, write_models
from gpu_parity import marked_files, run_tests
from gpu_report import Results, load_results
from gpu_stages import FLASHINFER, FOLDERS, PEER, Setup, Stage, contestants, sizes_of, stages

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
"""


def run_script(out: Path, blocked: Path, *options: str) -> subprocess.CompletedProcess[str]:
    blocked.mkdir(exist_ok=True)
    (blocked / "sitecustomize.py").write_text(BLOCKER)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PYTHONPATH": str(blocked), "PATH": path}
    command = ["bash", str(ROOT / "benchmarks" / "gpu.sh"), "--out", str(out), *options]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)


def test_the_whole_way_and_a_second_call_measures_nothing_again(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--geometry", "tiny", "--dtype", "float32", "--threads", "1", "--minutes", "4"]
    options += ["--only", "1 stream,a cheaper graft"]
    first = run_script(tmp_path / "out", tmp_path / "blocked", *options)
    assert first.returncode == 1  # the parity tests are not run without a GPU, which is no success
    assert "not measured yet" not in first.stderr
    results = load_results(tmp_path / "out" / "results.json")
    assert results.machine is not None
    assert results.machine["bandwidth"] > 0
    assert results.settings["device"] == "cpu"
    assert {name: len(cells) for name, cells in results.cells.items()} == {"1 stream": 4, "a cheaper graft": 2}
    for cell in (cell for cells in results.cells.values() for cell in cells):
        assert cell.error is None
        assert cell.figures is not None
        assert cell.figures.limit_fraction is not None
        assert cell.figures.tokens_per_kv == (1.0 if cell.name == "base" else 2.0)
    assert results.facts["hamburger"]["device"] == "cpu"
    assert "On CPU" in first.stdout
    assert (tmp_path / "out" / "streams.png").is_file()
    again = run_script(tmp_path / "out", tmp_path / "blocked", *options)
    assert "starting" not in again.stderr
    assert again.stdout == first.stdout
    other = run_script(tmp_path / "out", tmp_path / "blocked", *options, "--group", "3")
    assert other.returncode == 2
    assert "measured with another group" in other.stderr


def test_what_is_missing_is_said_in_one_line(tmp_path: Path) -> None:
    code = f'source {ROOT}/benchmarks/gpu_env.sh; need json no_such_module another_one; echo "not reached"'
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
        assert counted.step + counted.merge + counted.micro_step == sum(base.values()) + sum(own.values()) + head + stop


def _bytes(folder: Path) -> dict[str, int]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name).nbytes for name in file.keys() if name != "short_list"}  # noqa: SIM118


def test_only_tests_marked_gpu_are_run(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "test_plain.py").write_text("def test_never():\n    assert False\n")
    (tmp_path / "test_marked.py").write_text(
        "import pytest\nfrom small_models import CPU\n\n"
        "@pytest.mark.gpu\ndef test_right():\n    assert CPU.type == 'cpu'\n\n"
        "@pytest.mark.gpu\ndef test_wrong():\n    assert 1 == 2\n\n"
        "@pytest.mark.gpu\ndef test_left():\n    pytest.skip('no GPU')\n\n"
        "def test_unmarked():\n    assert False\n"
    )
    files = marked_files(tmp_path)
    assert [file.name for file in files] == ["test_marked.py"]
    parity = run_tests(files, tmp_path, 120)
    assert (parity.passed, parity.failed, parity.skipped, parity.error) == (1, 1, 1, None)
    assert parity.failures == ["test_wrong: assert 1 == 2"]
    assert [Path(name).name for name in parity.finished] == ["test_marked.py"]
    assert run_tests([], tmp_path, 120).error == "no test is marked gpu"
    (tmp_path / "test_marked.py").write_text("import no_such_module  # mark.gpu\n")
    broken = run_tests(files, tmp_path, 120)
    assert (broken.passed, broken.failed, broken.error) == (0, 1, None)
    assert "test_marked.py: pytest ended with exit code 2" in broken.failures[0]


def test_parity_tests_go_on_where_the_time_was_over(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    mark = "import time\nimport pytest\n\n@pytest.mark.gpu\n@pytest.mark.timeout(9)\ndef test_it():\n    "
    (tmp_path / "test_a.py").write_text(mark + "pass\n")
    (tmp_path / "test_b.py").write_text(mark + "time.sleep(60)\n")
    files = marked_files(tmp_path)
    first = run_tests(files, tmp_path, 8)
    assert (first.passed, len(first.finished)) == (1, 1)
    assert first.error is not None
    assert "test_b.py did not end within 8 s" in first.error
    (tmp_path / "test_a.py").write_text(mark + "assert False\n")  # is not run again
    (tmp_path / "test_b.py").write_text(mark + "pass\n")
    second = run_tests(files, tmp_path, 120, first)
    assert (second.passed, second.failed, second.error) == (2, 0, None)


def test_every_file_with_tests_for_a_gpu_is_among_them() -> None:
    names = {file.name for file in marked_files(ROOT / "tests")}
    assert {
        "test_triton_kernels.py",
        "test_triton_micro_step.py",
        "test_fused_modules.py",
        "test_triton_eight_bits.py",
    } <= names


def test_a_stage_is_done_when_all_who_are_there_were_measured() -> None:
    stage = Stage("1 stream", 1, 8, 4, ("hamburger", PEER))
    results = Results({})
    results.add(stage, Cell(1, 0, "hamburger", None, "it ended"))
    assert not results.done(stage)
    results.left_out[PEER] = "transformers is not installed"
    assert not results.is_done(stage)
    assert not results.is_done(stages(sizes_of("llama-3.2-1b", 8), "cuda")[0])


def test_eight_bit_weights_are_half_of_what_they_are_in_bfloat16() -> None:
    """Llama-3.2-1B: 973 M parameters of layers, a head of 263 M; a published graft has four layers like the trunk's."""
    configs = shapes("llama-3.2-1b", 2)
    plain, small = (weight_bytes(configs[BASE], 2, eight_bits=small).step for small in (False, True))
    assert plain == pytest.approx(2 * (973e6 + 263e6), rel=1e-3)
    assert small == pytest.approx(973e6 + 2 * 263e6, rel=1e-3)
    micro, small_micro = (weight_bytes(configs["published"], 2, eight_bits=f).micro_step for f in (False, True))
    assert micro == pytest.approx(2 * (243e6 + 263e6 + 8.4e6), rel=1e-2)
    assert small_micro == pytest.approx(243e6 + 263e6 + 2 * 8.4e6, rel=1e-2)
    on_gpu, on_cpu = ({s.name for s in stages(sizes_of("llama-3.2-1b", 8), device)} for device in ("cuda", "cpu"))
    assert on_gpu - on_cpu == {
        "torch.compile",
        "one kernel a micro-step",
        "8-bit weights",
        "int8 weights",
        "prompts by FlashInfer",
    }


def test_flashinfer_takes_part_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is, nobody else tries it: each is told what attends."""
    sizes = sizes_of("llama-3.2-1b", 8)
    setup = Setup(tmp_path, tmp_path, "llama-3.2-1b", 2, "cuda", "bfloat16", 1, sizes, 60)
    for installed in (False, True):
        monkeypatch.setattr(gpu_stages, "_has", lambda package, installed=installed: installed)
        found, left_out = contestants(setup)
        assert (FLASHINFER in found) == installed == (FLASHINFER not in left_out)
        told = {}
        for name in FOLDERS.keys() & found.keys():
            worker = found[name]
            assert isinstance(worker, Worker)
            told[name] = json.loads(worker.launch.command[-1])["engine"].get("attention_backend")
        assert set(told.values()) == ({"triton", "flashinfer"} if installed else {None})
        assert told.get(FLASHINFER) == ("flashinfer" if installed else None)


def test_answers_shrink_with_the_time() -> None:
    assert sizes_of("llama-3.2-1b", 8).output == 512
    assert sizes_of("llama-3.2-1b", 20).output == 512
    assert sizes_of("llama-3.2-1b", 2).output == 128
    assert all(stage.prompt + stage.output <= 32768 for stage in stages(sizes_of("llama-3.2-1b", 8), "cuda"))


@pytest.mark.parametrize(
    ("options", "told"), [(["--group", "17"], "group is 17"), (["--only", "2 streams"], "choose from 1 stream")]
)
def test_settings_that_cannot_be_used(
    options: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(["--out", str(tmp_path), *options]) == 2
    assert told in capsys.readouterr().err


def test_a_device_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = run_script(tmp_path / "out", tmp_path / "blocked", "--device", "cuda:9", "--geometry", "tiny")
    assert done.returncode == 1
    assert "gpu: cuda:9 cannot be measured: " in done.stderr
    assert json.loads((tmp_path / "out" / "results.json").read_text())["machine"] is None
