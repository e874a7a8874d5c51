"""One pass over a text in which every token sees all before it: what the choice of slots and the comparison need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from hamburger.engine.types.settling import Settling
from hamburger.model.config import TrunkConfig
from hamburger.model.modules.hamburger import HamburgerModel
from hamburger.model.modules.trunk import run_layers
from hamburger.training.errors import TrainingError

_ROWS_A_HEAD = 256
Watch = Callable[[Tensor, Callable[[Tensor], Tensor], int], None]


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """Of a text of T tokens, of which the last A are the answer.

    heads: of each layer rotated keys and values [T, kv_heads, head_dim]. states: the final normed ones [T, D].
    attention: float32 [A, A], what answer token q paid to answer token j in three layers (middle_layers), all heads
    together. by_head: the same as bfloat16 [layers, kv_heads, A, A], where it was asked for. surprise: float32 [A],
    1 - P of each answer token.
    """

    token_ids: Tensor
    num_prompt: int
    heads: list[tuple[Tensor, Tensor]]
    states: Tensor
    attention: Tensor
    by_head: Tensor | None
    surprise: Tensor

    @property
    def device(self) -> torch.device:
        return self.token_ids.device

    def chunk(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """As SlotChoice takes it, answer tokens first to end - 1: [layers, C, 2, kv_heads, head_dim], and positions."""
        span = slice(self.num_prompt + first, self.num_prompt + end)
        held = torch.stack([torch.stack((k[span], v[span]), dim=1) for k, v in self.heads])
        return held, torch.arange(span.start, span.stop, device=held.device)


def middle_layers(num_layers: int) -> tuple[int, ...]:
    """Three layers spread over the middle of a trunk, which tell as much as all: of 30 layers 8, 15 and 22."""
    return tuple(dict.fromkeys(round(num_layers * share) for share in (0.27, 0.5, 0.74)))


def is_measured(settling: Settling, length: int) -> bool:
    """Whether anything of an answer of so many tokens settles before its last: what it loses shows in those behind."""
    return settling.slots(length - 1) < length - 1


def check_text(trunk: TrunkConfig, place: str, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
    """Raises TrainingError, which names the place, for a text that a model with this trunk cannot read, or of which
    it would let nothing settle."""
    if not prompt_ids:
        raise TrainingError(f"{place}: prompt_ids are empty, so nothing gives the first token: remove the row.")
    length, longest = len(prompt_ids) + len(answer_ids), trunk.fixed_context_tokens
    if length > longest:
        raise TrainingError(
            f"{place} has {len(prompt_ids)} prompt tokens and {len(answer_ids)} of the text, more than the model's "
            f"context of {longest}: lower --max-tokens, or remove it."
        )
    if (beyond := trunk.slides_beyond) is not None and length > beyond:
        when = f"only where prompt and answer have {beyond} tokens at most: lower --max-tokens, or remove it"
        raise TrainingError(
            f"{place}: the model's layers see a sliding window, so its answers settle "
            f"{when if beyond else 'never: there is nothing to fit or to measure'}."
        )
    if (highest := max((*prompt_ids, *answer_ids))) >= trunk.vocab_size:
        raise TrainingError(
            f"{place} has the token id {highest}, but the model's vocabulary is 0..{trunk.vocab_size - 1}: name the "
            "model that wrote it with --model."
        )


@torch.inference_mode()
def observe(
    model: HamburgerModel, prompt_ids: Sequence[int], answer_ids: Sequence[int], *, by_head: bool = False
) -> Observed:
    """The prompt needs at least one token."""
    device = model.embed_tokens.weight.device
    ids = torch.tensor([*prompt_ids, *answer_ids], device=device)
    start, answer = len(prompt_ids), len(answer_ids)
    angles = model.rotary.of_layers(torch.arange(len(ids), device=device))
    heads: list[tuple[Tensor, Tensor]] = []
    attention = torch.zeros(answer, answer, device=device)
    layers = len(model.trunk.layers)
    few = middle_layers(layers)
    of_heads: list[Tensor] = []

    def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads.append((k, v))
        if by_head or index in few:
            paid = _paid(q, k, start)
            if index in few:
                attention.add_(paid.sum(0))
            if by_head:
                of_heads.append(paid.bfloat16())
        return _attended(q, k, v, is_causal=True)

    def layer(index: int, x: Tensor) -> Tensor:
        out: Tensor = model.trunk.layers[index](x, *angles[index], partial(attend, index))
        return out

    x = model.embed_tokens(ids)
    states, _ = run_layers(layers, x, layer, (), lambda x: x, model.trunk.final)
    # The state of the token before gives each.
    nats = token_nats(model, states[start - 1 : -1], ids[start:])
    each = torch.stack(of_heads) if by_head else None
    return Observed(ids, start, heads, states, attention, each, 1 - (-nats).exp())


@torch.inference_mode()
def settled_states(model: HamburgerModel, seen: Observed, dropped_at: Tensor, first: int) -> Tensor:
    """As settled_pass, and nothing more."""
    return settled_pass(model, seen, dropped_at, first)


def settled_pass(
    model: HamburgerModel, seen: Observed, dropped_at: Tensor, first: int, watch: Watch | None = None
) -> Tensor:
    """The final normed states [T - s, D] of the text from answer token `first` (s = num_prompt + first) on, where
    answer token j is seen by those before answer token dropped_at[j] alone. dropped_at: int64 [A], or each layer's and
    KV head's, [layers, kv_heads, A].

    watch: told of each layer what it attended to [T - s, num_heads * head_dim], with gradients from there on, how that
    would be with other dropped_at [kv_heads, A], and its index."""
    start, length = seen.num_prompt + first, len(seen.token_ids)
    place = torch.arange(length, device=dropped_at.device)

    def of_text(dropped: Tensor) -> Tensor:
        return F.pad(dropped + seen.num_prompt, (seen.num_prompt, 0), value=length)

    until = of_text(dropped_at)
    past = place <= place[start:, None]
    heads = [tuple(part.clone() for part in of) for of in seen.heads] if watch else seen.heads  # of no inference mode
    alike = past & (until > place[start:, None]) if until.dim() == 1 else None
    angles = model.rotary.of_layers(place[start:])

    def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (torch.cat((old[:start], new)) for old, new in zip(heads[index], (k, v), strict=True))

        def with_heads(until: Tensor) -> Tensor:
            of_heads = until.repeat_interleave(q.shape[1] // k.shape[1], 0)
            return _attended(q, keys, values, attn_mask=past & (of_heads[:, None] > place[start:, None]))

        attended = with_heads(until[index]) if alike is None else _attended(q, keys, values, attn_mask=alike)
        if watch is not None:
            watch(attended, lambda of: with_heads(of_text(of)), index)
        return attended

    def layer(index: int, x: Tensor) -> Tensor:
        out: Tensor = model.trunk.layers[index](x, *angles[index], partial(attend, index))
        return out

    x = model.embed_tokens(seen.token_ids[start:].clone())
    if watch is not None:
        x = x.detach().requires_grad_()
    states, _ = run_layers(len(model.trunk.layers), x, layer, (), lambda x: x, model.trunk.final)
    return states


def token_nats(model: HamburgerModel, states: Tensor, token_ids: Tensor) -> Tensor:
    """float32 [n]: minus the log-probability of each token after its state."""
    parts = zip(states.split(_ROWS_A_HEAD), token_ids.split(_ROWS_A_HEAD), strict=True)
    return torch.cat(
        [F.cross_entropy(F.linear(s, model.head_weight).float(), ids, reduction="none") for s, ids in parts]
    )


def _attended(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *, is_causal: bool = False) -> Tensor:
    """q [n, num_heads, head_dim], k and v [T, num_kv_heads, head_dim] -> [n, num_heads * head_dim]."""
    shared = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal)
    return out[0].transpose(0, 1).flatten(1)


def _paid(q: Tensor, k: Tensor, start: int) -> Tensor:
    """float32 [kv_heads, A, A]: what the answer's queries pay to its keys in one layer, the query heads of a KV head
    together; head by head, as whole texts of all heads are large."""
    shared = q.shape[1] // k.shape[1]
    queries, length = q[start:].float(), len(k)
    future = torch.arange(length, device=q.device) > torch.arange(start, length, device=q.device)[:, None]
    found = torch.zeros(k.shape[1], length - start, length - start, device=q.device)
    for head in range(q.shape[1]):
        scores = queries[:, head] @ k[:, head // shared].float().T * q.shape[-1] ** -0.5
        found[head // shared] += scores.masked_fill_(future, float("-inf")).softmax(-1)[:, start:]
    return found
