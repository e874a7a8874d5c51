"""What every family retells with: tensors that are multiplied, cut apart or put in another order, lazily."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hamburger.model.checkpoints.config.values import positive
from hamburger.model.checkpoints.sources import CheckpointError

if TYPE_CHECKING:  # the HTTP process asks what is supported, and has no torch
    from torch import Tensor

    from hamburger.model.checkpoints.lazy_tensors import Lazy

# Linears that are joined -> which they are, and their rows, in order.
Joined = Mapping[str, Sequence[tuple[str, int]]]


def entries_of(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor | Lazy]:
    """As in lazy_tensors.py, which needs torch."""
    from hamburger.model.checkpoints.lazy_tensors import entries_of

    return entries_of(tensors)


def lazy(entries: Mapping[str, Tensor | Lazy]) -> Mapping[str, Tensor]:
    """As LazyTensors."""
    from hamburger.model.checkpoints.lazy_tensors import LazyTensors

    return LazyTensors(entries)


def check_tied_head(tensors: Mapping[str, Tensor], where: str) -> None:
    """Raises CheckpointError for a head of its own where the configuration ties it to the embedding."""
    import torch

    head = tensors["lm_head.weight"]
    if not torch.equal(head, tensors.get("model.embed_tokens.weight", head)):
        raise CheckpointError(
            f"{where}: lm_head.weight differs from the embedding although the config ties them: set "
            "tie_word_embeddings to false in config.json."
        )


def without_tied_head(tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor | Lazy]:
    """It is the embedding once more, before that is multiplied. Raises CheckpointError where it is not."""
    found = dict(entries_of(tensors))
    if found.pop("lm_head.weight", None) is not None:
        check_tied_head(tensors, where)
    return found


def multiplied(tensors: Mapping[str, Tensor], name: str, factor: float, plus: float = 0.0) -> Lazy:
    """(tensor + plus) * factor in float32, when it is asked for."""
    import torch

    from hamburger.model.checkpoints.lazy_tensors import Lazy

    shape = tuple(entries_of(tensors)[name].shape)
    return Lazy(shape, torch.float32, lambda: (tensors[name].float() + plus) * factor)


def check_unsaid(config: Mapping[str, Any], fields: Iterable[str], where: str) -> Mapping[str, Any]:
    """The configuration as it is. Raises CheckpointError for one that says any of these: nobody computes it here."""
    for field in fields:
        if config.get(field):
            raise CheckpointError(f"{where}: {field} is {config[field]!r}, which is not supported.")
    return config


def head_dim_of(config: Mapping[str, Any], default: int | None = None) -> int:
    """default: where nothing says it; None: hidden_size over heads."""
    return int(config.get("head_dim") or default or config["hidden_size"] // config["num_attention_heads"])


def kv_heads_of(config: Mapping[str, Any]) -> int:
    """As many as heads where nothing says it."""
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def rotary_dim_of(config: Mapping[str, Any], head_dim: int, where: str, default: float = 1.0) -> int | None:
    """Numbers of a head that turn, the first ones; None: all. default: their part of it. Raises CheckpointError."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    said = {**config, **rope} if isinstance(rope, Mapping) else config
    part = positive(said, "partial_rotary_factor", where, default)
    return None if part == 1 else int(head_dim * part)


def rope_of_part(config: Mapping[str, Any], rotary_dim: int | None) -> dict[str, Any]:
    """What says that so many numbers of a head turn, in our own word, and no other."""
    changes: dict[str, Any] = {"rotary_dim": rotary_dim, "partial_rotary_factor": None}
    for field in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := config.get(field), Mapping):
            changes[field] = {**rope, "partial_rotary_factor": None}
    return changes


def in_halves(heads: int, head_dim: int, rotary_dim: int | None, *, in_pairs: bool = False) -> list[int]:
    """Rows of so many heads of which the first rotary_dim numbers turn (None: all), in the order of a Llama: each with
    the one half a head behind. Queries and keys alike, so that their products stay.

    in_pairs: they turn with the next one, else with the one rotary_dim / 2 behind.
    """
    turn = head_dim if rotary_dim is None else rotary_dim
    turned, still = turn // 2, (head_dim - turn) // 2
    firsts = range(0, turn, 2) if in_pairs else range(turned)
    seconds = range(1, turn, 2) if in_pairs else range(turned, turn)
    one = [*firsts, *range(turn, turn + still), *seconds, *range(turn + still, head_dim)]
    return [head * head_dim + at for head in range(heads) for at in one]


def orders_of(config: Mapping[str, Any], head_dim: int, rotary_dim: int | None, *, in_pairs: bool) -> dict[str, Any]:
    """in_halves of queries and of keys, by their linear's name."""
    number = {"self_attn.q_proj": int(config["num_attention_heads"]), "self_attn.k_proj": kv_heads_of(config)}
    return {linear: in_halves(heads, head_dim, rotary_dim, in_pairs=in_pairs) for linear, heads in number.items()}


def cut(tensors: Mapping[str, Tensor], joined: Joined, orders: Mapping[str, list[int]]) -> Mapping[str, Tensor]:
    """joined linears cut apart, and the rows of others in another order; orders: by the name that they have then.

    Raises ValueError for another number of rows.
    """
    from hamburger.model.checkpoints.lazy_tensors import Lazy

    found: dict[str, Tensor | Lazy] = {}
    for name, entry in entries_of(tensors).items():
        *layer, block, linear, end = ["", "", *name.split(".")]
        own = f"{block}.{linear}"
        parts = joined.get(own) or ([(own, len(orders[own]))] if own in orders else [])
        if not parts:
            found[name] = entry
            continue
        if entry.shape[0] != sum(rows for _, rows in parts):
            raise ValueError(f"{name} has {entry.shape[0]} rows")
        first = 0
        for part, rows in parts:
            make = partial(_rows, tensors, name, first, rows, orders.get(part))
            found[".".join([*layer[2:], part, end])] = Lazy((rows, *entry.shape[1:]), entry.dtype, make)
            first += rows
    return lazy(found)


def _rows(tensors: Mapping[str, Tensor], name: str, first: int, number: int, order: list[int] | None) -> Tensor:
    rows = tensors[name].narrow(0, first, number)
    return rows if order is None else rows[order]
