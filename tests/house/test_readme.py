"""The README's promises hold: commands exist, options parse, Python compiles, links lead somewhere."""

import argparse
import re
import shlex
from pathlib import Path

import pytest

from hamburger.server.cli import build_parser

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


HAMBURGER = [words[1:] for words in commands() if words[0].endswith("hamburger")]


@pytest.mark.parametrize("arguments", HAMBURGER, ids=" ".join)
def test_hamburger_commands_parse(arguments: list[str]) -> None:
    parsed = build_parser().parse_args(arguments)
    assert isinstance(parsed, argparse.Namespace)


def test_documented_options_exist() -> None:
    table = README.partition("| option |")[2].partition("\n\n")[0]
    options = re.findall(r"`(--[a-z-]+)`", table)
    assert len(options) > 5
    serve_help = serve_options()
    assert set(options) <= serve_help


def serve_options() -> set[str]:
    """The option strings of `hamburger serve`."""
    parser = build_parser()
    [commands_action] = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    serve: argparse.ArgumentParser = commands_action.choices["serve"]
    return {option for action in serve._actions for option in action.option_strings}


@pytest.mark.parametrize("code", blocks("python"))
def test_python_compiles(code: str) -> None:
    compile(code, "README.md", "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_local_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target
