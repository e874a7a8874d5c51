"""Policies: which tokens of a chunk keep their slot, and so until when each token of an answer is seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hamburger.engine.types.settling import Settling
from hamburger.model.settled_places import SettledPlaces
from hamburger.model.slot_choice import SlotChoice
from hamburger.training.settling.observed import Observed

NEAREST = 9  # attention to the tokens just before is not counted: nearly all of it is of being near
# What an engine does without a probe, and with one; and a probe without its shares, in which no head lends places.
KEYS, PROBE, EQUAL = "keys", "probe", "probe, equal places"
# Each layer and KV head chooses for itself.
BY_HEAD = (
    KEYS,
    PROBE,
    EQUAL,
    "attention, by head",
    "attention, by layer",
    "attention to come, by head",
    "random, by head",
)
RANDOM = ("random", "random, by head")
ALIKE = ("attention", "attention x surprise", "surprise", "random", "newest", "recency")
SCORE_NAMES = (*BY_HEAD, *ALIKE)


class Chooser(NamedTuple):
    """shares: int64 [layers, kv_heads], of whose places a head has (SettledPlaces)."""

    choice: SlotChoice
    shares: Tensor


@dataclass(frozen=True, slots=True)
class Policy:
    """score: one of SCORE_NAMES. `attention to come` is what no engine knows; newest: of each chunk the newest stay;
    recency: of the whole answer the newest, as many as are held otherwise. probe: which one it is. seed: of random
    choice."""

    score: str
    settling: Settling
    probe: str = ""
    seed: int = 0

    @property
    def name(self) -> str:
        s = self.settling
        parts = [self.score, s.window, s.growth, s.keep, s.chunk, *([s.limit] if s.limit else ()), self.probe]
        parts += [f"seed {self.seed}"] if self.score in RANDOM else []
        return " | ".join(str(part) for part in parts if part != "")

    def dropped_at(self, seen: Observed, choices: Mapping[str, Chooser]) -> Tensor:
        """int64 [A], or [layers, kv_heads, A]: the number of computed answer tokens at which each loses its slot; A
        where it never does. choices: of the scores KEYS, PROBE and EQUAL."""
        length = len(seen.surprise)
        if self.score in choices:
            choice, shares = choices[self.score]
            places = SettledPlaces(shares, self.settling.chunk, self.settling.kept)
            return dropped_by_head(seen, self.settling, choice, places.numbers)
        heads = (len(seen.heads), seen.heads[0][0].shape[1]) if self.score in BY_HEAD else ()
        dropped = torch.full((*heads, length), length, dtype=torch.int64, device=seen.device)
        generator = torch.Generator().manual_seed(self.seed % 2**63)
        chunk, number = self.settling.chunk, self.settling.chunk - self.settling.kept
        gone = 0
        for place, first in self.settling.places(length):
            if self.score == "recency":
                settled = first + chunk
                dropped[gone : settled - self.settling.kept_slots(settled)] = place
                gone = settled - self.settling.kept_slots(settled)
                continue
            _lose_first(dropped, self.settling, place, first)
            if heads:
                scores = self._scores_by_head(seen, place, first, first + chunk, generator)
            else:
                scores = self._scores(seen, place, first, first + chunk, generator)
            order = scores.argsort(stable=True)
            dropped.scatter_(-1, first + order[..., :number], place)
        return dropped

    def _scores(self, seen: Observed, place: int, first: int, end: int, generator: torch.Generator) -> Tensor:
        """float32 [chunk]: of answer tokens first to end - 1, when `place` tokens have slots."""
        if self.score == "random":
            return torch.rand(end - first, generator=generator).to(seen.device)
        if self.score == "newest":
            return torch.arange(end - first, dtype=torch.float32, device=seen.device)
        if self.score == "surprise":
            return seen.surprise[first:end]
        scores = (seen.attention[first:place, first:end] * _far(seen, place, first, end)).sum(0)
        return scores * seen.surprise[first:end] if self.score == "attention x surprise" else scores

    def _scores_by_head(self, seen: Observed, place: int, first: int, end: int, generator: torch.Generator) -> Tensor:
        """float32 [layers, kv_heads, chunk]."""
        if seen.by_head is None:
            raise ValueError(f"{self.score}: the text was not observed by head.")
        if self.score == "random, by head":
            return torch.rand(*seen.by_head.shape[:2], end - first, generator=generator).to(seen.device)
        if self.score == "attention to come, by head":
            return seen.by_head[:, :, place:, first:end].float().sum(2)
        scores = (seen.by_head[:, :, first:place, first:end].float() * _far(seen, place, first, end)).sum(2)
        return scores.mean(1, keepdim=True).expand_as(scores) if self.score == "attention, by layer" else scores


def dropped_by_head(seen: Observed, settling: Settling, choice: SlotChoice, numbers: Tensor) -> Tensor:
    """int64 [layers, kv_heads, A], as Policy.dropped_at, where each head keeps `numbers` [layers, kv_heads] of a
    chunk's tokens."""
    length = len(seen.surprise)
    dropped = torch.full((*numbers.shape, length), length, dtype=torch.int64, device=seen.device)
    for place, first in settling.places(length):
        _lose_first(dropped, settling, place, first)
        held, positions = seen.chunk(first, first + settling.chunk)
        stay = choice.stay(held, positions, numbers).transpose(1, 2)
        dropped[..., first : first + settling.chunk] = torch.where(stay, length, place)
    return dropped


def _far(seen: Observed, place: int, first: int, end: int) -> Tensor:
    """bool [place - first, end - first]: whether an answer token is far enough behind another that it pays attention
    to."""
    queries, keys = (torch.arange(first, last, device=seen.device) for last in (place, end))
    return queries[:, None] >= keys + NEAREST


def _lose_first(dropped: Tensor, settling: Settling, place: int, first: int) -> None:
    """At an answer's limit its next chunk takes the slots of the chunk that settled first."""
    if first // settling.chunk < settling.most_chunks:
        return
    lost = first - int(settling.most_chunks) * settling.chunk
    here, length = dropped[..., lost : lost + settling.chunk], dropped.shape[-1]
    here[here == length] = place
