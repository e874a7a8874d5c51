"""Captures that replay eagerly and watch what is replayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hamburger.model.graphs.capture import EagerCapture, Work
from hamburger.model.graphs.pieces import Pieces


class CountingCapture(EagerCapture):
    """Counts what is captured and replayed, and lets nothing in it wait for the device."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, work: Work) -> Work:
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            with NoWaiting():  # type: ignore[no-untyped-call]
                work()

        return replay


class NoWaiting(TorchDispatchMode):
    """Fails on operations whose result's shape, or whose course, depends on the device's numbers."""

    FORBIDDEN = ("nonzero", "_local_scalar_dense", "item", "masked_select", "unique", "is_nonzero", "equal")

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.__name__.split(".")[0]
        assert name not in self.FORBIDDEN, f"{name} waits for the device"
        if name in ("index", "index_put", "index_put_"):
            assert all(index is None or index.dtype != torch.bool for index in args[1]), "a mask picks rows out"
        if name == "repeat_interleave":
            assert not isinstance(args[-1], Tensor), "the shape depends on numbers"
        return func(*args, **(kwargs or {}))


class Watched(EagerCapture):
    """Counts the pieces that are replayed, by their names."""

    def __init__(self) -> None:
        self.replayed: Counter[str] = Counter()

    def __call__(self, work: Work) -> Work:
        assert isinstance(work, partial)
        name = work.func.__name__
        assert name in (Pieces.compute.__name__, Pieces.choose.__name__)

        def replay() -> None:
            self.replayed[name] += 1
            work()

        return replay
