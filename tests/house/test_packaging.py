"""pyproject.toml, the folders and constraints.txt say the same."""

import ast
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS: dict[str, str] = PYPROJECT["tool"]["setuptools"]["package-dir"]
NOT_PACKAGES = {"tests", "deploy", "benchmarks", "docs", "build", "dist"}


def requirements(*, dev: bool) -> list[Requirement]:
    """What users install, extras included, and with dev what developers do.

    Not the peers of benchmarks/compare.py: nothing of ours imports them, and its results name their versions.
    """
    project = PYPROJECT["project"]
    left_out = {"bench"} if dev else {"bench", "dev"}
    extras = {name: lines for name, lines in project["optional-dependencies"].items() if name not in left_out}
    found = [Requirement(line) for line in sum(extras.values(), project["dependencies"])]
    return [requirement for requirement in found if requirement.name != project["name"]]


def pins(*files: str) -> dict[str, str]:
    lines = [line for file in files or ("constraints.txt",) for line in (ROOT / file).read_text().splitlines()]
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_packages_are_the_folders_on_disk() -> None:
    on_disk = {
        path.parent.relative_to(ROOT).as_posix()
        for path in ROOT.glob("[!.]*/**/__init__.py")
        if path.relative_to(ROOT).parts[0] not in NOT_PACKAGES and "node_modules" not in path.parts
    }
    # A room's folder follows from its package's.
    assert set(FOLDERS.values()) == {folder for folder in on_disk if "/" not in folder}
    listed = PYPROJECT["tool"]["setuptools"]["packages"]
    assert sorted(f"hamburger.{folder.replace('/', '.')}" for folder in on_disk) == sorted(listed)


@pytest.mark.parametrize("package", FOLDERS)
def test_package_is_typed_and_its_data_is_listed(package: str) -> None:
    folder = ROOT / FOLDERS[package]
    assert (folder / "py.typed").is_file()
    listed = {
        path for pattern in PYPROJECT["tool"]["setuptools"]["package-data"][package] for path in folder.glob(pattern)
    }
    compiled = (".py", ".pyc", ".cpp", ".h", ".so")  # setuptools knows of those
    data = {path for path in folder.rglob("*") if path.is_file() and path.suffix not in compiled}
    assert data == {path for path in listed if path.is_file()}


def test_typing_links_point_to_the_folders() -> None:
    links = {f"hamburger.{path.name}": path.resolve() for path in (ROOT / ".typing" / "hamburger").iterdir()}
    assert links == {package: (ROOT / folder).resolve() for package, folder in FOLDERS.items()}


def test_coverage_layers_and_packages_agree() -> None:
    tool = PYPROJECT["tool"]
    assert set(tool["coverage"]["run"]["source_pkgs"]) == set(FOLDERS)
    assert set(tool["importlinter"]["root_packages"]) == set(FOLDERS)


def test_version_is_the_installed_one() -> None:
    assert importlib.metadata.version("hamburger-serve") == PYPROJECT["project"]["version"]


def test_the_version_stands_in_pyproject_alone() -> None:
    """Code asks importlib.metadata; the changelog's heading is the only other place. Pins of others do not count."""
    version = re.compile(rf"(?<![\w.]){re.escape(PYPROJECT['project']['version'])}(?![\w.]*\d)")
    suffixes = {".py", ".sh", ".yml", ".yaml", ".md", ".toml", ".cpp", ".h"}
    named = {"Dockerfile", "Makefile", ".env.example", "run"}
    left_out = {"build", "dist", "node_modules"}
    hidden = [path for folder in (".ci", ".github") for path in (ROOT / folder).rglob("*")]
    found = {
        path.relative_to(ROOT).as_posix()
        for path in [*ROOT.glob("*"), ROOT / ".env.example", *hidden, *ROOT.glob("[!.]*/**/*")]
        if (path.suffix in suffixes or path.name in named) and path.is_file()
        if not left_out & set(path.relative_to(ROOT).parts) and version.search(path.read_text())
    }
    assert found == {"pyproject.toml", "CHANGELOG.md"}
    modules = [path for folder in FOLDERS.values() for path in (ROOT / folder).glob("*.py")]
    assert not [path for path in modules if "__version__ =" in path.read_text()]


def test_changelog_names_the_version() -> None:
    assert f"## {PYPROJECT['project']['version']}" in (ROOT / "CHANGELOG.md").read_text()


def imported(folder: Path) -> set[str]:
    """Top-level names that the files of a folder import, lazily or not."""
    names = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module)
    return {name.partition(".")[0] for name in names}


def distributions() -> dict[str, list[str]]:
    """What distributes each top-level name; ray (make test-scale) is not installed here."""
    return {"ray": ["ray"], **importlib.metadata.packages_distributions()}


@pytest.mark.parametrize("package", FOLDERS)
def test_every_import_is_a_declared_dependency(package: str) -> None:
    declared = {canonicalize_name(requirement.name) for requirement in requirements(dev=False)}
    owners = distributions()
    third_party = imported(ROOT / FOLDERS[package]) - set(sys.stdlib_module_names) - {"hamburger"}
    undeclared = {
        name for name in third_party if not declared & {canonicalize_name(owner) for owner in owners.get(name, [])}
    }
    assert not undeclared


def test_every_dependency_is_used() -> None:
    used = {name for folder in FOLDERS.values() for name in imported(ROOT / folder)}
    owners = distributions()
    by_owner = {canonicalize_name(owner) for name in used for owner in owners.get(name, [])}
    by_owner.add(canonicalize_name("tensorboard"))  # torch.utils.tensorboard imports it
    assert {canonicalize_name(requirement.name) for requirement in requirements(dev=False)} <= by_owner


def test_every_requirement_is_pinned_within_its_range() -> None:
    held = pins("constraints.txt", "deploy/scale-constraints.txt")
    for requirement in requirements(dev=True):
        assert requirement.specifier.contains(held[canonicalize_name(requirement.name)]), str(requirement)


def test_the_scaled_environment_is_the_usual_one_and_more() -> None:
    assert not pins("deploy/scale-constraints.txt").keys() & pins().keys()


def test_every_pin_is_exact_and_portable() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert list(pins()) == sorted(pins())
    for line in lines:
        assert re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line), line  # no local part: it would name one build


def test_set_up_names_no_package_index() -> None:
    names = ("Makefile", "pyproject.toml", "constraints.txt", ".ci/run")
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    workflows = [path for path in (ROOT / ".github").rglob("*") if path.is_file()]
    for path in [*(ROOT / name for name in names), *(ROOT / "deploy").glob("*.py"), *pages, *workflows]:
        found = re.findall(r"https?://\S*/(?:simple|whl)\b", path.read_text())
        assert not found, path


def test_licence_is_the_whole_text() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert len(text) > 11_000


def test_every_kernel_source_is_listed() -> None:
    (extension,) = PYPROJECT["tool"]["setuptools"]["ext-modules"]
    listed = {ROOT / path for path in (*extension["sources"], *extension["depends"])}
    assert listed == {path for path in (ROOT / "model" / "cpu" / "kernels").rglob("*") if path.is_file()}
    assert extension["optional"], "who has no compiler gets torch's own"
