"""What the README and the pages promise holds: commands and options exist, Python compiles, links lead somewhere."""

import contextlib
import functools
import io
import re
import shlex
from argparse import _SubParsersAction
from pathlib import Path

import pytest

from hamburger.server.cli import build_parser

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / ".github").glob("*.md"))]
CARD = ROOT / "model" / "builtin" / "MODEL_CARD.md"


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
    told = io.StringIO()
    with contextlib.redirect_stdout(told), pytest.raises(SystemExit) as ended:
        build_parser().parse_args([command, "--help"])
    assert ended.value.code == 0
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", told.getvalue()))


def hamburger(text: str) -> list[list[str]]:
    """Arguments of `hamburger` in the commands of a page's bash blocks."""
    return [words[1:] for words in commands(text) if words[0].endswith("hamburger") and len(words) > 1]


HAMBURGER = sorted({tuple(arguments) for page in PAGES for arguments in hamburger(page.read_text())})


@pytest.mark.parametrize("arguments", HAMBURGER, ids=" ".join)
def test_hamburger_commands_and_their_options_exist(arguments: tuple[str, ...]) -> None:
    named = {word.partition("=")[0] for word in arguments if word.startswith("--")}
    assert named <= options_of(arguments[0])


def test_every_command_is_shown() -> None:
    """The README shows how to begin; every command is shown on some page."""
    assert {arguments[0] for arguments in hamburger(README)} == {"chat", "bench"}  # `make serve` serves
    [subcommands] = [action.choices for action in build_parser()._actions if isinstance(action, _SubParsersAction)]
    assert {arguments[0] for arguments in HAMBURGER} == set(subcommands)


def test_documented_options_exist() -> None:
    table = (ROOT / "docs" / "serving.md").read_text().partition("| option |")[2].partition("\n\n")[0]
    options = set(re.findall(r"`(--[a-z-]+)", table))
    assert len(options) > 5
    assert options <= options_of("serve")


PYTHON = [(page.name, code) for page in PAGES for code in blocks("python", page.read_text())]


@pytest.mark.parametrize(("page", "code"), PYTHON, ids=[name for name, _ in PYTHON])
def test_python_compiles(page: str, code: str) -> None:
    compile(code, page, "exec")


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_pages_that_everyone_reads_stay_short(page: str) -> None:
    """The rest is a link away: docs/serving.md, docs/log.md."""
    assert len((ROOT / page).read_text().splitlines()) <= 120


def test_every_picture_is_shown() -> None:
    shown = {target for page in PAGES for target in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text())}
    pictures = {path.name for path in (ROOT / "docs").glob("*/*") if path.suffix in (".png", ".gif")}
    cards = CARD.read_text()
    assert pictures == {Path(target).name for target in shown} | {name for name in pictures if name in cards}


@pytest.mark.parametrize("page", [*PAGES, CARD], ids=lambda page: page.name)
def test_local_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked.read_text()), f"{target}#{anchor}"


def anchors(text: str) -> set[str]:
    """GitHub's names of a page's headings: lower case, no punctuation, a hyphen for each space."""
    titles = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), flags=re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
