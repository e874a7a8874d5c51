"""Rope scalings: how a model stretches its rotary wavelengths over texts longer than it was trained on. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3RopeScaling:
    """The `llama3` rope scaling of transformers (`rope_type: llama3`): long wavelengths are stretched by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRopeScaling:
    """The `linear` rope scaling: every wavelength is stretched by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicRopeScaling:
    """The `dynamic` rope scaling (NTK-aware): the rotary base grows with a text beyond the pretraining context, which
    is `max_position_embeddings`; texts of up to `factor` times that are served.
    """

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnRopeScaling:
    """The `yarn` rope scaling (arXiv 2309.00071): wavelengths that turn fewer than beta_slow times in the pretraining
    context are stretched by `factor`, those that turn more than beta_fast times kept; cos and sin are multiplied by
    attention_factor.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """The `longrope` rope scaling (arXiv 2402.13753): each wavelength is stretched by a factor of its own, by the short
    ones where no text is longer than the pretraining context, else by the long ones; cos and sin are multiplied by
    attention_factor. transformers chooses anew for each text; here, as in vLLM and llama.cpp, the longest text that is
    served does, as the keys of a text stay as they were turned.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float


def longrope_attention_factor(factor: float, original: int) -> float:
    """What cos and sin are multiplied by where a configuration does not say (arXiv 2402.13753). factor: how many times
    the pretraining context, of `original` tokens, the served one is."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """What cos and sin are multiplied by where a configuration does not say: 0.1 ln(factor) + 1 (arXiv 2309.00071).

    With both given, as transformers reads them: the logarithm weighed by mscale, over the same with mscale_all_dim.
    """

    def of(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    return of(mscale) / of(mscale_all_dim) if mscale and mscale_all_dim else of(1.0)


RopeScaling = Llama3RopeScaling | LinearRopeScaling | DynamicRopeScaling | YarnRopeScaling | LongRopeScaling
