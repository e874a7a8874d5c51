"""GrammarConstraint with verified groups: the rows of a sequence share a matcher, which goes along drafts and back."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from fakes import EOS, VOCAB_SIZE, ByteTokenizer
from hamburger.engine.device.constraint import GrammarConstraint
from hamburger.engine.grammar.matching import Grammars, Matcher
from hamburger.engine.grammar.writing import choice_grammar, json_grammar, regex_grammar
from hamburger.model.sampler import unpacked
from small_models import CPU

GRAMMARS = Grammars(ByteTokenizer, VOCAB_SIZE, [EOS])
CHOICES = {
    "json": json_grammar({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}),
    "numbers": json_grammar({"type": "array", "items": {"type": "number"}}),
    "choice": choice_grammar(["yes", "yesterday", "no"]),
    "regex": regex_grammar("[ab]{1,6}c?"),
}


def mask(matcher: Matcher) -> list[bool]:
    masks = np.zeros((1, -(-VOCAB_SIZE // 32)), dtype=np.int32)
    matcher.allow(masks, 0)
    bits: list[bool] = np.unpackbits(masks.view(np.uint8), bitorder="little")[:VOCAB_SIZE].astype(bool).tolist()
    return bits


def matcher_after(grammar: str, tokens: list[int]) -> Matcher | None:
    """None where the grammar refuses one of the tokens, or nothing may follow the last."""
    matcher = GRAMMARS.matcher(grammar)
    for token_id in tokens:
        if matcher.is_complete or not mask(matcher)[token_id]:
            return None
        matcher.advance(token_id)
    return None if tokens and matcher.is_complete else matcher


def walk(grammar: str, draw: random.Random, length: int, wrong: float) -> list[int]:
    """Tokens that fit, but for some of them; and beyond the end."""
    matcher, found = GRAMMARS.matcher(grammar), list[int]()
    for _ in range(length):
        fitting = [i for i, fits in enumerate(mask(matcher)) if fits and not matcher.is_complete]
        token_id = draw.choice(fitting) if fitting and draw.random() > wrong else draw.randrange(VOCAB_SIZE)
        if token_id in fitting:
            matcher.advance(token_id)
        found.append(token_id)
    return found


def rows_of(*rows: int) -> Tensor:
    return torch.tensor(rows)


@pytest.mark.parametrize("name", CHOICES)
def test_each_row_may_choose_what_it_may_alone(name: str) -> None:
    grammar, refused = CHOICES[name], 0
    for seed in range(40):
        draw = random.Random(f"{name} {seed}")
        sequences: list[tuple[list[int], Matcher]] = []
        guided: dict[int, tuple[Matcher, list[int], list[int]]] = {}
        for _ in range(draw.randint(1, 3)):
            text = walk(grammar, draw, draw.randint(0, 3), 0.0)
            drafts = walk(grammar, draw, draw.randint(0, 6), 0.1) if not text else walk(grammar, draw, 3, 0.3)
            if (matcher := matcher_after(grammar, text)) is None:
                continue
            sequences.append((text, matcher))
            for i in range(len(drafts) + 1):
                guided[len(guided)] = (matcher, drafts[:i], text)
        constraint = GrammarConstraint({row: of[:2] for row, of in guided.items()}, VOCAB_SIZE, CPU)
        assert constraint.rows.tolist() == list(guided)
        for _ in range(3):  # some rows, and some of them again
            some = sorted(draw.sample(list(guided), draw.randint(min(1, len(guided)), len(guided))))
            allowed = unpacked(constraint.allowed(rows_of(*some)), VOCAB_SIZE).tolist() if some else []
            for row, bits in zip(some, allowed, strict=True):
                _, drafts, text = guided[row]
                alone = matcher_after(grammar, [*text, *drafts])
                refused += alone is None
                assert bits == ([True] * VOCAB_SIZE if alone is None else mask(alone))
        # A row drafts on, as the emission lets it.
        for row, (_, drafts, text) in guided.items():
            alone = matcher_after(grammar, [*text, *drafts])
            path = [*text, *drafts]
            while alone is not None and len(path) < 12:
                path.append(draw.choice([i for i, fits in enumerate(mask(alone)) if fits]))
                [ends] = constraint.advance(rows_of(row), rows_of(path[-1])).tolist()
                alone = matcher_after(grammar, path)
                assert ends == (alone is None)
                if alone is not None:
                    assert unpacked(constraint.allowed(rows_of(row)), VOCAB_SIZE).tolist() == [mask(alone)]
        constraint.restore()
        for text, matcher in sequences:
            unmoved = matcher_after(grammar, text)
            assert unmoved is not None
            assert mask(matcher) == mask(unmoved)
    assert refused > 10


def test_a_draft_may_complete_the_grammar_and_the_matcher_comes_back() -> None:
    matcher = GRAMMARS.matcher(CHOICES["choice"])
    drafts = [*b"no", EOS, *b"yes"]
    guided = {row: (matcher, drafts[:row]) for row in range(len(drafts) + 1)}
    constraint = GrammarConstraint(guided, VOCAB_SIZE, CPU)
    allowed = unpacked(constraint.allowed(rows_of(*guided)), VOCAB_SIZE)
    assert [row.nonzero().flatten().tolist() for row in allowed[:2]] == [[*b"ny"], [*b"o"]]
    assert allowed[2:].all()  # nothing may follow "no": what these rows choose is not read
    assert constraint.advance(rows_of(2), rows_of(EOS)).tolist() == [True]
    constraint.restore()
    assert not matcher.is_complete
    for token_id in b"yes":
        matcher.advance(token_id)
    assert matcher.error is None
    assert mask(matcher)[EOS]


def test_an_end_token_as_a_draft() -> None:
    matcher = matcher_after(CHOICES["choice"], [*b"yes"])  # "yesterday" may come, or the end
    assert matcher is not None
    constraint = GrammarConstraint({0: (matcher, []), 1: (matcher, [EOS]), 2: (matcher, [*b"t"])}, VOCAB_SIZE, CPU)
    allowed = unpacked(constraint.allowed(rows_of(0, 1, 2)), VOCAB_SIZE)
    assert allowed[0].nonzero().flatten().tolist() == [*b"t", EOS]
    assert allowed[1].all()
    assert allowed[2].nonzero().flatten().tolist() == [*b"e"]
    constraint.restore()
    assert not matcher.is_complete


def test_rows_without_a_grammar_are_not_asked() -> None:
    matcher = GRAMMARS.matcher(CHOICES["choice"])
    constraint = GrammarConstraint({1: (matcher, [])}, VOCAB_SIZE, CPU)
    assert constraint.rows.tolist() == [1]
    assert constraint.advance(rows_of(0, 1, 2), rows_of(5, *b"n", 6)).tolist() == [False] * 3
    constraint.restore()


@pytest.mark.parametrize("more", [1, 40, 300])
def test_tokens_that_only_pad_the_vocabulary_are_never_allowed(more: int) -> None:
    size = VOCAB_SIZE + more
    matcher = Grammars(ByteTokenizer, size, [EOS]).matcher(CHOICES["json"])
    constraint = GrammarConstraint({0: (matcher, []), 1: (matcher, [*b"{"])}, size, CPU)
    allowed = unpacked(constraint.allowed(rows_of(0, 1)), VOCAB_SIZE)
    assert [row.nonzero().flatten().tolist() for row in allowed] == [[*b"{"], [*b'\n "']]
    constraint.restore()
    matcher.advance(size - 1)
    assert matcher.error is not None
