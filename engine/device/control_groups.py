"""What Linux's control groups (cgroups, of either version) grant this process: limits of a container or a unit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def granted_cpus(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time that this process may take, the least of its groups' quotas; None where none has any.

    torch does not see it: it counts the cores that the process may run on.
    """
    quotas = [quota for folder in control_groups("cpu", root) if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


def memory_left(root: Path) -> int | None:
    """Bytes that this process's groups still may take; None where they have no limit.

    Files that were read, the weights above all, count as used there, but the kernel drops them when it must.
    """
    forms = (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    left: list[int] = []
    for folder in control_groups("memory", root):
        for limit, used, cache in forms:
            try:
                rest = int((folder / limit).read_text()) - int((folder / used).read_text())
            except (OSError, ValueError):  # the other version, or "max": no limit
                continue
            left.append(max(0, rest + _stat(folder / "memory.stat", cache)))
    return min(left, default=None)


def control_groups(controller: str, root: Path) -> Iterator[Path]:
    """The folders of this process's groups of a controller, and of all groups above them.

    A container's own group is often mounted in the place of the host's first one, while the path is still the host's:
    so not each of these folders need exist.
    """
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    paths = {mount: "/", mount / controller: "/"}
    for line in lines:
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "none", "")
        if not controllers:
            paths[mount] = path
        elif controller in controllers.split(","):
            paths[mount / controller] = path
    for folder, path in paths.items():
        names = [name for name in path.split("/") if name not in ("", "..")]
        for number in range(len(names), -1, -1):
            yield folder.joinpath(*names[:number])


def _quota(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        except OSError:
            return None
    return int(quota) / int(period) if quota.isdecimal() and int(period) else None


def _stat(path: Path, name: str) -> int:
    """A row of memory.stat, 0 where it is missing."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)
