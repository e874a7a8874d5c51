"""The small files beside a tokenizer.json: what they call its special tokens, and which of these ends a text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from hamburger.engine.types.errors import TokenizerError

TOKENIZER = "tokenizer.json"
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TOKEN_ID = re.compile(r"[0-9]{1,9}")  # as a key
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_ADDED_TOKENS = re.compile(r'"added_tokens"\s*:\s*(?=\[)')


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object; {} when there is no such file. Raises TokenizerError for what is none."""
    if not file.is_file():
        if file.is_symlink():
            raise TokenizerError(f"{file} is a link to a file that is not there: fetch the model again.")
        return {}
    try:
        text = file.read_text(encoding="utf-8")
        value = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()  # half a pair is no text
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{file} does not hold a JSON object.")
    return value


def special_tokens_of(folder: Path, added: Mapping[int, AddedToken]) -> dict[str, str]:
    """transformers' names ("bos_token", ...) -> the tokens' text. added: the tokenizer's added tokens by their ids."""
    config = read_json(folder / "tokenizer_config.json")
    named = read_json(folder / "special_tokens_map.json") | config
    ids = read_json(folder / "config.json") | read_json(folder / "generation_config.json")
    found: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        token = text_of(named.get(name))
        if token is None and name not in config:
            token_id = ids.get(f"{name}_id")
            token_id = token_id[0] if isinstance(token_id, list) and token_id else token_id
            # Classes of transformers write ids by default, which may be those of ordinary tokens.
            known = added.get(token_id) if isinstance(token_id, int) else None
            token = known.content if known is not None and known.special else None
        if token is not None:
            found[name] = token
    named_too = config.get("extra_special_tokens")
    for name, value in named_too.items() if isinstance(named_too, dict) else ():
        if (token := text_of(value)) is not None:
            found.setdefault(name, token)
    return found


def with_own_end(end_token_ids: tuple[int, ...], vocab_size: int, path: Path) -> tuple[int, ...]:
    """A model's end tokens, and the one that the files of its tokenizer's folder call so, if it is another: fine-tuning
    that gave a model its own may have told the tokenizer alone. A GGUF file says it itself, unless a tokenizer.json is
    beside it. Raises TokenizerError."""
    own = _end_token_id(path.parent if path.suffix == ".gguf" else path)
    if own is None or own in end_token_ids or own >= vocab_size:
        return end_token_ids
    return (*end_token_ids, own)


def _end_token_id(folder: Path) -> int | None:
    """Without loading the tokenizer, which takes megabytes."""
    if not (folder / TOKENIZER).is_file():
        return None
    config = read_json(folder / "tokenizer_config.json")
    token = text_of((read_json(folder / "special_tokens_map.json") | config).get("eos_token"))
    if token is None:
        return None
    decoder = config.get("added_tokens_decoder")
    for key, entry in decoder.items() if isinstance(decoder, dict) else ():
        if TOKEN_ID.fullmatch(key) and text_of(entry) == token:
            return int(key)
    for entry in _added_tokens(folder / TOKENIZER):
        if isinstance(entry, dict) and isinstance(entry.get("id"), int) and text_of(entry) == token:
            return int(entry["id"])
    return None


def _added_tokens(file: Path) -> list[Any]:
    """Of a tokenizer.json, which is megabytes, the list alone."""
    try:
        text = file.read_text(encoding="utf-8")
        if (found := _ADDED_TOKENS.search(text)) is None:
            return []
        tokens: list[Any] = json.JSONDecoder().raw_decode(text, found.end())[0]
    except (OSError, ValueError, RecursionError):  # whoever loads it says what is wrong
        return []
    return tokens


def text_of(token: Any) -> str | None:
    """Of a token as it is, or as an AddedToken that is written out; None for what is neither."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
