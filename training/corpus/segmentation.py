"""Entropies of an answer's tokens -> groups: which tokens share a slot. Pure: no tensors, no files."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from hamburger.training.errors import TrainingError

Strategy = Literal["decreasing_v2", "decreasing", "sliding", "small_group"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

# The likeliest token's probability at which `sliding` and `small_group` draw their lines.
_SLIDING_TOP, _SMALL_GROUP_TOP = 0.7, 0.95


def segment(
    entropies: Sequence[float],
    strategy: Strategy = "decreasing_v2",
    max_group: int = 4,
    ratio: float = 0.3,
    floor: float = 0.05,
    vocab_size: int = 128256,
) -> list[int]:
    """The sizes of the groups of one answer: each in 1..max_group, together as many as there are entropies.

    entropies: of each token, in nats, given everything before it.
    strategy: when a token joins the open group, as long as that has fewer than max_group tokens:
        decreasing      its entropy is below `ratio` times the highest one in the group so far;
        decreasing_v2   the same, or its entropy is below `floor` (the published recipe);
        sliding         its entropy is below that of 'one token has 0.7, the rest is uniform' over vocab_size tokens;
        small_group     its entropy and those in the group are not above that of 'one token has 0.95'.
    Raises TrainingError for settings that have no meaning and for entropies that are not finite.
    """
    check_settings(strategy, max_group, ratio, floor)
    if not all(map(math.isfinite, entropies)):
        raise TrainingError("an entropy is not finite: the model that scored the answer is broken.")
    joins = _rule(strategy, ratio, floor, vocab_size)
    sizes: list[int] = []
    highest = 0.0
    for entropy in entropies:
        if sizes and sizes[-1] < max_group and joins(entropy, highest):
            sizes[-1] += 1
            highest = max(highest, entropy)
        else:
            sizes.append(1)
            highest = entropy
    return sizes


def check_settings(strategy: str, max_group: int, ratio: float, floor: float) -> None:
    """Raise TrainingError, which names the field, unless `segment` can work with these."""
    if strategy not in STRATEGIES:
        raise TrainingError(f"strategy is {strategy!r}: use one of {', '.join(STRATEGIES)}.")
    if not 1 <= max_group <= 255:
        raise TrainingError(f"max_group is {max_group}: it must be in 1..255.")
    if not 0 <= ratio <= 1:  # above 1 a token would join whatever came before it
        raise TrainingError(f"ratio is {ratio}: it must be in [0, 1].")
    if not 0 <= floor < math.inf:
        raise TrainingError(f"floor is {floor}: it must be a number of nats from 0 up.")


def peak_entropy(top: float, vocab_size: int) -> float:
    """The entropy in nats where one token has probability `top` and the other vocab_size - 1 share the rest."""
    if vocab_size < 2:
        raise TrainingError(f"vocab_size is {vocab_size}: it must be at least 2.")
    return -top * math.log(top) - (1 - top) * math.log((1 - top) / (vocab_size - 1))


def _rule(strategy: Strategy, ratio: float, floor: float, vocab_size: int) -> Callable[[float, float], bool]:
    """(a token's entropy, the highest in the open group) -> whether it joins."""
    match strategy:
        case "decreasing":
            return lambda entropy, highest: entropy < ratio * highest
        case "decreasing_v2":
            return lambda entropy, highest: entropy < floor or entropy < ratio * highest
        case "sliding":
            line = peak_entropy(_SLIDING_TOP, vocab_size)
            return lambda entropy, highest: entropy < line
        case "small_group":
            line = peak_entropy(_SMALL_GROUP_TOP, vocab_size)
            return lambda entropy, highest: max(entropy, highest) <= line
