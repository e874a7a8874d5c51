"""Tokens that the files beside a tokenizer.json add to it, where transformers adds them: those that have lists."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken

from hamburger.engine.text.tokenizer_files import TOKEN_ID, text_of

logger = logging.getLogger(__name__)

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_LISTS = ("additional_special_tokens", "extra_special_tokens")


def add_named_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, Any], added: Mapping[str, Any]
) -> None:
    """Add those that the files name and the tokenizer lacks, and make those special that their decoder calls so.

    config: tokenizer_config.json, whose added_tokens_decoder, if there is one, makes the other two count for nothing:
    special_tokens_map.json with it (`named`), and added_tokens.json. What tokenizer.json lacks gets the next id, also
    where the files say another.
    """
    if isinstance(config.get("added_tokens_decoder"), dict):
        named, added = config, {}
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for token, token_id in sorted(_named(named, added), key=lambda pair: (pair[1] is None, pair[1] or 0)):
        found = known.get(token.content)
        # What is only listed by name keeps the flags that the tokenizer gives it.
        if found is None or (token_id is not None and token.special and not found.special):
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
            known[token.content] = token
        got = backend.token_to_id(token.content)
        if token_id is not None and got != token_id:
            logger.warning(
                "The token %r has the id %s, though the files beside tokenizer.json say %d.",
                token.content,
                got,
                token_id,
            )


def _named(named: Mapping[str, Any], added: Mapping[str, Any]) -> Iterator[tuple[AddedToken, int | None]]:
    decoder = named.get("added_tokens_decoder")
    for token_id, entry in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(entry, dict) and isinstance(entry.get("content"), str) and TOKEN_ID.fullmatch(token_id):
            flags = {flag: bool(entry[flag]) for flag in _FLAGS if flag in entry}
            if entry["content"]:
                yield AddedToken(entry["content"], **flags), int(token_id)
    entries = [entry for field in _LISTS if isinstance(named.get(field), list) for entry in named[field]]
    entries += [value for field, value in named.items() if field.endswith("_token")]
    special = {text_of(entry) for entry in entries}
    for name, token_id in added.items():
        if name and isinstance(token_id, int):
            yield AddedToken(name, special=name in special, normalized=name not in special), token_id
    for field in _LISTS:
        for entry in named[field] if isinstance(named.get(field), list) else ():
            if content := text_of(entry):
                yield AddedToken(content, special=True, normalized=False), None
