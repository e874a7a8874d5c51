"""`hamburger inspect`: one example of a data set with its groups in colour, in the terminal or as a web page.

Texts come from models and from strangers, so nothing in them reaches the terminal or the page but as characters.
"""

from __future__ import annotations

import argparse
import codecs
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.text import Text

from hamburger.engine.text.tokenizer import Tokenizer
from hamburger.model.checkpoints.sources import resolve_source
from hamburger.training.base_model import base_arguments
from hamburger.training.corpus.dataset import Example, SegmentedDataset
from hamburger.training.errors import TrainingError

_TERMINAL_STYLES = ("black on bright_cyan", "black on bright_yellow")  # of neighbouring groups
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.9 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em;
  color: #1b1b1b; background: #fff; }}
pre {{ font: 14px/2 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }}
.prompt {{ color: #767676; }}
.group {{ border-radius: .3em; padding: .15em 0; }}
.even {{ background: #bfe3f2; }} .odd {{ background: #ffe39b; }}
.token {{ border-left: 1px solid #0003; }} .token:first-child {{ border-left: 0; }}
.token:hover {{ outline: 2px solid #c2410c; }}
</style></head><body>
<h1>{title}</h1>
<p>{summary} Point at a token for its id and entropy.</p>
<pre>{text}</pre>
</body></html>
"""


class BytesTokenizer(Protocol):
    """What is needed of a tokenizer; engine.text.tokenizer.Tokenizer has it."""

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes: ...


@dataclass(frozen=True, slots=True)
class ShownToken:
    """text: what may be shown: controls stand as visible signs; "·" where the token is only a part of a character."""

    text: str
    token_id: int
    entropy: float


@dataclass(frozen=True, slots=True)
class ShownGroup:
    tokens: list[ShownToken]
    is_trained: bool


def run(args: argparse.Namespace) -> int:
    """Show one example. Raises TrainingError, CheckpointError, TokenizerError or OSError."""
    if args.html is not None:
        _check_page(args.html)
    dataset = SegmentedDataset(args.folder)
    example = dataset.example(args.index)
    named = args.model or dataset.meta.model_argument
    model, base = base_arguments(named, args.base or (None if args.model else dataset.meta.base))
    tokenizer = Tokenizer.load(resolve_source(model, base).tokenizer_path)
    groups = shown_groups(example, tokenizer)
    title = f"{dataset.folder.resolve().name}, example {args.index} of {len(dataset)}: {example.id}"
    if args.html is None:
        Console(highlight=False).print(terminal_text(groups, title, summary(example)), soft_wrap=True)
    else:
        write_page(args.html, html_page(groups, title, summary(example)))
    return 0


def shown_groups(example: Example, tokenizer: BytesTokenizer) -> list[ShownGroup]:
    """The example's tokens by group, ready to be shown."""
    ids, sizes = example.token_ids.tolist(), example.group_sizes.tolist()
    texts, entropies, response = _texts(ids, tokenizer), example.entropy.tolist(), example.response.tolist()
    groups = []
    for start, size in enumerate(sizes):
        if size:
            tokens = [ShownToken(texts[i], ids[i], entropies[i]) for i in range(start, start + size)]
            groups.append(ShownGroup(tokens, response[start]))
    return groups


def summary(example: Example) -> str:
    tokens, groups = example.num_response_tokens, example.num_response_groups
    return f"{tokens} trained tokens in {groups} groups: {tokens / max(groups, 1):.2f} tokens per KV."


def terminal_text(groups: Sequence[ShownGroup], title: str, summary: str) -> Text:
    """Trained groups in two colours in turn, with a bar between the tokens of a group; the rest dim."""
    text = Text(f"{visible(title)}\n{summary}\n\n")
    number = 0
    for group in groups:
        if group.is_trained:
            number += 1
            text.append("│".join(token.text for token in group.tokens), style=_TERMINAL_STYLES[number % 2])
        else:
            text.append("".join(token.text for token in group.tokens), style="dim")
    return text


def html_page(groups: Sequence[ShownGroup], title: str, summary: str) -> str:
    """A page that needs no other file and runs no script; each trained token has its entropy as tooltip."""
    number, parts = 0, []
    for is_trained, run in groupby(groups, key=lambda group: group.is_trained):
        if not is_trained:
            text = "".join(token.text for group in run for token in group.tokens)
            parts.append(f'<span class="prompt">{_html(text)}</span>')
            continue
        for group in run:
            number += 1
            tokens = "".join(
                f'<span class="token" title="id {token.token_id}, entropy {token.entropy:.3f} nats">'
                f"{_html(token.text)}</span>"
                for token in group.tokens
            )
            parts.append(f'<span class="group {("even", "odd")[number % 2]}">{tokens}</span>')
    return _PAGE.format(title=_html(visible(title)), summary=_html(summary), text="".join(parts))


def write_page(path: Path, page: str) -> None:
    """Raises TrainingError when the file cannot be written."""
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise TrainingError(f"--html {path} cannot be written: {error.strerror}.") from error


def _check_page(path: Path) -> None:
    """An older page may be replaced, another file may not."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        begins = file.read(256).removeprefix(codecs.BOM_UTF8).lstrip().lower()
    if begins and not begins.startswith((b"<!doctype html", b"<html")):
        raise TrainingError(f"--html {path} holds no web page, so it is not replaced: name another file.")


def visible(text: str) -> str:
    """The text without anything that acts: controls as pictures (␛), what else is not shown as its code point."""
    return "".join(_visible_character(c) for c in text)


def _visible_character(c: str) -> str:
    if c == "\n":
        return "⏎\n"
    if c < " " or c == "\x7f":
        return "␡" if c == "\x7f" else chr(0x2400 + ord(c))
    # Other controls, marks that turn the direction of writing, half surrogates, private and unassigned ones.
    return f"⟨U+{ord(c):04X}⟩" if unicodedata.category(c)[0] == "C" else c


def _texts(token_ids: Sequence[int], tokenizer: BytesTokenizer) -> list[str]:
    """A text for each token; characters that several tokens make up stand at the last of them."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return [visible(text) or "·" for text in _decoded(token_ids, tokenizer, decoder)]


def _decoded(token_ids: Sequence[int], tokenizer: BytesTokenizer, decoder: codecs.IncrementalDecoder) -> Iterator[str]:
    for i, token_id in enumerate(token_ids):
        yield decoder.decode(tokenizer.token_bytes(token_id, first=i == 0), final=i == len(token_ids) - 1)


def _html(text: str) -> str:
    return escape(text, quote=True)
