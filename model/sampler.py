"""Logits -> tokens, at the trunk's step and at every micro-step alike.

Order, as vLLM's: forbidden end tokens and logit bias, penalties, what a grammar allows, temperature, then min-p, top-k
and top-p. Noise is a function of (seed, output token index, token): model/noise.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hamburger.model.batch import Adjustments, Constraint, Logprobs, SamplingBatch
from hamburger.model.noise import chance_with_noise, noise, noise_keys

# Filters need sorted logits; the 256 likeliest nearly always hold the nucleus. Rows where they do not are sorted whole.
SORTED_PREFIX = 256


Draw = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class LogprobsOf(Protocol):
    """token_logprobs, or what does the same in another way."""

    def __call__(self, logits: Tensor, tokens: Tensor, k: int, *, ranked: bool = False) -> Logprobs: ...


@dataclass(slots=True, eq=False)
class Choice:
    """tokens int64 [R]; likeliest bool [R]: the token is the argmax of the unchanged logits.

    possible: bool [R], False where all that is allowed has a logit of -inf, so that the token is none; None: all True.
    chances: float32 [R], of drafts: how likely the token is among what is allowed.
    """

    tokens: Tensor
    likeliest: Tensor
    possible: Tensor | None = None
    chances: Tensor | None = None

    def of(self, rows: Tensor) -> Choice:
        """Of some rows only, all possible."""
        chances = None if self.chances is None else self.chances[rows]
        return Choice(self.tokens[rows], self.likeliest[rows], None, chances)


class GroupSampler:
    """Chooses the tokens of one macro-step's M groups; remembers what it chose, for the penalties."""

    def __init__(self, params: SamplingBatch, draw: Draw | None = None) -> None:
        """draw: what `sample` does, in another way."""
        self.params = params
        self._draw = draw or sample
        self._chosen: list[tuple[Tensor, Tensor]] = []  # (rows, tokens) of this group so far

    def choose(self, logits: Tensor, rows: Tensor, index: int, *, is_draft: bool = False) -> Choice:
        """logits [R, V] (any float dtype) of rows int64 [R] (ascending), for token `index` of the group.

        is_draft: say also how likely the trunk is to choose the same.
        """
        logits = logits.float()  # argmax of bf16 is several times slower on CPU
        likeliest = logits.argmax(-1)
        choice = Choice(likeliest, torch.ones_like(rows, dtype=torch.bool))
        p = self.params
        if p.adjustments is not None or p.any_sampled or p.constraint is not None:
            choice = self._choose_special(logits, rows, index, likeliest, is_draft=is_draft)
        elif is_draft:
            choice.chances = chances_of(logits, likeliest)
        self._chosen.append((rows, choice.tokens))
        return choice

    def _choose_special(self, logits: Tensor, rows: Tensor, index: int, likeliest: Tensor, *, is_draft: bool) -> Choice:
        p = self.params
        sampled = p.temperature[rows] > 0
        special = sampled.clone()
        if p.adjustments is not None:
            special |= torch.isin(rows, p.adjustments.row)
        if p.constraint is not None:
            special |= torch.isin(rows, p.constraint.rows)
        at = special.nonzero().squeeze(-1)
        if not len(at):
            chances = chances_of(logits, likeliest) if is_draft else None
            return Choice(likeliest, torch.ones_like(special), None, chances)
        picked, of = _select(logits, at), rows[at]
        output_index = p.output_index[of] + index
        if p.adjustments is not None:
            picked = self._adjust(picked, of, output_index, p.adjustments)
        if p.constraint is not None:
            picked = _constrain(picked, of, p.constraint)
        changed = p.adjustments is not None or p.constraint is not None
        chosen = picked.argmax(-1) if changed else likeliest[at]
        chances = None
        if is_draft and changed and len(at) == len(logits):
            chances = chances_of(picked, chosen)
        elif is_draft:
            chances = chances_of(logits, likeliest)
            if changed:
                chances.index_copy_(0, at, chances_of(picked, chosen))
        temperature = p.temperature[of]
        hot = sampled[at].nonzero().squeeze(-1)
        if len(hot):
            of_hot, warm = of[hot], _select(picked, hot)
            keys = noise_keys(p.seed[of_hot], output_index[hot])
            chosen[hot] = self._draw(warm, temperature[hot], p.top_k[of_hot], p.top_p[of_hot], p.min_p[of_hot], keys)
            if chances is not None:
                chances[at[hot]] = chances_of_drawn(warm, temperature[hot], chosen[hot], keys)
        tokens = likeliest.index_copy(0, at, chosen)
        possible = None
        if p.constraint is not None:
            some = picked.gather(1, chosen[:, None]).squeeze(1) > float("-inf")
            possible = torch.ones_like(special).index_copy(0, at, some)
        return Choice(tokens, tokens == likeliest, possible, chances)

    def _adjust(self, logits: Tensor, of: Tensor, output_index: Tensor, a: Adjustments) -> Tensor:
        """Apply bans, bias and penalties to logits [S, V] of batch rows `of` [S]; rows that ask for none stay as is."""
        where = torch.isin(of, a.row).nonzero().squeeze(-1)
        if not len(where):
            return logits
        mine = torch.searchsorted(a.row, of[where])  # index into the A adjusted rows
        x = logits[where]  # a copy
        forbidden = (output_index[where] < a.min_index[mine])[:, None]
        ends = self.params.end_ids[of[where]]
        hit, column = (forbidden & (ends >= 0)).nonzero(as_tuple=True)
        x[hit, ends[hit, column]] = float("-inf")
        if len(a.bias):
            # Rows that still go on are a subset of the adjusted ones.
            row, entry = (a.bias_row == mine[:, None]).nonzero(as_tuple=True)
            x.index_put_((row, a.bias_id[entry]), a.bias[entry], accumulate=True)
        if a.any_penalties:
            self._penalise(x, of[where], mine, a)
        return x if len(x) == len(logits) else logits.index_copy(0, where, x)

    def _penalise(self, x: Tensor, of: Tensor, mine: Tensor, a: Adjustments) -> None:
        """Apply penalties to x [S, V] of batch rows `of` [S], in place: to the tokens that came, which are few."""
        history = [a.output_ids[mine]]
        for rows, tokens in self._chosen:
            history.append(tokens[torch.searchsorted(rows, of)][:, None])
        output, prompt = torch.cat(history, dim=1), a.prompt_ids[mine]
        came = torch.cat((output, prompt), dim=1).clamp(min=0)  # what only fills a row up is as good as any other
        output_counts, prompt_counts = (count(ids, x.shape[1]).gather(1, came) for ids in (output, prompt))
        how = a.presence[mine], a.frequency[mine], a.repetition[mine]
        x.scatter_(1, came, penalise(x.gather(1, came), output_counts, prompt_counts > 0, *how))


def chances_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """The probabilities of tokens int64 [R] under logits float32 [R, V]; 0 where nothing is allowed."""
    of_tokens = logits.gather(1, tokens[:, None]).squeeze(1)
    return (of_tokens - logits.logsumexp(-1)).exp().nan_to_num(0.0)


def chances_of_drawn(logits: Tensor, temperature: Tensor, tokens: Tensor, keys: Tensor) -> Tensor:
    """How likely others who see such logits, float32 [R, V], draw these tokens with the same noise."""
    chances = chances_of(warmed(logits, temperature), tokens)
    return chance_with_noise(chances, noise(keys, tokens[:, None]).squeeze(1))


def warmed(logits: Tensor, temperature: Tensor) -> Tensor:
    """Logits [R, V] over temperatures [R]. The likeliest becomes 0 first, so that none above 0 overflows."""
    return (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]


def scores(logits: Tensor, temperature: Tensor, keys: Tensor, token_ids: Tensor) -> Tensor:
    """float64 [R, L], the largest of which is drawn: of logits [R, L] of tokens int64 [R, L], or [L] for all rows."""
    return noise(keys, token_ids).add_(logits.double().div_(temperature.double()[:, None]))


def _select(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows] for ascending rows; x itself where these are all, as a copy of logits takes longer than what follows."""
    return x if len(rows) == len(x) else x[rows]


def _constrain(logits: Tensor, of: Tensor, constraint: Constraint) -> Tensor:
    """logits [S, V] of batch rows `of` [S], -inf where a row's grammar does not allow a token."""
    where = torch.isin(of, constraint.rows).nonzero().squeeze(-1)
    if not len(where):
        return logits
    allowed = unpacked(constraint.allowed(of[where]), logits.shape[1])
    constrained = _select(logits, where).masked_fill(~allowed, float("-inf"))
    return constrained if len(where) == len(logits) else logits.index_copy(0, where, constrained)


def unpacked(masks: Tensor, vocab_size: int) -> Tensor:
    """What a Constraint allows, int32 [R, *], as bool [R, vocab_size]."""
    bits = masks[:, :, None] >> torch.arange(32, dtype=torch.int32, device=masks.device) & 1
    return bits.flatten(1)[:, :vocab_size].bool()


def penalise(
    logits: Tensor, output_counts: Tensor, in_prompt: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> Tensor:
    """logits [S, N] of N tokens under the penalties, each [S], of which each came output_counts times [S, N] in the
    answer, or is in_prompt (bool [S, N])."""
    seen = (output_counts > 0) | in_prompt
    factor = repetition[:, None]
    x = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
    x -= frequency[:, None] * output_counts
    x -= presence[:, None] * (output_counts > 0)
    return x


def count(ids: Tensor, vocab_size: int) -> Tensor:
    """How often each token occurs in ids [R, L] (padding -1): float32 [R, vocab_size]."""
    counts = torch.zeros(ids.shape[0], vocab_size, device=ids.device)
    return counts.scatter_add_(1, ids.clamp(min=0), (ids >= 0).float())


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: Tensor) -> Tensor:
    """Draw one token a row: of those that its filters keep, the one whose logit and noise add up to the most.

    logits float32 [R, V]; temperature float32 [R], above 0; top_k int64 [R] (0 off), top_p and min_p float32 [R]; keys
    int64 [R], of the noise. Filters as vLLM's: min-p against the likeliest token, then top-k, then top-p of what is
    left. Returns int64 [R]; each row's draw depends on that row alone.
    """
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    plain = (top_k <= 0) & (top_p >= 1) & (min_p <= 0)
    at = plain.nonzero().squeeze(-1)
    if len(at):
        vocabulary = torch.arange(logits.shape[1], device=logits.device)
        tokens[at] = scores(_select(logits, at), temperature[at], keys[at], vocabulary).argmax(-1)
    at = (~plain).nonzero().squeeze(-1)
    if len(at):
        short = min(SORTED_PREFIX, logits.shape[1])
        values, ids = _select(logits, at).topk(short, dim=-1)
        lse = warmed(_select(logits, at), temperature[at]).logsumexp(-1)
        how = temperature[at], top_k[at], top_p[at], min_p[at]
        tokens[at], exact = draw_filtered(values, ids, lse, *how, keys[at], whole=short == logits.shape[1])
        if not exact.all():
            at, lse = at[~exact], lse[~exact]
            values, ids = logits[at].sort(dim=-1, descending=True, stable=True)
            how = temperature[at], top_k[at], top_p[at], min_p[at]
            tokens[at], _ = draw_filtered(values, ids, lse, *how, keys[at], whole=True)
    return tokens


def draw_filtered(
    values: Tensor,
    ids: Tensor,
    lse: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    keys: Tensor,
    *,
    whole: bool,
) -> tuple[Tensor, Tensor]:
    """Filter and draw from descending logits [R, L] of tokens [R, L]. lse [R]: logsumexp of the whole rows, `warmed`.

    Returns tokens int64 [R], and bool [R]: whether these L columns hold all that the filters keep (else it is void).
    """
    probs = (warmed(values, temperature) - lse[:, None]).double().exp()
    columns = torch.arange(values.shape[1], device=values.device)
    k = torch.where(top_k > 0, top_k, torch.iinfo(torch.int64).max)
    probs *= (probs >= min_p[:, None] * probs[:, :1]) & (columns < k[:, None])
    bounded = probs[:, -1] == 0 if not whole else torch.ones_like(lse, dtype=torch.bool)
    # top-p is a share of what min-p and top-k leave: their sum where the columns bound it, else all.
    mass = torch.where(bounded, probs.sum(-1), 1.0)
    before = probs.cumsum(-1) - probs
    # The likeliest stays, however small top_p is in float32.
    probs *= (before < (top_p.double() * mass)[:, None]) | (top_p >= 1)[:, None] | (columns == 0)
    exact = bounded | ((probs[:, -1] == 0) & (top_k <= 0) & (min_p <= 0))
    kept = scores(values, temperature, keys, ids).masked_fill_(probs == 0, float("-inf"))
    return ids.gather(1, kept.argmax(-1, keepdim=True)).squeeze(1), exact


def token_logprobs(logits: Tensor, tokens: Tensor, k: int, *, ranked: bool = False) -> Logprobs:
    """Log-probabilities (nats) of the model's own distribution.

    logits [R, V], tokens int64 [R] -> chosen float32 [R], top ids int64 [R, k], top float32 [R, k]; ranks int64 [R]
    where they are asked for.
    """
    logprobs = logits.float().log_softmax(-1)
    top, ids = logprobs.topk(k, dim=-1)
    of_tokens = tokens[:, None]
    ranks = (logits > logits.gather(1, of_tokens)).sum(1) + 1 if ranked else None
    return Logprobs(logprobs.gather(1, of_tokens).squeeze(1), ids, top, ranks)
