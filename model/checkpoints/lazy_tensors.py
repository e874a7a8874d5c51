"""A checkpoint's tensors, made when one asks for them where that takes memory: one at a time, for who packs them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Lazy:
    """What is known of a tensor before it is made."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name. One that is made is not kept: who asks again has it made again."""

    def __init__(self, entries: Mapping[str, Tensor | Lazy]) -> None:
        self.entries = entries

    def __getitem__(self, name: str) -> Tensor:
        entry = self.entries[name]
        return entry if isinstance(entry, Tensor) else entry.make()

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __or__(self, others: Mapping[str, Tensor]) -> LazyTensors:
        return LazyTensors({**self.entries, **entries_of(others)})

    def without(self, names: Collection[str]) -> LazyTensors:
        return LazyTensors({name: entry for name, entry in self.entries.items() if name not in names})


def entries_of(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor | Lazy]:
    """Each tensor, or what is known of it; none is made."""
    return tensors.entries if isinstance(tensors, LazyTensors) else tensors


NO_TENSORS = LazyTensors({})
