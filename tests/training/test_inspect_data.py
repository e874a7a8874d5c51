"""One example, shown: the right groups, and nothing of its text that acts."""

from __future__ import annotations

import io
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fakes import EOS, ByteTokenizer
from hamburger.training.corpus.dataset import Example
from hamburger.training.errors import TrainingError
from hamburger.training.prepare.inspect import html_page, shown_groups, summary, terminal_text, visible, write_page


def example(prompt: str, groups: list[str]) -> Example:
    """A byte a token."""
    parts = [prompt.encode(), *(group.encode() for group in groups)]
    sizes = [1] * len(parts[0]) + [i for part in parts[1:] for i in (len(part), *[0] * (len(part) - 1))]
    ids = torch.tensor(list(b"".join(parts)), dtype=torch.int32)
    response = torch.arange(len(ids)) >= len(parts[0])
    entropy = torch.arange(len(ids)) / 8 * response
    return Example("p", "k", ids, response, entropy, torch.tensor(sizes, dtype=torch.uint8))


class Reader(HTMLParser):
    """The elements and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.pre = ""
        self._in_pre = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._in_pre = self._in_pre or tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        self._in_pre = self._in_pre and tag != "pre"

    def handle_data(self, data: str) -> None:
        self.pre += data if self._in_pre else ""

    def of(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for _, attributes in self.elements if name in (attributes.get("class") or "").split()]


def test_groups_and_their_tokens() -> None:
    groups = shown_groups(example("Q", ["abc", "d"]), ByteTokenizer())
    assert [(group.is_trained, [token.text for token in group.tokens]) for group in groups] == [
        (False, ["Q"]),
        (True, ["a", "b", "c"]),
        (True, ["d"]),
    ]
    assert [token.entropy for token in groups[1].tokens] == [0.125, 0.25, 0.375]
    assert summary(example("Q", ["abc", "d"])) == "4 trained tokens in 2 groups: 2.00 tokens per KV."


def test_a_character_of_several_tokens_stands_at_its_last() -> None:
    [_, group] = shown_groups(example("Q", ["aü€"]), ByteTokenizer())
    assert [token.text for token in group.tokens] == ["a", "·", "ü", "·", "·", "€"]
    [_, group] = shown_groups(example("Q", ["ü"]), _CutTokenizer())
    assert [token.text for token in group.tokens] == ["·", "\ufffd"]


class _CutTokenizer(ByteTokenizer):
    """Loses the second half of a character."""

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        return b"" if token_id == "ü".encode()[1] else super().token_bytes(token_id)


def test_the_terminal_shows_groups_in_two_colours() -> None:
    text = terminal_text(shown_groups(example("Q: [b]", ["ab", "c", "de"]), ByteTokenizer()), "title", "sum")
    assert text.plain == "title\nsum\n\nQ: [b]a│bcd│e"
    styles = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    assert styles["a│b"] == styles["d│e"] != styles["c"]
    assert styles["Q"] == "dim"


def test_nothing_in_a_text_steers_the_terminal() -> None:
    evil = "\x1b[31m\x07\r\x9b2J\u202e\x7f"
    out = io.StringIO()
    groups = shown_groups(example(evil, [evil]), ByteTokenizer())
    Console(file=out, no_color=True, width=500).print(terminal_text(groups, evil, "sum"), soft_wrap=True)
    assert "␛[31m␇␍⟨U+009B⟩2J⟨U+202E⟩␡" in out.getvalue()
    assert not set(out.getvalue()) & set("\x1b\x07\r\x9b\u202e\x7f")


@given(st.text())
def test_visible_text_has_no_control_but_the_newline(text: str) -> None:
    assert all(c == "\n" or c.isprintable() or c.isspace() for c in visible(text))
    assert "\x1b" not in visible(text)
    assert visible(text).count("\n") == text.count("\n")


def test_the_page_has_a_tooltip_for_each_trained_token() -> None:
    groups = shown_groups(example("Q", ["ab", "c"]), ByteTokenizer())
    page = Reader(html_page(groups, "title", "sum"))
    assert page.pre == "Qabc"
    assert [token["title"] for token in page.of("token")] == [
        "id 97, entropy 0.125 nats",
        "id 98, entropy 0.250 nats",
        "id 99, entropy 0.375 nats",
    ]
    assert [group["class"] for group in page.of("group")] == ["group odd", "group even"]


@given(st.text(st.sampled_from("<>&\"'{}/a =script"), min_size=1))
def test_no_text_becomes_part_of_the_page(text: str) -> None:
    harmless = Reader(html_page(shown_groups(example("Q", ["abc"]), ByteTokenizer()), "t", "s"))
    groups = shown_groups(example(text, [text, "</pre><script>alert(1)</script>"]), ByteTokenizer())
    page = Reader(html_page(groups, text, "s"))
    assert page.pre == text + text + "</pre><script>alert(1)</script>"
    assert {tag for tag, _ in page.elements} == {tag for tag, _ in harmless.elements}
    assert {name for _, attributes in page.elements for name in attributes} <= {
        name for _, attributes in harmless.elements for name in attributes
    }


def test_the_page_needs_nothing_else() -> None:
    page = html_page(shown_groups(example("Q", ["ab"]), ByteTokenizer()), "t", "s")
    assert "default-src 'none'" in page
    assert not any(word in page for word in ("http://", "https://", "src=", "<link", "<script"))


def test_special_tokens_are_shown() -> None:
    ids = torch.tensor([81, EOS], dtype=torch.int32)
    shown = Example("p", "k", ids, torch.tensor([False, True]), torch.zeros(2), torch.ones(2, dtype=torch.uint8))
    assert [g.tokens[0].text for g in shown_groups(shown, ByteTokenizer())] == ["Q", "<eos>"]


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"--html .*nowhere.* cannot be written: No such file"):
        write_page(tmp_path / "nowhere" / "x.html", "")
