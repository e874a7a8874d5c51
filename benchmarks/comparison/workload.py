"""Requests for compare.py: lengths drawn from published traces and scaled to a context, and prompts of these lengths.

Pure: same arguments, same requests. Knows nothing of who answers them.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hamburger.clients.figures import percentile
from hamburger.clients.prompts import built_in_prompts

TRACES = Path(__file__).parents[1] / "data" / "trace_lengths.jsonl"
OUTPUT_SHARE = 0.25  # of the context, for the 90th percentile of outputs; prompts have the rest
LEAST_TEXT = 16  # tokens: the number that makes each prompt's beginning its own
LEAST_OUTPUT = 4  # tokens: below it no time per output token can be told


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of one request of a trace."""

    source: str
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Request:
    """What every contestant is asked: continue `prompt_ids` by exactly `output_tokens` tokens, greedily.

    group: of workers of ours, most tokens of each group; None for as many as the model makes.
    """

    prompt_ids: list[int]
    output_tokens: int
    group: int | None = None


class ChatTokenizer(Protocol):
    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]: ...
    def apply_chat_template(self, messages: list[dict[str, str]]) -> str: ...


class Writer(Protocol):
    def requests(self, lengths: Sequence[Lengths], seed: int) -> list[Request]: ...


def read_lengths(path: Path, sources: Sequence[str] = ()) -> list[Lengths]:
    """The rows of a JSON Lines file with source, prompt_tokens and output_tokens; of these sources, if any are named.

    Raises ValueError for a row of another shape, and for a source that the file lacks.
    """
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            rows.append(Lengths(str(row["source"]), int(row["prompt_tokens"]), int(row["output_tokens"])))
        except (ValueError, LookupError, TypeError):
            raise ValueError(
                f"{path}, line {number}: expected an object with source, prompt_tokens and output_tokens."
            ) from None
    known = dict.fromkeys(row.source for row in rows)
    if missing := [source for source in sources if source not in known]:
        raise ValueError(f"{path} has no source {', '.join(missing)}: choose from {', '.join(known)}.")
    return [row for row in rows if row.source in (sources or known)]


def scale(lengths: Sequence[Lengths], context: int, least_prompt: int) -> list[Lengths]:
    """The lengths, made to fit a context of `context` tokens, each source by factors of its own.

    Outputs shrink until their 90th percentile is a quarter of the context, prompts until theirs is the rest; neither
    grows. What is longer still is cut, and nothing is shorter than `least_prompt` and LEAST_OUTPUT tokens.
    Raises ValueError where the context has no room for that.
    """
    room = int(context * OUTPUT_SHARE)
    if room < LEAST_OUTPUT or context - room < least_prompt:
        raise ValueError(
            f"context is {context}, which holds no prompt of {least_prompt} tokens with an answer: give a larger one."
        )
    scaled = []
    for source in dict.fromkeys(row.source for row in lengths):
        rows = [row for row in lengths if row.source == source]
        shrink_prompt = _factor([row.prompt_tokens for row in rows], context - room)
        shrink_output = _factor([row.output_tokens for row in rows], room)
        for row in rows:
            output = min(max(round(row.output_tokens * shrink_output), LEAST_OUTPUT), context - least_prompt)
            prompt = min(max(round(row.prompt_tokens * shrink_prompt), least_prompt), context - output)
            scaled.append(Lengths(source, prompt, output))
    return scaled


def _factor(values: Sequence[int], limit: int) -> float:
    return min(1.0, limit / max(percentile(sorted(values), 90), 1))


def draw(lengths: Sequence[Lengths], number: int, seed: int) -> list[Lengths]:
    """`number` rows at random, as equally many of each source as the number allows, in random order."""
    rng = random.Random(seed)
    sources = list(dict.fromkeys(row.source for row in lengths))
    rng.shuffle(sources)  # so that it is not always the same source that has one row more
    pools = {source: _endless([row for row in lengths if row.source == source], rng) for source in sources}
    wanted = Counter(sources[i % len(sources)] for i in range(number))
    drawn = [next(pools[source]) for source in sources for _ in range(wanted[source])]
    rng.shuffle(drawn)
    return drawn


def _endless(rows: Sequence[Lengths], rng: random.Random) -> Iterator[Lengths]:
    """All rows in random order, again and again: none comes twice before each came once."""
    while True:
        yield from rng.sample(rows, len(rows))


class PromptWriter:
    """Writes chats of exact lengths: a template's beginning and end, and text between them that is cut to fit."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        marker = "\ufffc"  # in no text and no template
        before, _, after = tokenizer.apply_chat_template([{"role": "user", "content": marker}]).partition(marker)
        self._before, self._after = tokenizer.encode(before), tokenizer.encode(after)

    @property
    def least_tokens(self) -> int:
        """Tokens of the shortest prompt: the template, and text that no other prompt begins with."""
        return len(self._before) + len(self._after) + LEAST_TEXT

    def requests(self, lengths: Sequence[Lengths], seed: int) -> list[Request]:
        """One request of each length. Texts differ from their first words on, so that no prefix cache knows them."""
        longest = max((row.prompt_tokens for row in lengths), default=0)
        texts = built_in_prompts(len(lengths), max(longest, 1), seed)  # a word has at least one token
        return [
            Request(self._fit(text, row.prompt_tokens), row.output_tokens)
            for text, row in zip(texts, lengths, strict=True)
        ]

    def _fit(self, text: str, tokens: int) -> list[int]:
        room = tokens - len(self._before) - len(self._after)
        if room < LEAST_TEXT:
            raise ValueError(f"a prompt of {tokens} tokens is too short: give at least {self.least_tokens}.")
        ids = self._tokenizer.encode(text)
        ids *= math.ceil(room / len(ids))
        return [*self._before, *ids[:room], *self._after]
