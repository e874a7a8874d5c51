"""Builds a byte-level BPE tokenizer from a GGUF file's metadata. It must not look at the file's tensors.

A GGUF file names its pre-tokenizer instead of describing it; only names whose rules are known for certain are taken,
because a wrong split gives plausible tokens and quietly worse answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from hamburger.engine.types.errors import TokenizerError
from hamburger.model.checkpoints.gguf_file import open_gguf, value_of
from hamburger.model.checkpoints.sources import CheckpointError

_REMEDY = "put the model's tokenizer.json (and tokenizer_config.json) beside the file, or name the base with --base."

_SPECIAL_TOKENS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """special_tokens: transformers' name ("bos_token", ...) -> the token's text."""

    backend: Tokenizer
    special_tokens: dict[str, str]
    chat_templates: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Rules:
    """How text is split before merging. `split` None is GPT-2's own pattern."""

    split: str | None = None
    single_digits: bool = False
    nfc: bool = False
    whole_words_first: bool = False  # a piece that is in the vocabulary is taken without merging
    add_bos: bool = False  # where the file does not say


def _cased_split(digits: str) -> str:
    """The pattern that Llama 3 and Qwen 2 share, but for how many digits stay together."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_LLAMA3 = _Rules(split=_cased_split(r"\p{N}{1,3}"), whole_words_first=True, add_bos=True)
_STARCODER = _Rules(single_digits=True)
_RULES = {
    "gpt-2": _Rules(),
    "smollm": _STARCODER,
    "starcoder": _STARCODER,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _Rules(split=_cased_split(r"\p{N}"), nfc=True),
}


def read_gguf_tokenizer(path: Path) -> GgufTokenizer:
    """The tokenizer that a GGUF file describes.

    Raises TokenizerError when the file cannot be read, or holds a tokenizer of a kind that is not built here.
    """
    get = _fields_of(path)
    model, pre = get("ggml.model"), get("ggml.pre")
    if model != "gpt2":
        raise TokenizerError(
            f"{path} holds a tokenizer of kind {model!r}; only byte-level BPE ('gpt2') is built from GGUF: {_REMEDY}"
        )
    rules = _RULES.get(str(pre))
    if rules is None:
        known = ", ".join(_RULES)
        raise TokenizerError(
            f"{path} names the pre-tokenizer {pre!r}; those built from GGUF are {known}. For others {_REMEDY}"
        )
    tokens, merges, kinds = get("ggml.tokens"), get("ggml.merges"), get("ggml.token_type")
    if not tokens or merges is None:
        raise TokenizerError(f"{path} lacks tokenizer.ggml.tokens or tokenizer.ggml.merges: {_REMEDY}")
    if not (_are(str, tokens) and _are(str, merges) and _are(int, kinds or [])):
        raise TokenizerError(f"{path} lists other things than tokens, merges and token types: {_REMEDY}")
    if len(set(tokens)) != len(tokens):
        raise TokenizerError(f"{path} lists a token twice: {_REMEDY}")
    special_tokens = _special_tokens(get, tokens)
    add_bos = get("ggml.add_bos_token")
    bos = special_tokens.get("bos_token")
    try:
        backend = _build(tokens, merges, kinds or [], rules)
        if bos is not None and (rules.add_bos if add_bos is None else add_bos):
            backend.post_processor = processors.Sequence(
                [
                    processors.ByteLevel(trim_offsets=False),
                    processors.TemplateProcessing(
                        single=f"{bos} $A",
                        pair=f"{bos} $A {bos}:1 $B:1",
                        special_tokens=[(bos, get("ggml.bos_token_id"))],
                    ),
                ]
            )
    except MemoryError:
        raise  # it is not the file's fault
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerError(f"{path} holds no tokenizer that can be built: {error}. Else {_REMEDY}") from error
    return GgufTokenizer(backend, special_tokens, _chat_templates(get))


def _are(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def read_gguf_chat(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Special tokens and chat templates, as in GgufTokenizer, of a file with a tokenizer of any kind. Raises
    TokenizerError."""
    get = _fields_of(path)
    return _special_tokens(get, _listed(get("ggml.tokens"))), _chat_templates(get)


def _fields_of(path: Path) -> Callable[[str], Any]:
    """What gives a value by its name behind `tokenizer.`, None where there is none. Raises TokenizerError."""
    try:
        fields = open_gguf(path).fields
    except CheckpointError as error:
        raise TokenizerError(f"{path} is not a readable GGUF file: {error.__cause__}") from error

    def get(key: str) -> Any:
        field = fields.get(f"tokenizer.{key}")
        try:
            return None if field is None else value_of(path, field)
        except CheckpointError as error:
            raise TokenizerError(str(error)) from error

    return get


def _special_tokens(get: Callable[[str], Any], tokens: list[str]) -> dict[str, str]:
    ids = {name: get(f"ggml.{key}_token_id") for key, name in _SPECIAL_TOKENS.items()}
    return {name: tokens[i] for name, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens)}


def _chat_templates(get: Callable[[str], Any]) -> dict[str, str]:
    names = {"default": "chat_template"} | {name: f"chat_template.{name}" for name in _listed(get("chat_templates"))}
    return {name: source for name, key in names.items() if isinstance(source := get(key), str)}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _build(tokens: list[str], merges: list[str], kinds: list[int], rules: _Rules) -> Tokenizer:
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=rules.whole_words_first))
    if rules.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if rules.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if rules.split is not None:
        steps.append(pre_tokenizers.Split(Regex(rules.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rules.split is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    backend.decoder = decoders.ByteLevel()
    special = {int(gguf.TokenType.CONTROL), int(gguf.TokenType.UNKNOWN)}
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, kinds, strict=False) if k in special]
    )
    backend.add_tokens(
        [
            AddedToken(t, normalized=False)
            for t, k in zip(tokens, kinds, strict=False)
            if k == gguf.TokenType.USER_DEFINED
        ]
    )
    return backend
