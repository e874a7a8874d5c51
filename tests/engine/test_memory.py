"""How much memory the KV pool may take, read from Linux's files (made up here)."""

from pathlib import Path

import pytest
import torch

from hamburger.engine.device import memory
from hamburger.engine.device.memory import available_host_bytes, pool_bytes

MEMINFO = "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable:    800 kB\n"


def machine(root: Path, **files: str) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_machines_available_memory_counts(tmp_path: Path) -> None:
    assert available_host_bytes(machine(tmp_path)) == 800 * 1024


@pytest.mark.parametrize(
    ("limit", "used"),
    [
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ],
)
def test_a_containers_limit_counts_where_it_is_lower(tmp_path: Path, limit: str, used: str) -> None:
    assert available_host_bytes(machine(tmp_path, **{limit: "5000\n", used: "1000\n"})) == 4000
    assert available_host_bytes(machine(tmp_path, **{limit: "5000\n", used: "9000\n"})) == 0
    assert available_host_bytes(machine(tmp_path, **{limit: str(2**60), used: "0"})) == 800 * 1024


@pytest.mark.parametrize(
    ("folder", "limit", "used", "cache"),
    [
        ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_files_that_the_kernel_can_drop_are_not_used_memory(
    tmp_path: Path, folder: str, limit: str, used: str, cache: str
) -> None:
    stat = f"{cache}_other 7\n{cache} 3000\nactive_file 50\n"
    files = {f"{folder}/{limit}": "5000\n", f"{folder}/{used}": "4500\n", f"{folder}/memory.stat": stat}
    assert available_host_bytes(machine(tmp_path, **files)) == 3500


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    root = machine(tmp_path, **{"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5\n"})
    assert available_host_bytes(root) == 800 * 1024


def test_without_proc_half_of_the_memory_is_taken_as_free(tmp_path: Path) -> None:
    assert 0 < available_host_bytes(tmp_path) < 2**50


def test_what_the_user_sets_is_what_the_pool_gets() -> None:
    assert pool_bytes(torch.device("cpu"), 12345) == 12345
    assert 0 < pool_bytes(torch.device("cpu"), None) < available_host_bytes()


def test_several_engines_divide_the_share_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 1200)
    alone = pool_bytes(torch.device("cpu"), None)
    assert [pool_bytes(torch.device("cpu"), None, number) for number in (2, 3)] == [alone // 2, alone // 3]
    assert pool_bytes(torch.device("cpu"), 77, 2) == 77


def test_what_adapters_will_take_is_not_the_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 1200)
    assert pool_bytes(cpu, None, 1, 300) == pool_bytes(cpu, None) * 900 // 1200
    assert pool_bytes(cpu, None, 2, 300) == pool_bytes(cpu, None) * 600 // 1200 // 2  # those of both
    assert pool_bytes(cpu, None, 1, 2000) == 0
    assert pool_bytes(cpu, 77, 1, 2000) == 77


def test_on_a_gpu_each_engine_has_its_part_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and pool together; what others took or left free does not matter, unless there is less."""
    gpu, weights = torch.device("cuda:0"), 100
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: weights)

    def pools(free: int, number: int) -> int:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1000))
        return pool_bytes(gpu, None, number)

    alone = pools(1000 - weights, 1)
    part = pools(1000 - weights, 2)
    assert 0 < weights + part <= (alone + weights) // 2
    assert pools(1000 - 2 * weights - part, 2) == part  # the second one, or one that starts again
    assert pools(50, 2) < 50
    assert pools(900, 10) == 0  # the weights alone are more than a tenth


def test_what_steps_need_is_not_the_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (900, 1000))
    assert pool_bytes(gpu, None, 1, 400) == pool_bytes(gpu, None) * 500 // 900
    assert pool_bytes(gpu, None, 2, 150) == pool_bytes(gpu, None, 2) - 150
    assert pool_bytes(gpu, None, 1, 2000) == 0
    assert pool_bytes(gpu, 77, 1, 2000) == 77
