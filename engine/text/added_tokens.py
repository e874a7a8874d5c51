"""Tokens that the files beside a tokenizer.json add to it, as transformers adds them. It must not import that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken

from hamburger.engine.types.errors import TokenizerError

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def add_named_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], added: Mapping[str, Any], where: str
) -> None:
    """Add those that tokenizer_config.json (`config`) and added_tokens.json (`added`) name and the tokenizer lacks, and
    make those special that they call so. where: names the files in errors.

    Raises TokenizerError for a token that would get another id than the one stated.
    """
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for token, token_id in sorted(_named(config, added), key=lambda pair: (pair[1] is None, pair[1] or 0)):
        found = known.get(token.content)
        # What is only listed by name keeps the flags that the tokenizer gives it.
        if found is None or (token_id is not None and token.special and not found.special):
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
            known[token.content] = token
        got = backend.token_to_id(token.content)
        if token_id is not None and got != token_id:
            raise TokenizerError(
                f"{where}: the token {token.content!r} is said to have the id {token_id}, but in tokenizer.json it has "
                f"{got}: save the tokenizer again with transformers (save_pretrained)."
            )


def _named(config: Mapping[str, Any], added: Mapping[str, Any]) -> Iterator[tuple[AddedToken, int | None]]:
    decoder = config.get("added_tokens_decoder")
    told = {name: token_id for name, token_id in added.items() if isinstance(token_id, int)}
    for token_id, entry in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(entry, dict) and isinstance(entry.get("content"), str) and str(token_id).isdecimal():
            told.pop(entry["content"], None)
            flags = {flag: bool(entry[flag]) for flag in _FLAGS if flag in entry}
            yield AddedToken(entry["content"], **flags), int(token_id)
    for name, token_id in told.items():
        yield AddedToken(name, normalized=False), token_id
    for field in ("additional_special_tokens", "extra_special_tokens"):
        listed = config.get(field)
        for entry in listed if isinstance(listed, list) else ():
            content = entry.get("content") if isinstance(entry, dict) else entry
            if isinstance(content, str):
                yield AddedToken(content, special=True, normalized=False), None
