"""Tokens that an answer may be made of, and words that it must not have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import EOS, VOCAB_SIZE, ByteTokenizer
from hamburger.engine.grammar.matching import Grammars
from hamburger.engine.grammar.writing import regex_grammar
from hamburger.engine.text.token_rules import TokenMatcher, TokenRules
from hamburger.engine.types.sampling_params import ThinkingBudget

WORDS = -(-VOCAB_SIZE // 32)


def allowed(rules: TokenMatcher) -> set[int]:
    masks = np.zeros((2, WORDS), dtype=np.int32)
    rules.allow(masks, 1)
    assert not masks[0].any()
    return set(np.flatnonzero(np.unpackbits(masks[1].view(np.uint8), bitorder="little")[:VOCAB_SIZE]).tolist())


def test_only_what_is_allowed_may_come() -> None:
    rules = TokenRules([97, 98, EOS], [], None)
    assert allowed(rules) == {97, 98, EOS}
    rules.advance(97)
    assert allowed(rules) == {97, 98, EOS}
    assert (rules.is_complete, rules.error) == (False, None)


def test_a_word_is_not_completed() -> None:
    rules = TokenRules([], [[1, 2, 3], [3], [2, 2]], None)
    every = set(range(VOCAB_SIZE)) - {3}
    assert allowed(rules) == every
    rules.advance(1)
    assert allowed(rules) == every
    rules.advance(2)
    assert allowed(rules) == every - {2}  # [1, 2, 3] ends with what never comes, [2, 2] would be whole
    rules.go_back(1)
    assert allowed(rules) == every


@given(
    st.lists(st.integers(0, 4), max_size=9), st.lists(st.integers(0, 4), max_size=9), st.integers(0, 4), st.booleans()
)
def test_thoughts_end_when_their_budget_is_used_up(taken: list[int], tried: list[int], most: int, begun: bool) -> None:
    rules = TokenRules([], [], None, ThinkingBudget(most, None if begun else 1, 2))
    for token_id in [*taken, *tried]:
        rules.advance(token_id)
    rules.go_back(len(tried))
    thoughts = taken if begun else (taken[taken.index(1) + 1 :] if 1 in taken else None)
    must_end = thoughts is not None and 2 not in thoughts and len(thoughts) >= most
    assert allowed(rules) == ({2} if must_end else set(range(VOCAB_SIZE)))
    assert rules.error is None


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=4),
    st.lists(st.integers(0, 3), max_size=5),
    st.lists(st.integers(0, 3), max_size=3),
)
def test_exactly_the_tokens_that_complete_no_word_may_come(
    words: list[list[int]], taken: list[int], tried: list[int]
) -> None:
    rules = TokenRules([0, 1, 2, 3], words, None)
    for token_id in [*taken, *tried]:
        rules.advance(token_id)
    rules.go_back(len(tried))
    expected = {
        token_id for token_id in range(4) if not any([*taken, token_id][-len(word) :] == word for word in words)
    }
    if expected:
        assert allowed(rules) == expected
        assert rules.error is None
    else:
        allowed(rules)
        assert rules.error is not None
        rules.go_back(1 if taken else 0)
        assert (rules.error is None) == bool(taken)


def test_what_leaves_nothing_behind_drafts_counts_where_the_answer_takes_them_too() -> None:
    rules = TokenRules([1, 2], [[1, 1], [1, 2]], None)

    def try_draft(rules: TokenRules) -> None:
        rules.advance(1)
        allowed(rules)
        assert rules.error is not None
        rules.go_back(1)
        assert rules.error is None

    try_draft(rules)
    rules.advance(2)  # another one
    assert rules.error is None
    try_draft(rules)
    rules.advance(1)
    rules.advance(7)  # what was chosen where all may come
    assert rules.error is not None


def test_beside_a_grammar_both_hold() -> None:
    grammars = Grammars(ByteTokenizer, VOCAB_SIZE, [EOS])

    def rules(bad: Sequence[Sequence[int]]) -> TokenRules:
        return TokenRules([], bad, grammars.matcher(regex_grammar("a[bc]d?")))

    free = rules([[97, 98]])
    assert allowed(free) == {97}
    free.advance(97)
    assert allowed(free) == {99}
    free.advance(99)
    assert allowed(free) == {100, EOS}
    free.go_back(1)
    assert allowed(free) == {99}
    free.advance(99)
    free.advance(EOS)
    assert free.is_complete
    stuck = rules([[97]])
    allowed(stuck)
    assert stuck.error is not None
    assert "leave no token" in stuck.error


@pytest.mark.parametrize("number", [1, 7])
def test_a_mask_may_be_asked_for_again(number: int) -> None:
    rules = TokenRules([5], [], None)
    assert all(allowed(rules) == {5} for _ in range(number))
