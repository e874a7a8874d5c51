"""The README's promises hold: commands exist, options parse, Python compiles, links lead somewhere."""

import functools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def commands(text: str = README) -> list[list[str]]:
    """The words of every command line of the bash blocks, leading VAR=value words left out."""
    lines = "".join(blocks("bash", text)).replace("\\\n", " ")
    lines = re.sub(r"'\{.*?\}'", "DATA", lines, flags=re.DOTALL)  # JSON over several lines
    lists = [shlex.split(line, comments=True) for line in lines.splitlines()]
    return [words[1:] if re.match(r"[A-Z_]+=", words[0]) else words for words in lists if words]


def test_the_first_lines_of_code_are_the_two_commands() -> None:
    assert commands()[:2] == [["make", "serve"], ["make", "test"]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    text = page.read_text()
    named = {words[1] for words in commands(text) if words[0] == "make"} | set(re.findall(r"`make ([a-z-]+)`", text))
    assert named <= targets


@functools.cache
def options_of(command: str) -> set[str]:
    """The options that `hamburger COMMAND --help` names; the command must exist."""
    hamburger = Path(sys.executable).with_name("hamburger")
    result = subprocess.run([hamburger, command, "--help"], capture_output=True, text=True, timeout=60, check=True)
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", result.stdout))


HAMBURGER = [words[1:] for words in commands() if words[0].endswith("hamburger")]


@pytest.mark.parametrize("arguments", HAMBURGER, ids=" ".join)
def test_hamburger_commands_and_their_options_exist(arguments: list[str]) -> None:
    assert {word for word in arguments if word.startswith("--")} <= options_of(arguments[0])


def test_commands_are_found() -> None:
    assert {arguments[0] for arguments in HAMBURGER} == {
        *("serve", "chat", "bench", "plan", "distill", "segment", "inspect", "train", "export", "eval-quality")
    }


def test_documented_options_exist() -> None:
    table = README.partition("| option |")[2].partition("\n\n")[0]
    options = set(re.findall(r"`(--[a-z-]+)`", table))
    assert len(options) > 5
    assert options <= options_of("serve")


@pytest.mark.parametrize("code", blocks("python"))
def test_python_compiles(code: str) -> None:
    compile(code, "README.md", "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_local_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target
