"""Policies: which tokens of a chunk keep their slot, and so until when each token of an answer is seen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hamburger.engine.types.settling import Settling
from hamburger.model.slot_scores import NEAREST
from hamburger.training.settling.observed import Observed

# By name, what a score is made of: a statistic of attention or None, and whether it is weighted by surprise.
SCORES: dict[str, tuple[str | None, bool]] = {
    "attention": ("attention", False),
    "attention, all layers": ("all layers", False),
    "attention, largest head": ("largest head", False),
    "attention x |value|": ("by value", False),
    "attention, its neighbours'": ("attention", False),
    "attention, recent half": ("attention", False),
    "attention x surprise": ("attention", True),
    "surprise": (None, True),
}
BY_HEAD = ("attention, by layer", "attention, by head", "attention of the last 64, by head", "random, by head")
CONTROLS = ("random", "newest", "recency")
SCORE_NAMES = (*SCORES, *BY_HEAD, *CONTROLS)


@dataclass(frozen=True, slots=True)
class Policy:
    """score: one of SCORE_NAMES; with those of BY_HEAD other tokens stay in each layer and KV head. newest: of each
    chunk the newest stay; recency: of the whole answer the newest, as many as are held otherwise."""

    score: str
    settling: Settling

    @property
    def name(self) -> str:
        s = self.settling
        return f"{self.score} | {s.window} | {s.growth} | {s.keep} | {s.chunk}"

    def dropped_at(self, seen: Observed, seed: int) -> Tensor:
        """int64 [A], or [layers, kv_heads, A]: the number of computed answer tokens at which each loses its slot; A
        where it never does."""
        length = len(seen.surprise)
        heads = (len(seen.heads), seen.heads[0][0].shape[1]) if self.score in BY_HEAD else ()
        dropped = torch.full((*heads, length), length, dtype=torch.int64)
        generator = torch.Generator().manual_seed(seed)
        gone = 0
        for place, first in self.settling.places(length):
            end = first + self.settling.chunk
            number = self.settling.chunk - self.settling.kept
            if self.score == "recency":
                dropped[gone : gone + number] = place
                gone += number
                continue
            if heads:
                scores = self._scores_by_head(seen, place, first, end, generator)
            else:
                scores = self._scores(seen, place, first, end, generator)
            order = scores.argsort(stable=True)
            dropped.scatter_(-1, first + order[..., :number], place)
        return dropped

    def _scores(self, seen: Observed, place: int, first: int, end: int, generator: torch.Generator) -> Tensor:
        """float32 [chunk]: of answer tokens first to end - 1, when `place` tokens have slots."""
        if self.score == "random":
            return torch.rand(end - first, generator=generator)
        if self.score == "newest":
            return torch.arange(end - first, dtype=torch.float32)
        statistic, by_surprise = SCORES[self.score]
        scores = torch.ones(end - first)
        if statistic is not None:
            near = 2 if self.score == "attention, its neighbours'" else 0
            low = max(first - near, 0)
            since = low + (place - low) // 2 if self.score == "attention, recent half" else low
            paid = seen.attention[statistic][since:place, low : end + near]
            query = torch.arange(since, place)[:, None]
            scores = (paid * (query >= torch.arange(low, end + near) + NEAREST)).sum(0)
            if near:
                around = scores.unfold(0, 2 * near + 1, 1).mean(-1) if low == first - near else None
                scores = scores[first - low : end - low] if around is None else around
        return scores * seen.surprise[first:end] if by_surprise else scores

    def _scores_by_head(self, seen: Observed, place: int, first: int, end: int, generator: torch.Generator) -> Tensor:
        """float32 [layers, kv_heads, chunk]."""
        if seen.by_head is None:
            raise ValueError(f"{self.score}: the text was not observed by head.")
        if self.score == "random, by head":
            return torch.rand(*seen.by_head.shape[:2], end - first, generator=generator)
        since = max(first, place - 64) if self.score == "attention of the last 64, by head" else first
        paid = seen.by_head[:, :, since:place, first:end].float()
        scores = (paid * (torch.arange(since, place)[:, None] >= torch.arange(first, end) + NEAREST)).sum(2)
        return scores.mean(1, keepdim=True).expand_as(scores) if self.score == "attention, by layer" else scores
