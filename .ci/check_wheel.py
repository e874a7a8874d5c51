"""Compares a wheel with the package folders: a file that is not listed in pyproject.toml works in development and is
silently missing from the wheel.

    python .ci/check_wheel.py WHEEL
"""

from __future__ import annotations

import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_COMPILED_FROM = (".cpp", ".h")  # the wheel holds what they become


def files_on_disk() -> set[str]:
    """Every file of every package, as the wheel should name it."""
    folders: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    return {
        f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder).as_posix()}"
        for package, folder in folders.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and path.suffix not in _COMPILED_FROM
        # Of the kernels those of this Python: the tree may hold another's too.
        and (path.suffix != ".so" or path.name.endswith(str(sysconfig.get_config_var("EXT_SUFFIX"))))
    }


def main(wheel: str) -> int:
    """Print what is missing or too much; returns an exit status."""
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = files_on_disk()
    for name in sorted(expected - held):
        print(f"missing from the wheel: {name}")
    for name in sorted(held - expected):
        print(f"in the wheel, but not on disk: {name}")
    return 1 if expected != held else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
