"""What Linux's control groups grant, read from files made up here, and how many threads torch gets by it."""

from pathlib import Path

import pytest

from hamburger.engine.device.control_groups import control_groups, granted_cpus, memory_left
from hamburger.engine.device.cpu_threads import threads_of_rank


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({}, None),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"sys/fs/cgroup/cpu.max": "50000 0\n", "proc/self/cgroup": "\n0::/\n"}, None),
        ({"sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2.5),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
    ],
)
def test_a_containers_quota_of_cpus_is_read_in_both_versions(
    tmp_path: Path, files: dict[str, str], cpus: float | None
) -> None:
    assert granted_cpus(machine(tmp_path, files)) == cpus


def test_the_least_of_a_units_groups_counts(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/system.slice/server.service\n",
            "sys/fs/cgroup/system.slice/server.service/cpu.max": "400000 100000\n",
            "sys/fs/cgroup/system.slice/cpu.max": "300000 100000\n",
            "sys/fs/cgroup/system.slice/server.service/memory.max": "max\n",
            "sys/fs/cgroup/system.slice/server.service/memory.current": "10\n",
            "sys/fs/cgroup/system.slice/memory.max": "100\n",
            "sys/fs/cgroup/system.slice/memory.current": "30\n",
            "sys/fs/cgroup/system.slice/memory.stat": "anon 30\ninactive_file 5\n",
        },
    )
    assert granted_cpus(root) == 3
    assert memory_left(root) == 75


def test_a_container_whose_path_is_the_hosts_reads_its_own_group_where_it_is_mounted(tmp_path: Path) -> None:
    lines = "5:cpu,cpuacct:/docker/0a1b\n3:memory:/../other\n1:name=systemd:/docker/0a1b\n"
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": lines,
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    found = [str(folder.relative_to(root / "sys/fs/cgroup")) for folder in control_groups("cpu", root)]
    assert found == [".", "cpu/docker/0a1b", "cpu/docker", "cpu"]
    assert granted_cpus(root) == 2
    assert memory_left(root) is None


@pytest.mark.parametrize(
    ("cpus", "num_ranks", "threads"),
    [(None, 1, 8), (16.0, 1, 8), (3.9, 1, 3), (0.5, 1, 1), (None, 2, 4), (6.0, 2, 3), (1.0, 4, 1)],
)
def test_an_engine_has_no_more_threads_than_cpus_that_are_granted(
    cpus: float | None, num_ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_of_rank(8, num_ranks, lambda: cpus) == threads


def test_who_has_set_the_number_of_threads_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert threads_of_rank(8, 1, lambda: 2.0) == 8
    assert threads_of_rank(8, 2, lambda: 2.0) == 4  # of which ranks have their parts
