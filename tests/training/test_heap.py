"""keep_freed_memory: a tensor freed and made again costs no new pages."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from hamburger.training.run.allocator import keep_freed_memory

CODE = """
import resource, sys, torch
from hamburger.training.run.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(30):
    torch.ones(10_000_000).sum()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is not glibc's")
def test_freed_memory_is_used_again() -> None:
    def faults(mode: str) -> int:
        done = subprocess.run([sys.executable, "-c", CODE, mode], capture_output=True, text=True, check=True)
        return int(done.stdout)

    # 40 MB are 9,766 pages of 4 KiB. The first few rounds may each find a hole that is just too small.
    assert 2 * faults("keep") < faults("leave")


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    assert keep_freed_memory() is False
