"""NarrowingEmission: groups token by token, computing only for the rows that go on. The plain reference of emission.

Composed groups: every token is emitted. Verified groups: the first is the trunk's own, of each row; then the row of
each sequence up to which its drafts were confirmed goes on, drafting what comes next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from hamburger.model.backend import Backend
from hamburger.model.batch import ForwardBatch, StepOutput, stop_probability
from hamburger.model.emission.emission import GoOn, drafts_go_on, last_confirmed
from hamburger.model.emission.groups import GrowingGroups
from hamburger.model.group_cache import GroupCache
from hamburger.model.sampler import Choice, Draw, GroupSampler, LogprobsOf, token_logprobs


class Choices(Protocol):
    """Chooses the tokens of one batch by its rows' states.

    logits: [R, V], those that the last tokens were chosen by; None where nobody asks for them.
    """

    logits: Tensor | None

    def choose(self, states: Tensor, rows: Tensor, index: int) -> Choice:
        """Token `index` of the groups of rows int64 [R], ascending, by states [R, D]."""

    def micro_state(self, tokens: Tensor, cache: GroupCache) -> Tensor:
        """Backend.micro_step's."""


# From a batch and its groups as they grow, int64 [M, G]; None for a batch that they do not take.
BeginChoices = Callable[[ForwardBatch, Tensor], Choices | None]


class LogitChoices:
    """GroupSampler's, by a backend's logits: for every batch."""

    def __init__(self, backend: Backend, sampler: GroupSampler, *, is_verified: bool) -> None:
        self._backend, self._sampler, self._is_verified = backend, sampler, is_verified
        self._of_micro_step: Tensor | None = None
        self.logits: Tensor | None = None

    def choose(self, states: Tensor, rows: Tensor, index: int) -> Choice:
        logits, self._of_micro_step = self._of_micro_step, None
        self.logits = self._backend.head(states) if logits is None else logits
        return self._sampler.choose(self.logits, rows, index, is_draft=index > 0 and self._is_verified)

    def micro_state(self, tokens: Tensor, cache: GroupCache) -> Tensor:
        state, self._of_micro_step = self._backend.micro_step(tokens, cache)
        return state


class NarrowingEmission:
    """Takes every batch, with grammars too."""

    def __init__(
        self,
        backend: Backend,
        draw: Draw | None = None,
        by_states: BeginChoices | None = None,
        logprobs_of: LogprobsOf = token_logprobs,
    ) -> None:
        """draw, logprobs_of: what sampler.sample and token_logprobs do, in another way. by_states: chooses the same, in
        another way."""
        self._backend, self._draw, self._by_states, self._logprobs_of = backend, draw, by_states, logprobs_of

    def takes(self, batch: ForwardBatch) -> bool:
        return True

    def emit(
        self, states: Tensor, features: list[Tensor], batch: ForwardBatch, only: Tensor | None = None
    ) -> StepOutput:
        """only: int64 [R], ascending, the rows that emit; the others' groups are empty. None for all."""
        backend, sampling = self._backend, batch.sampling
        m, width, device = states.shape[0], batch.max_group_limit, states.device
        group = GrowingGroups(m, width, sampling.max_logprobs, device, self._logprobs_of)
        if not m:
            return group.output()
        choices = None if self._by_states is None else self._by_states(batch, group.token_ids)
        if choices is None:
            sampler = GroupSampler(sampling, self._draw)
            choices = LogitChoices(backend, sampler, is_verified=batch.checks is not None)
        go_on = GoOn(batch.confidence, batch.group_limits, sampling.end_ids) if batch.checks is None else None
        rows = torch.arange(m, device=device) if only is None else only
        state, cache = states if only is None else states[only], None
        for index in range(width):
            is_draft = index > 0 and batch.checks is not None
            choice = choices.choose(state, rows, index)
            logits = choices.logits
            if cache is not None and choice.possible is not None and not choice.possible.all():
                # The short list holds nothing that is allowed: the trunk chooses that token, in the next macro-step.
                keep = choice.possible.nonzero().squeeze(-1)
                if not len(keep):
                    break
                rows, state, cache, choice = rows[keep], state[keep], cache.select(keep), choice.of(keep)
                logits = None if logits is None else logits[keep]
            if go_on is not None:
                stop = backend.stop_logits(state, index)
                ends = stop_probability(stop)
            else:
                ends = 1 - choice.chances if choice.chances is not None else torch.zeros(len(rows), device=device)
            group.add(rows, index, choice.tokens, ends, logits, (sampling.logprobs[rows] >= 0) & (not is_draft))
            if index + 1 == width:
                break
            if go_on is not None:
                on = go_on.after(index, choice.tokens, choice.likeliest, stop, rows)
            else:
                on = drafts_go_on(group.stop_probs[rows], index, batch.confidence[rows], batch.group_limits[rows])
                if index == 0 and batch.checks is not None:
                    on &= last_confirmed(choice.tokens, batch.checks[rows])
            keep = on.nonzero().squeeze(-1)
            if sampling.constraint is not None and len(keep):
                keep = keep[~sampling.constraint.advance(rows[keep], choice.tokens[keep])]
            if not len(keep):
                break
            rows, tokens = rows[keep], choice.tokens[keep]
            if cache is None:
                cache = backend.begin_group(torch.stack(features, dim=1)[rows], rows)
            elif len(keep) < len(on):
                cache = cache.select(keep)
            state = choices.micro_state(tokens, cache)
        return group.output()
