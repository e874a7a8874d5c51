"""How benchmarks/gpu.py runs the tests marked `gpu`, in limited time."""

from __future__ import annotations

import signal
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_suite.parity import SETTINGS, marked_files, run_tests

ROOT = Path(__file__).parents[2]


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
    assert [Path(name).name for name in parity.files] == ["test_marked.py"]
    assert run_tests([], tmp_path, 120).error == "no test is marked gpu"
    (tmp_path / "test_marked.py").write_text("import no_such_module  # mark.gpu\n")
    broken = run_tests(files, tmp_path, 120)
    assert (broken.passed, broken.failed, broken.error) == (0, 1, None)
    assert "test_marked.py: pytest: it ended with exit code 2; " in broken.failures[0]


@pytest.fixture
def ignored_interrupts() -> Iterator[None]:
    """As in what a shell's script runs in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("ignored_interrupts")
def test_parity_tests_go_on_where_the_time_was_over(tmp_path: Path) -> None:
    """A file that takes too long is told as far as it came, and stands in nobody's way."""
    (tmp_path / "logs").mkdir()
    mark = "import time\nimport pytest\n\n@pytest.mark.gpu\n@pytest.mark.timeout(9)\ndef test_it():\n    "
    more = "\n\n@pytest.mark.gpu\ndef test_more():\n    "
    (tmp_path / "test_a.py").write_text(f"{mark}pass\n{more}time.sleep(60)\n")
    (tmp_path / "test_b.py").write_text(mark + "pass\n")
    files = marked_files(tmp_path)
    began = time.monotonic()
    assert run_tests(files[1:], tmp_path, 120).is_done
    limit = 8 + round(4 * (time.monotonic() - began))  # seconds: a crowded machine takes many until pytest has begun
    told: list[int] = []
    first = run_tests(files, tmp_path, limit, tell=lambda parity: told.append(parity.passed))
    assert (first.passed, len(first.files), told) == (1, 1, [1])
    assert not first.is_done
    assert str(first.error).endswith(f"test_a.py did not end in time and 1 of 2 files were not begun ({limit} s)")
    second = run_tests(files, tmp_path, limit, first)
    assert (second.passed, len(second.files)) == (2, 2)
    assert str(second.error).endswith(f"test_a.py did not end in time ({limit} s)")
    (tmp_path / "test_a.py").write_text(mark + "pass\n")
    (tmp_path / "test_b.py").write_text(mark + "assert False\n")  # is not run again
    third = run_tests(files, tmp_path, 120, second)
    assert (third.passed, third.failed, third.error) == (2, 0, None)


def test_every_marker_of_the_project_is_known() -> None:
    """Or the tests that bear it could not be loaded: markers are strict."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    known = {line.partition(":")[0].strip() for line in SETTINGS.splitlines() if line.startswith("    ")}
    assert {marker.partition(":")[0] for marker in project["markers"]} <= known


def test_every_file_with_tests_for_a_gpu_is_found_and_no_other() -> None:
    assert {file.name for file in marked_files(ROOT / "tests")} == {
        "test_decode_graphs_gpu.py",
        "test_settled_places.py",
        "test_triton_backend.py",
        "test_triton_int8.py",
        "test_triton_kernels.py",
    }
