"""StaticEmission: groups in static shapes. Every row goes through every micro-step, masks decide what counts.

Nothing here waits for the device or depends on its values, so a CUDA graph can capture it, and a GPU runs it without a
graph too. It chooses what NarrowingEmission chooses, which spares a CPU the rows that have ended. Grammars are not for
it: their masks are made on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hamburger.model.backend import Backend
from hamburger.model.batch import (
    Adjustments,
    ForwardBatch,
    Logprobs,
    SamplingBatch,
    StepOutput,
    stop_probability,
)
from hamburger.model.emission.emission import GoOn, drafts_go_on
from hamburger.model.noise import noise_keys
from hamburger.model.sampler import (
    SORTED_PREFIX,
    chances_of,
    chances_of_drawn,
    count,
    draw_filtered,
    penalise,
    scores,
    token_logprobs,
    warmed,
)


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """What M rows have emitted so far, overwritten in place; G is the widest group.

    token_ids: int64 [M, G], right-padded with 0. stop_probs: float32 [M, G]. sizes: int64 [M].
    newest: int64 [M], the tokens just chosen; of a row that has ended, some token. going: bool [M], what goes on.
    """

    token_ids: Tensor
    stop_probs: Tensor
    sizes: Tensor
    newest: Tensor
    going: Tensor

    @classmethod
    def empty(cls, rows: int, width: int, device: torch.device) -> Groups:
        return cls(
            token_ids=torch.zeros(rows, width, dtype=torch.int64, device=device),
            stop_probs=torch.zeros(rows, width, device=device),
            sizes=torch.zeros(rows, dtype=torch.int64, device=device),
            newest=torch.zeros(rows, dtype=torch.int64, device=device),
            going=torch.ones(rows, dtype=torch.bool, device=device),
        )

    def first(self, rows: int) -> Groups:
        """Those of the first rows: views."""
        return Groups(
            self.token_ids[:rows], self.stop_probs[:rows], self.sizes[:rows], self.newest[:rows], self.going[:rows]
        )

    def begin(self) -> None:
        """Forget the last macro-step."""
        self.token_ids.zero_()
        self.stop_probs.zero_()
        self.sizes.zero_()
        self.going.fill_(True)


class StaticChoices:
    """Chooses the tokens of M rows' groups and says which go on.

    confidence: float32 [M]. group_limits: int64 [M]. max_logprobs: -1 where no row asks for log-probabilities.
    is_verified: tokens after the first are drafts, of every row: which of them is read, is known only on the host.
    """

    def __init__(
        self,
        groups: Groups,
        sampling: SamplingBatch,
        confidence: Tensor,
        group_limits: Tensor,
        *,
        is_verified: bool = False,
    ) -> None:
        self.groups = groups
        self._is_verified = is_verified
        self.sampling = sampling
        self._confidence = confidence
        self._group_limits = group_limits
        self._penalties = None
        if sampling.adjustments is not None:
            self._penalties = _Penalties(sampling.adjustments, sampling.end_ids)
        self._logprobs: Logprobs | None = None
        if sampling.max_logprobs >= 0:
            chosen = torch.zeros_like(groups.stop_probs)
            top = chosen.new_zeros(*chosen.shape, sampling.max_logprobs)
            self._logprobs = Logprobs(chosen, top.long(), top)

    def take(self, index: int, logits: Tensor, stop: Tensor | None) -> None:
        """Token `index` of every row that goes on, from logits [M, V] (any float dtype) and stop logits float32 [M],
        which verified groups have none of."""
        g, sampling = self.groups, self.sampling
        tokens, likeliest, chances = self._choose(index, logits)
        if stop is not None:
            ends = stop_probability(stop)
        elif chances is not None:
            ends = 1 - chances
        else:
            ends = torch.zeros_like(g.stop_probs[:, 0])
        g.token_ids[:, index] = torch.where(g.going, tokens, 0)
        g.stop_probs[:, index] = torch.where(g.going, ends, 0)
        g.sizes.add_(g.going)
        if self._logprobs is not None and not (self._is_verified and index):
            self._add_logprobs(index, logits, tokens, self._logprobs)
        if stop is None:
            on = drafts_go_on(g.stop_probs, index, self._confidence, self._group_limits)
        else:
            on = GoOn(self._confidence, self._group_limits, sampling.end_ids).after(index, tokens, likeliest, stop)
        g.going.logical_and_(on)
        g.newest.copy_(tokens)

    def output(self) -> StepOutput:
        g = self.groups
        return StepOutput(g.token_ids, g.sizes, g.stop_probs, self._logprobs)

    def _choose(self, index: int, logits: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens int64 [M], whether each is the argmax of the unchanged logits [M, V], and of drafts float32 [M], how
        likely the trunk is to choose the same."""
        sampling = self.sampling
        logits = logits.float()
        tokens = likeliest = logits.argmax(-1)
        if self._penalties is not None:
            logits = self._penalties.apply(logits, sampling.output_index + index)
            tokens = logits.argmax(-1)
        chances = chances_of(logits, tokens) if self._is_verified and index else None
        if sampling.any_sampled:
            hot = sampling.temperature > 0
            temperature = torch.where(hot, sampling.temperature, 1)
            keys = noise_keys(sampling.seed, sampling.output_index + index)
            filters = sampling.top_k, sampling.top_p, sampling.min_p
            any_filtered, is_draft = sampling.any_filtered, chances is not None
            drawn = draw(logits, temperature, *filters, keys, any_filtered=any_filtered, is_draft=is_draft)
            tokens = torch.where(hot, drawn, tokens)
            if chances is not None:
                chances = torch.where(hot, chances_of_drawn(logits, temperature, drawn, keys), chances)
        if self._penalties is not None:
            self._penalties.add(tokens)
        return tokens, tokens == likeliest, chances

    def _add_logprobs(self, index: int, logits: Tensor, tokens: Tensor, into: Logprobs) -> None:
        counts = self.groups.going & (self.sampling.logprobs >= 0)
        found = token_logprobs(logits, tokens, into.top.shape[-1])
        into.chosen[:, index] = torch.where(counts, found.chosen, 0)
        into.top_ids[:, index] = torch.where(counts[:, None], found.top_ids, 0)
        into.top[:, index] = torch.where(counts[:, None], found.top, 0)


class StaticEmission:
    """Takes every batch without a grammar."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def takes(self, batch: ForwardBatch) -> bool:
        return batch.sampling.constraint is None

    def emit(self, states: Tensor, features: list[Tensor], batch: ForwardBatch) -> StepOutput:
        backend, width, is_verified = self._backend, batch.max_group_limit, batch.checks is not None
        groups = Groups.empty(len(states), width, states.device)
        step = StaticChoices(groups, batch.sampling, batch.confidence, batch.group_limits, is_verified=is_verified)
        if not len(states):
            return step.output()
        step.take(0, backend.head(states), None if is_verified else backend.stop_logits(states, 0))
        if width > 1:
            cache = backend.begin_group(torch.stack(features, dim=1))
        for index in range(1, width):
            state, logits = backend.micro_step(groups.newest, cache)
            step.take(index, logits, None if is_verified else backend.stop_logits(state, index))
        return step.output()


class _Penalties:
    """Bans, bias and penalties of the A rows that ask for any; it counts the tokens of their groups."""

    def __init__(self, adjustments: Adjustments, end_ids: Tensor) -> None:
        self._of = adjustments
        self._ends = end_ids.index_select(0, adjustments.row)
        self._output_counts: Tensor | None = None
        self._in_prompt: Tensor | None = None

    def apply(self, logits: Tensor, output_index: Tensor) -> Tensor:
        """logits float32 [M, V], output_index int64 [M] -> the changed logits."""
        a, vocab_size = self._of, logits.shape[1]
        if self._output_counts is None or self._in_prompt is None:
            self._output_counts = count(a.output_ids, vocab_size)
            self._in_prompt = count(a.prompt_ids, vocab_size) > 0
        x = logits.index_select(0, a.row)
        forbidden = (output_index.index_select(0, a.row) < a.min_index)[:, None] & (self._ends >= 0)
        x.scatter_add_(1, self._ends.clamp(min=0), torch.where(forbidden, float("-inf"), 0.0))
        x.index_put_((a.bias_row, a.bias_id), a.bias, accumulate=True)
        if a.any_penalties:
            x = penalise(x, self._output_counts, self._in_prompt, a.presence, a.frequency, a.repetition)
        return logits.index_copy(0, a.row, x)

    def add(self, tokens: Tensor) -> None:
        """Every row M has chosen; those that have ended choose nothing that is read."""
        if self._output_counts is not None:
            chosen = tokens.index_select(0, self._of.row)[:, None]
            self._output_counts.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=torch.float32))


def draw(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    keys: Tensor,
    *,
    any_filtered: bool,
    is_draft: bool = False,
) -> Tensor:
    """As `sampler.sample`, for all rows alike: where any may have a filter all are sorted, for drafts the likeliest
    tokens alone, as others that filters keep are seldom drawn."""
    tokens = scores(logits, temperature, keys, torch.arange(logits.shape[1], device=logits.device)).argmax(-1)
    if not any_filtered:
        return tokens
    if is_draft:
        values, ids = logits.topk(min(SORTED_PREFIX, logits.shape[1]), dim=-1)
    else:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
    lse = warmed(logits, temperature).logsumexp(-1)
    drawn, _ = draw_filtered(values, ids, lse, temperature, top_k, top_p, min_p, keys, whole=True)
    plain = (top_k <= 0) & (top_p >= 1) & (min_p <= 0)
    return torch.where(plain, tokens, drawn)
