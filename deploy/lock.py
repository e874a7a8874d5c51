"""Pins in constraints.txt what hamburger-serve and its development tools need, as installed beside this interpreter.

    python deploy/lock.py           write constraints.txt (`make lock` does so in a fresh environment)
    python deploy/lock.py --check   exit 1 unless constraints.txt says exactly what is installed and needed

It follows the requirements, so other things in the environment are not pinned, and it stops at torch: which CUDA
libraries torch needs depends on the build, and torch pins them itself.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = "hamburger-serve[dev]"
LOCK = Path(__file__).resolve().parent.parent / "constraints.txt"
HEADER = "# Written by `make lock`: the versions that the tests passed with. Edit pyproject.toml, not this file.\n"


class NotMetError(Exception):
    """The environment does not meet the project's requirements; the message names the first that is not met."""


def add_pins(requirement: Requirement, pins: dict[str, str], seen: set[tuple[str, str]]) -> None:
    """Add the installed version of `requirement`, and of all that it needs in turn, to `pins`."""
    name = canonicalize_name(requirement.name)
    fresh = {extra for extra in {"", *requirement.extras} if (name, extra) not in seen}
    if not fresh:
        return
    seen |= {(name, extra) for extra in fresh}
    try:
        found = distribution(name)
    except PackageNotFoundError:
        raise NotMetError(f"{requirement} is needed but not installed") from None
    version = found.version.partition("+")[0]  # a local part names a build (+cpu), not a version
    if not requirement.specifier.contains(version, prereleases=True):
        raise NotMetError(f"{requirement} is needed but {version} is installed")
    pins[name] = version
    if name == "torch":
        return
    for line in found.requires or ():
        part = Requirement(line)
        if part.marker is None or any(part.marker.evaluate({"extra": extra}) for extra in fresh):
            add_pins(part, pins, seen)


def lock_text() -> str:
    """What constraints.txt should say. Raises NotMetError when the environment is incomplete."""
    pins: dict[str, str] = {}
    add_pins(Requirement(PROJECT), pins, set())
    # torch's own requirements outside CUDA are pinned too: they are the same for every build.
    for line in distribution("torch").requires or ():
        part = Requirement(line)
        if part.marker is None:
            add_pins(part, pins, set())
    del pins[canonicalize_name(Requirement(PROJECT).name)]
    return HEADER + "".join(f"{name}=={version}\n" for name, version in sorted(pins.items()))


def main(arguments: list[str]) -> int:
    """Write or check; returns an exit status."""
    try:
        text = lock_text()
    except NotMetError as error:
        print(error, file=sys.stderr)
        return 1
    if arguments != ["--check"]:
        LOCK.write_text(text)
        return 0
    difference = set(text.splitlines()) ^ set(LOCK.read_text().splitlines())
    if difference:
        print("constraints.txt is not what is installed (`make lock` rewrites it):", *sorted(difference), sep="\n  ")
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
