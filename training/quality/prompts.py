"""Which held-out prompts the quality of a model is measured on: kinds, sources, and a choice that never changes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType

import yaml

from hamburger.training.corpus.jsonl import Row, read_rows, whole_text
from hamburger.training.corpus.prompts import Message, is_held_out, row_category, row_id, row_messages
from hamburger.training.errors import TrainingError

Messages = Sequence[Message]
Kinds = Mapping[str, Sequence[str]]

# A pattern names a source, or source:category.
DEFAULT_KINDS: Kinds = MappingProxyType(
    {
        "maths": ("gsm8k_train",),
        "code": ("gpteacher_codegen", "mbpp"),
        "chat": ("gpteacher_roleplay", "llms_from_scratch", "oasst*", "dolly15k_subset", "self_instruct_*"),
        "summaries": ("scitldr_a",),
        "context QA": ("fairytaleqa_train:context_qa", "xquad_en", "pubmedqa_*"),
    }
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One held-out prompt, written with the model's chat template."""

    id: str
    kind: str
    prompt_ids: list[int]


def read_kinds(path: Path | None) -> Kinds:
    """The kinds of a YAML file, or the default ones. Raises TrainingError for a file of another shape, and OSError."""
    if path is None:
        return DEFAULT_KINDS
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise TrainingError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(found, dict) or not found:
        raise TrainingError(f"{path} must map each kind to a list of sources, such as `maths: [gsm8k_train]`.")
    for kind, patterns in found.items():
        if not isinstance(patterns, list) or not patterns or not all(isinstance(p, str) for p in patterns):
            raise TrainingError(f"{path}: {kind} must be a list of sources, such as [gsm8k_train, mbpp].")
    return {str(kind): tuple(patterns) for kind, patterns in found.items()}


def choose_prompts(
    files: Sequence[Path],
    kinds: Kinds | None,
    per_kind: int,
    held_out: float,
    encode: Callable[[Messages], list[int]],
    max_prompt_tokens: int,
) -> list[Prompt]:
    """`per_kind` held-out prompts of each kind, kind by kind, in an order that only their ids decide.

    So a larger `per_kind` keeps those that a smaller one chose. kinds: None for the default ones or, where no row of
    the files is of these, each row's own: its category, else its source, else its file. encode: writes a chat as prompt
    ids. Prompts of more than max_prompt_tokens tokens are passed over. Raises TrainingError for wrong rows, an id that
    is there twice, a kind with too few prompts and files without a held-out one, and OSError.
    """
    found = _held_out_rows(files, kinds, held_out)
    places: dict[str, str] = {}
    for row in (row for rows in found.values() for row in rows):
        prompt_id = row_id(row)
        if prompt_id in places:
            raise TrainingError(
                f'{row.place}: the id "{prompt_id}" is that of {places[prompt_id]} too: give each row its own "id".'
            )
        places[prompt_id] = row.place
    chosen: list[Prompt] = []
    for kind, rows in found.items():
        prompts = sorted(((row_id(row), row_messages(row)) for row in rows), key=lambda p: _order(p[0]))
        fitting = _fitting(kind, prompts, encode, max_prompt_tokens, per_kind)
        if len(fitting) < per_kind:
            raise TrainingError(
                f"kind {kind!r} has {len(fitting)} held-out prompts of at most {max_prompt_tokens} tokens, but "
                f"per_kind is {per_kind}: lower it (--per-kind N), give more files (--prompts), or say which sources "
                f"are of which kind (--kinds FILE). Held out are {_numbers(found)}."
            )
        chosen += fitting
    return chosen


def _held_out_rows(files: Sequence[Path], kinds: Kinds | None, held_out: float) -> dict[str, list[Row]]:
    """By kind. Raises TrainingError where the rows' own kinds are asked for and there is none."""
    named = DEFAULT_KINDS if kinds is None else kinds
    are_own, number = kinds is None, 0
    rows: list[tuple[str | None, Row]] = []
    for row in (row for file in files for row in _with_source(file)):
        number += 1
        kind = _kind(named, str(row.values["source"]), row_category(row) or "")
        are_own = are_own and kind is None
        if is_held_out(row_id(row), held_out):
            rows.append((kind, row))
    found: dict[str, list[Row]] = {} if are_own else {kind: [] for kind in named}
    # In an order that the files' does not change.
    for kind, row in sorted(((_own_kind(r), r) for _, r in rows), key=lambda pair: pair[0]) if are_own else rows:
        if kind is not None:
            found.setdefault(kind, []).append(row)
    if not found:
        raise TrainingError(
            f"none of the {number} prompts in {', '.join(map(str, files))} is held out, by --held-out {held_out:g}: "
            "give more files (--prompts), or the share that `distill` was told."
        )
    return found


def _own_kind(row: Row) -> str:
    """It stands in the results, so it must be a text that can be written."""
    return whole_text(row, "its category or source", row_category(row) or str(row.values["source"]))


def _numbers(found: Mapping[str, Sequence[Row]], most: int = 10) -> str:
    """How many rows each kind has; of very many kinds (a source may be an address) the first."""
    shown = [f"{len(rows)} of {kind!r}" for kind, rows in found.items()]
    return ", ".join(shown if len(shown) <= most else [*shown[:most], f"and more in {len(shown) - most} other kinds"])


def _fitting(
    kind: str, found: Sequence[tuple[str, Messages]], encode: Callable[[Messages], list[int]], longest: int, wanted: int
) -> list[Prompt]:
    fitting: list[Prompt] = []
    for prompt_id, messages in found:
        if len(fitting) == wanted:
            break
        prompt_ids = encode(messages)
        if len(prompt_ids) <= longest:
            fitting.append(Prompt(prompt_id, kind, prompt_ids))
    return fitting


def _kind(kinds: Kinds, source: str, category: str) -> str | None:
    """The first kind with a pattern for this row."""
    for kind, patterns in kinds.items():
        for pattern in patterns:
            name, _, wanted = pattern.partition(":")
            if fnmatchcase(source, name) and fnmatchcase(category, wanted or "*"):
                return kind
    return None


def _order(prompt_id: str) -> bytes:
    """Independent of the hash that is_held_out looks at."""
    return hashlib.sha256(f"quality {prompt_id}".encode()).digest()


def _with_source(file: Path) -> Iterator[Row]:
    """Rows that name no source are of the file's name."""
    for row in read_rows(file):
        yield row._replace(values={**row.values, "source": row.values.get("source") or _stem(file)})


def _stem(file: Path) -> str:
    return file.name.removesuffix(".gz").rsplit(".", 1)[0]
