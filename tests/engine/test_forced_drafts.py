"""What a grammar forces is drafted: which tokens these are, and whose drafts are taken."""

from __future__ import annotations

import json
import unicodedata

import pytest

from byte_grammars import allowed
from fakes import EOS, VOCAB_SIZE, ByteTokenizer
from hamburger.engine.drafting.proposal import FORCED, Proposal, forced_or
from hamburger.engine.grammar.matching import Grammars
from hamburger.engine.grammar.writing import choice_grammar, json_grammar, regex_grammar
from hamburger.engine.text.token_rules import TokenRules
from hamburger.engine.text.tokenizer import Tokenizer
from hamburger.engine.types.sampling_params import ThinkingBudget
from hamburger.model.checkpoints.sources import resolve_source

BYTES = Grammars(ByteTokenizer, VOCAB_SIZE, [EOS])
SCHEMA = {
    "type": "object",
    "properties": {"date_of_birth": {"type": "string"}, "is_customer": {"type": "boolean"}},
    "required": ["date_of_birth", "is_customer"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve_source(None).tokenizer_path)


def test_names_of_a_schema_are_forced_as_the_tokenizer_writes_them(tokenizer: Tokenizer) -> None:
    matcher = Grammars(lambda: tokenizer, tokenizer.vocab_size, [2]).matcher(json_grammar(SCHEMA))
    text = tokenizer.encode(json.dumps({"date_of_birth": "1990", "is_customer": True}))
    foretold = []
    for place, token_id in enumerate(text):
        forced = matcher.forced()
        assert forced == matcher.forced()
        assert text[place : place + len(forced)] == forced
        foretold.append(tokenizer.decode(forced))
        matcher.advance(token_id)
        assert matcher.error is None
    assert "date_of_birth" in foretold
    assert "is_customer" in foretold
    assert "" in foretold  # the value is free
    assert matcher.is_complete
    assert matcher.forced() == []


def test_drafts_that_are_taken_back_change_nothing() -> None:
    matcher = BYTES.matcher(choice_grammar(["positive", "negative"]))
    assert matcher.forced() == []
    matcher.advance(ord("p"))
    forced = matcher.forced()
    assert bytes(forced) == b"ositive"
    for token_id in forced[:4]:
        matcher.advance(token_id)
    assert bytes(matcher.forced()) == b"ive"
    matcher.go_back(4)
    assert matcher.forced() == forced


def test_nothing_is_forced_behind_an_end_or_an_error() -> None:
    ended = BYTES.matcher(regex_grammar("abc?"))
    for token_id in b"ab":
        ended.advance(token_id)
    assert ended.forced() == []  # it may end here
    ended.advance(EOS)
    assert ended.forced() == []
    failed = BYTES.matcher(regex_grammar("abc"))
    failed.advance(ord("x"))
    assert failed.error is not None
    assert failed.forced() == []


class Wider(ByteTokenizer):
    """Has a token that the model has no row for."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [VOCAB_SIZE if token_id == ord("i") else token_id for token_id in text.encode()]

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        return b"i" if token_id == VOCAB_SIZE else super().token_bytes(token_id, first=first)


class SpaceInFront(ByteTokenizer):
    """Puts a space in front of a text, as sentencepiece tokenizers do."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [*f" {text}".encode()] if text else []


class Normalizing(ByteTokenizer):
    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [*unicodedata.normalize("NFC", text).encode()]


@pytest.mark.parametrize("kind", [Wider, SpaceInFront, Normalizing, ByteTokenizer])
@pytest.mark.parametrize("text", ["positive", "poe\u0301sie", "<pad>"])
def test_a_text_is_forced_as_it_stands_in_tokens_of_the_model(kind: type[ByteTokenizer], text: str) -> None:
    matcher = Grammars(kind, VOCAB_SIZE, [EOS]).matcher(regex_grammar(f"[0-9]{text}"))
    matcher.advance(ord("1"))
    for place, token_id in enumerate(text.encode()):
        assert bytes(matcher.forced()) == text.encode()[place:]
        assert allowed(matcher).nonzero()[0].tolist() == [token_id]
        matcher.advance(token_id)
    assert matcher.is_complete


def test_rules_force_what_their_grammar_does_and_the_end_of_thoughts() -> None:
    rules = TokenRules([], [[5]], BYTES.matcher(regex_grammar("[0-9]abc")))
    assert rules.forced() == []
    rules.advance(ord("1"))
    assert bytes(rules.forced()) == b"abc"
    thinking = TokenRules([], [], None, ThinkingBudget(2, begin=None, end=9))
    thinking.advance(1)
    assert thinking.forced() == []
    thinking.advance(1)
    assert thinking.forced() == [9]
    thinking.advance(9)
    assert thinking.forced() == []


def corrected(proposal: Proposal) -> Proposal:
    return Proposal(proposal.drafter, proposal.token_ids, [chance / 0.95 for chance in proposal.chances])


def test_another_drafter_goes_on_behind_what_is_forced_or_is_wrong() -> None:
    own = Proposal("grammar", [1, 2], [1.0, 1.0])
    longer = Proposal("lookup", [1, 2, 3], [0.9, 0.9, 0.9])
    assert FORCED == 0.95
    assert forced_or([], longer, corrected) is longer
    assert forced_or([], None, corrected) is None
    assert forced_or([1, 2], None, corrected) == own
    assert forced_or([1, 2], longer, corrected) is longer
    assert forced_or([1, 2], Proposal("lookup", [1, 2, 3], [0.9, 0.5, 0.5]), corrected) == own
    assert forced_or([1, 2], Proposal("micro", [1, 4, 3], [0.9, 0.9, 0.9]), corrected) == own
    assert forced_or([1, 2], Proposal("micro", [4], [1.0]), corrected) == own
