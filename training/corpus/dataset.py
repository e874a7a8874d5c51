"""The segmented data set on disk: `meta.json` and parts of flat tensors, read memory-mapped (dataset_writer.py writes).

part-00000.safetensors   N tokens of E examples, R of them trained, k likeliest rivals
    token_ids      int32   [N]
    starts         int64   [E + 1]      example i is starts[i]..starts[i + 1]
    response       bool    [N]          the tokens that are trained: an assistant's, with its end token
    entropy        float32 [N]          of the base model for this token, in nats; 0 where not trained
    group_sizes    uint8   [N]          at a group's first token its size, else 0; 1 where not trained
    top_ids        int32   [R, k]       and top_logprobs float16 [R, k]: the base model's likeliest, optional
    states         bfloat16 [R, F, D]   the trunk's feature states that give each trained token, optional
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hamburger.training.errors import TrainingError

FORMAT, VERSION = "hamburger-segmented", 1
TOKEN_TENSORS = {
    "token_ids": torch.int32,
    "response": torch.bool,
    "entropy": torch.float32,
    "group_sizes": torch.uint8,
}
_LATER = frozenset({"dtype", "quantization", "weights"})  # what meta.json did not always have
RESPONSE_TENSORS = {"top_ids": torch.int32, "top_logprobs": torch.float16, "states": torch.bfloat16}


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One conversation of N tokens, R of them trained; the tensors are those of a part (see above), cut out.

    id: that of its prompt. key: a hash of tokens and mask, by which the same example is recognised.
    """

    id: str
    key: str
    token_ids: Tensor
    response: Tensor
    entropy: Tensor
    group_sizes: Tensor
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None
    states: Tensor | None = None

    @property
    def num_response_tokens(self) -> int:
        return int(self.response.sum())

    @property
    def num_response_groups(self) -> int:
        return int((self.group_sizes[self.response] > 0).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetMeta:
    """The settings that a data set was made with. model: the one that scored it; model_argument, base: to load it.

    dtype, quantization: as it was scored. weights: the model's fingerprint, as another's folder may have the same name.
    They are None in data sets that do not say, which agree with any.
    """

    model: str
    model_argument: str | None
    base: str | None
    vocab_size: int
    strategy: str
    ratio: float
    floor: float
    max_group: int
    top_k: int
    max_length: int
    train_on: str
    loops: str
    held_out: float
    state_layers: tuple[int, ...] = ()
    dtype: str | None = None
    quantization: str | None = None
    weights: str | None = None

    def differences(self, other: DatasetMeta) -> list[str]:
        """The fields in which two differ; where the model lies is none of them."""
        mine, others = asdict(self), asdict(other)
        differ = [name for name in mine if name not in ("model_argument", "base") and mine[name] != others[name]]
        return [name for name in differ if name not in _LATER or None not in (mine[name], others[name])]


class SegmentedDataset:
    """A data set to read. Tensors stay on disk until they are looked at.

    Raises TrainingError when the folder is no such data set, or a part of it is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta = read_meta(folder)
        self._parts = [_Part(path, self.meta) for path in part_paths(folder)]
        self._ends = list(accumulate(len(part) for part in self._parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def example(self, index: int) -> Example:
        """Raises TrainingError when there is no such example."""
        if not 0 <= index < len(self):
            raise TrainingError(f"{self.folder} has {len(self)} examples, counted from 0: there is no {index}.")
        part = bisect.bisect_right(self._ends, index)
        return self._parts[part].example(index - (self._ends[part] - len(self._parts[part])))

    def examples(self) -> Iterator[Example]:
        return (self.example(i) for i in range(len(self)))

    @property
    def state_layers(self) -> tuple[int, ...]:
        return self.meta.state_layers

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self._parts)

    @property
    def num_response_tokens(self) -> int:
        return sum(part.num_response_tokens for part in self._parts)

    @property
    def keys(self) -> set[str]:
        return {key for part in self._parts for key in part.keys}


class _Part:
    """One memory-mapped part, checked when it is opened."""

    def __init__(self, path: Path, meta: DatasetMeta) -> None:
        self.path = path
        try:
            with safe_open(path, framework="pt") as file:
                self._tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                metadata: Mapping[str, str] = file.metadata() or {}
            self.ids: list[str] = json.loads(metadata["ids"])
            self.keys: list[str] = json.loads(metadata["keys"])
        except (SafetensorError, KeyError, ValueError) as error:
            raise self._damaged(f"it cannot be read ({error})") from error
        self._check(meta)
        response_ends = torch.cat([torch.zeros(1, dtype=torch.int64), self._tensors["response"].cumsum(0)])
        starts = self._tensors["starts"]
        self._starts: list[int] = starts.tolist()
        self._response_starts: list[int] = response_ends[starts].tolist()

    def __len__(self) -> int:
        return len(self._starts) - 1

    @property
    def num_tokens(self) -> int:
        return self._starts[-1]

    @property
    def num_response_tokens(self) -> int:
        return self._response_starts[-1]

    def example(self, index: int) -> Example:
        tokens = slice(self._starts[index], self._starts[index + 1])
        rows = slice(self._response_starts[index], self._response_starts[index + 1])
        optional = {name: self._tensors[name][rows] for name in RESPONSE_TENSORS if name in self._tensors}
        required = {name: self._tensors[name][tokens] for name in TOKEN_TENSORS}
        return Example(self.ids[index], self.keys[index], **required, **optional)

    def _check(self, meta: DatasetMeta) -> None:
        wanted = {"starts": torch.int64, **TOKEN_TENSORS, **RESPONSE_TENSORS}
        for name, tensor in self._tensors.items():
            if tensor.dtype != wanted.get(name):
                raise self._damaged(f"its tensor {name} is unknown or of the wrong type ({tensor.dtype})")
        missing = ({"starts", *TOKEN_TENSORS} | ({"top_ids", "top_logprobs"} if meta.top_k else set())) - set(
            self._tensors
        )
        if missing:
            raise self._damaged(f"it lacks {', '.join(sorted(missing))}")
        starts, ids = self._tensors["starts"], self._tensors["token_ids"]
        sizes, response = self._tensors["group_sizes"], self._tensors["response"]
        n, num_rows = len(ids), int(response.sum())
        if len(starts) < 2 or starts[0] != 0 or starts[-1] != n or bool((starts.diff() < 1).any()):
            raise self._damaged("its starts do not run from 0 to its number of tokens")
        if len(self.ids) != len(starts) - 1 or len(self.keys) != len(self.ids):
            raise self._damaged("it has not one id and one key for each example")
        if any(tuple(self._tensors[name].shape) != (n,) for name in TOKEN_TENSORS):
            raise self._damaged("its tensors differ in length")
        if any(len(self._tensors[name]) != num_rows for name in RESPONSE_TENSORS if name in self._tensors):
            raise self._damaged("it has not one row of the base model's view for each trained token")
        if bool(((ids < 0) | (ids >= meta.vocab_size)).any()):
            raise self._damaged(f"it has token ids outside 0..{meta.vocab_size - 1}")
        first = sizes.nonzero()[:, 0]
        ends = torch.cat([first[1:], torch.tensor([n])])
        whole = len(first) > 0 and first[0] == 0 and bool((first + sizes[first] == ends).all())
        # A group of several tokens is trained as a whole and lies within one example.
        if not whole or not bool(response[sizes != 1].all()) or not bool((sizes[starts[:-1]] > 0).all()):
            raise self._damaged("its groups do not tile its tokens")
        if int(sizes.max()) > meta.max_group:
            raise self._damaged(f"it has groups of more than {meta.max_group} tokens")

    def _damaged(self, what: str) -> TrainingError:
        return TrainingError(f"{self.path} is damaged: {what}. Remove it and run segment again.")


def read_meta(folder: Path) -> DatasetMeta:
    """The settings that a data set was made with. Raises TrainingError when the folder holds none."""
    file = folder / "meta.json"
    if not file.is_file():
        raise TrainingError(f"{folder} is no data set of `hamburger segment`: it has no meta.json.")
    try:
        values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        known = (values.pop("format"), values.pop("version"))
        if known != (FORMAT, VERSION):
            raise ValueError(f"it is of the format {known[0]} {known[1]}, not {FORMAT} {VERSION}")
        if other := (set(values) | _LATER) ^ {field.name for field in fields(DatasetMeta)}:
            raise ValueError(f"its keys are not those of this version ({', '.join(sorted(other))})")
        return DatasetMeta(**values | {"state_layers": tuple(values["state_layers"])})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrainingError(f"{file} cannot be used: {error}.") from error


def part_paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.safetensors"))
