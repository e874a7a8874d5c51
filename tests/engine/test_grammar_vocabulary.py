"""Texts that a grammar forces are spelt by tokens that add just them, whatever the tokenizer does with a text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from hamburger.engine.grammar.matching import Grammars
from hamburger.engine.grammar.vocabulary import Vocabulary
from hamburger.engine.grammar.writing import choice_grammar, context_free_grammar, json_grammar
from hamburger.engine.text.tokenizer import Tokenizer

EOS = 2
SPELT = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
KINDS: dict[str, dict[str, Any]] = {
    "llama2": {
        "normalizer": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        "decoder": decoders.Sequence([*SPELT, decoders.Strip(" ", 1, 0)]),
    },
    "gemma": {"normalizer": normalizers.Replace(" ", "▁"), "decoder": decoders.Sequence(SPELT)},
    "always": {
        "pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="always"),
        "decoder": decoders.Sequence([*SPELT, decoders.Strip(" ", 1, 0)]),
    },
    "first": {
        "pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="first"),
        "decoder": decoders.Sequence([*SPELT, decoders.Strip(" ", 1, 0)]),
    },
    "nfc": {
        "normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁")]),
        "decoder": decoders.Sequence(SPELT),
    },
}


def tokenizer(kind: str) -> Tokenizer:
    characters = [chr(code) for code in range(0x21, 0x7F)]
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *characters]
    merges = [("a", "b"), ("▁", "a"), ("▁", "ab"), ("h", "e"), ("▁", "he"), ("l", "l"), ("he", "ll"), ("<", "/")]
    vocab += ["".join(merge) for merge in merges]
    ids = {token: i for i, token in enumerate(vocab)}
    backend = Backend(models.BPE(vocab=ids, merges=merges, unk_token="<unk>", byte_fallback=True))
    for part, value in KINDS[kind].items():
        setattr(backend, part, value)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend)


def written(kind: str, grammar: str) -> tuple[str, list[str]]:
    """What follows a grammar that has one way to go on, and its tokens."""
    tokens = tokenizer(kind)
    matcher = Grammars(lambda: tokens, tokens.vocab_size, [EOS]).matcher(grammar)
    found: list[int] = []
    while not matcher.is_complete:
        forced = matcher.forced()
        masks = np.zeros((1, -(-tokens.vocab_size // 32)), dtype=np.int32)
        matcher.allow(masks, 0)
        allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))
        found.append(forced[0] if forced else int(allowed[-1]))
        assert found[-1] in allowed
        matcher.advance(found[-1])
        assert matcher.error is None
    return b"".join(map(tokens.token_bytes, found)).decode(), list(map(tokens.token_text, found))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "text", ["hello", " hello", "ab  ab\n\n ab", "é 漢😀 e\u0301", "</s>", "ab</s><s> hello</s>", "<unk>" * 3]
)
def test_a_forced_text_can_be_written(kind: str, text: str) -> None:
    assert written(kind, choice_grammar([text]))[0] == text


@pytest.mark.parametrize("kind", KINDS)
def test_json_can_be_written(kind: str) -> None:
    schema = {"type": "object", "properties": {"a </s>": {"const": "<s>ab"}}, "required": ["a </s>"]}
    assert written(kind, json_grammar(schema, compact=True))[0] == '{"a </s>": "<s>ab"}'


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_those_that_a_model_would_write(kind: str) -> None:
    assert written(kind, choice_grammar(["hello ab"])) == ("hello ab", ["hell", "o", "▁ab"])
    assert written(kind, choice_grammar(["ab</s>hello"]))[1] == ["ab", "</", "s", ">", "hell", "o"]


def test_a_special_token_that_a_grammar_names_is_written_as_one_behind_a_long_text() -> None:
    text = "ab " * 400
    written_text, tokens = written("llama2", context_free_grammar(f'start: "{text}" <[1]> "hello"'))
    assert written_text == f"{text}<s>hello"
    assert tokens[-3:] == ["<s>", "hell", "o"]


def test_of_a_long_text_only_the_beginning_is_read_at_each_token() -> None:
    tokens = tokenizer("gemma")
    vocabulary = Vocabulary(tokens, tokens.vocab_size, EOS)
    assert vocabulary(b"hello " * 100_000) == vocabulary(b"hello " * 200)


def test_tokens_that_the_model_lacks_are_spelt() -> None:
    tokens = tokenizer("llama2")
    vocab_size = tokens.vocab_size
    tokens._backend.add_tokens(["hello"])
    assert max(tokens.encode("hello")) == vocab_size
    vocabulary = Vocabulary(tokens, vocab_size, EOS)
    found = vocabulary(b"ab hello")
    assert max(found) < vocab_size
    assert b"".join(map(tokens.token_bytes, found)) == b"ab hello"
