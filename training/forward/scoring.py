"""What the base model thinks of given texts: log-probability, entropy and likeliest rivals of every token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hamburger.model.checkpoints.sources import resolve_source
from hamburger.model.modules.hamburger import HamburgerModel
from hamburger.training.errors import TrainingError
from hamburger.training.forward.loading import load_model
from hamburger.training.forward.network import Slots, trunk_states

_SLOTS_A_PASS = 2048
_ROWS_A_HEAD = 256  # float32 logits of a 128k vocabulary: 128 MiB


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """The base model's view of n tokens, each given everything before it, on the host.

    logprobs, entropies: float32 [n], nats. top_ids: int32 [n, k] and top_logprobs: float16 [n, k], likeliest first.
    states: bfloat16 [n, F, D], the trunk's feature states that give each token; F is 0 unless they were asked for.
    """

    logprobs: Tensor
    entropies: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    states: Tensor


class _Pending(NamedTuple):
    number: int
    token_ids: Sequence[int]
    start: int


class Scorer:
    """Scores texts under a model's trunk, teacher forced, one slot a token: the ordinary causal language model."""

    def __init__(self, model: HamburgerModel, max_length: int) -> None:
        """max_length: the longest sequence in tokens; the model has tables for as many positions."""
        self.model = model
        self.max_length = max_length

    @classmethod
    def load(
        cls,
        model: str | None = None,
        base: str | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        on_progress: Callable[[str], None] = lambda line: None,
    ) -> Scorer:
        """Load any checkpoint's trunk; None is the embedded base. Raises CheckpointError or ConfigError."""
        built = load_model(
            resolve_source(model, base), device=device, dtype=dtype, packed=True, on_progress=on_progress
        )
        return cls(built, built.config.trunk.fixed_context_tokens)

    def score(
        self,
        sequences: Sequence[Sequence[int]],
        starts: Sequence[int],
        top_k: int = 0,
        state_layers: tuple[int, ...] = (),
    ) -> list[TokenScores]:
        """Scores of the tokens from starts[i] to the end of each sequence; starts[i] is at least 1.

        state_layers: the trunk layers, ascending, whose states are kept (GraftConfig.feature_layers).
        Raises TrainingError for a sequence that is longer than the model's context, and a start out of range.
        """
        for i, (ids, start) in enumerate(zip(sequences, starts, strict=True)):
            if not 1 <= start <= len(ids):
                raise TrainingError(f"sequence {i}: start is {start}; it must be in 1..{len(ids)}, its length.")
            if len(ids) > self.max_length:
                raise TrainingError(
                    f"sequence {i} has {len(ids)} tokens, more than the model's {self.max_length}: shorten it."
                )
        scored: dict[int, TokenScores] = {}
        for pack in _packs(sequences, starts):
            scored |= self._score_pack(pack, top_k, state_layers)
        return [scored[i] if i in scored else self._nothing(top_k, len(state_layers)) for i in range(len(sequences))]

    def _nothing(self, top_k: int, layers: int) -> TokenScores:
        none, top = torch.zeros(0), torch.zeros(0, top_k)
        states = torch.zeros(0, layers, self.model.config.trunk.hidden_size, dtype=torch.bfloat16)
        return TokenScores(none, none, top.int(), top.half(), states)

    @torch.inference_mode()
    def _score_pack(self, pack: list[_Pending], top_k: int, state_layers: tuple[int, ...]) -> dict[int, TokenScores]:
        device = self.model.embed_tokens.weight.device
        # The last token's state would only predict what is not there.
        flat = [i for p in pack for i in p.token_ids[:-1]]
        rows = [r for p, at in zip(pack, _offsets(pack), strict=True) for r in range(at + p.start - 1, at + _slots(p))]
        targets = torch.tensor([i for p in pack for i in p.token_ids[p.start :]], dtype=torch.int64, device=device)
        slots = Slots(
            torch.tensor(flat)[:, None],
            torch.ones(len(flat), dtype=torch.int64),
            torch.cat([torch.arange(_slots(p)) for p in pack]),
            [_slots(p) for p in pack],
        ).to(device)
        hidden, features = trunk_states(self.model, slots, state_layers)
        at = torch.tensor(rows, dtype=torch.int64, device=device)
        states = hidden[at]
        parts = [
            _score_rows(F.linear(s, self.model.head_weight), t, top_k)
            for s, t in zip(states.split(_ROWS_A_HEAD), targets.split(_ROWS_A_HEAD), strict=True)
        ]
        columns = [torch.cat(c).cpu() for c in zip(*parts, strict=True)] + [features[at].bfloat16().cpu()]
        split = [c.split([len(p.token_ids) - p.start for p in pack]) for c in columns]
        return {p.number: TokenScores(*(c[i] for c in split)) for i, p in enumerate(pack)}


def _score_rows(logits: Tensor, targets: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logprobs = logits.float().log_softmax(-1)
    # exp(-inf) * -inf is not a number where a logit is forbidden outright.
    entropies = -(logprobs.exp() * logprobs.clamp(min=torch.finfo(torch.float32).min)).sum(-1)
    top, ids = logprobs.topk(top_k, dim=-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], entropies, ids.int(), top.half()


def _packs(sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> Iterator[list[_Pending]]:
    """Sequences with something to score, by descending length, in packs of at most _SLOTS_A_PASS slots (or one)."""
    todo = [_Pending(i, ids, start) for i, (ids, start) in enumerate(zip(sequences, starts, strict=True))]
    pack: list[_Pending] = []
    for pending in sorted((p for p in todo if len(p.token_ids) > 1), key=lambda p: -len(p.token_ids)):
        if pack and sum(map(_slots, pack)) + _slots(pending) > _SLOTS_A_PASS:
            yield pack
            pack = []
        pack.append(pending)
    if pack:
        yield pack


def _slots(pending: _Pending) -> int:
    return len(pending.token_ids) - 1


def _offsets(pack: list[_Pending]) -> list[int]:
    offsets = [0]
    for pending in pack[:-1]:
        offsets.append(offsets[-1] + _slots(pending))
    return offsets
