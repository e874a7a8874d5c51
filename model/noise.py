"""Noise of sampled tokens: a Gumbel number for each token at each place of an answer, a function of its seed alone.

A row draws the token whose logit and noise add up to the most, which is a draw from the softmax of its logits (Gumbel
1954; Maddison et al. 2014). So neither batch-mates nor replays shift it, rounding moves a draw only where two sums are
nearly tied, and whoever finds the same tokens likely draws the same: micro-steps draft with the trunk's noise.
kernels/graft/draw.h holds the same numbers; a test compares the two.
"""

from __future__ import annotations

from torch import Tensor


def noise_keys(seed: Tensor, index: Tensor) -> Tensor:
    """int64, of (seed, output token index), both int64 of one shape: SplitMix64 (Steele et al. 2014) of both."""
    return _mix(_mix(seed) + index * _GOLDEN)


def noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """float64 [R, L], Gumbel(0, 1): of tokens int64 [R, L], or [L] for all rows, at places of keys int64 [R]."""
    uniform = _random_bits(keys[:, None], token_ids).double().mul_(2.0**-32).add_(0.5 + 2.0**-33)
    return uniform.log_().neg_().log_().neg_()


def chance_with_noise(chances: Tensor, noise: Tensor) -> Tensor:
    """How likely a token is drawn by who finds nearly such probabilities as it has, where its own noise is known.

    chances: its probabilities; noise: of the same shape. Log-odds are linear in logit(chance) + noise, which says how
    far ahead of all others it is; fitted to drafts of the embedded default at temperatures 0.7 and 1 (docs/log.md).
    """
    return (0.6 * (chances.clamp(max=0.9999999).logit() + noise.to(chances.dtype)) - 1.15).sigmoid()


def _random_bits(keys: Tensor, token_ids: Tensor) -> Tensor:
    """int32 of all values: two rounds of a 32-bit mixer (its constants: Wellons 2018), a half of the key in each."""
    x = token_ids.int() * (0x9E3779B1 - 2**32) + keys.int()
    x ^= x >> 16 & 2**16 - 1
    x *= 0x7FEB352D
    x ^= x >> 15 & 2**17 - 1
    x ^= (keys >> 32).int()
    x *= 0x846CA68B - 2**32
    x ^= x >> 16 & 2**16 - 1
    return x


_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # integers wrap, as SplitMix64 asks


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 (the shifts are made logical by masking)."""
    z = z + _GOLDEN
    z = (z ^ (z >> 30 & (2**34 - 1))) * (0xBF58476D1CE4E5B9 - 2**64)
    z = (z ^ (z >> 27 & (2**37 - 1))) * (0x94D049BB133111EB - 2**64)
    return z ^ (z >> 31 & (2**33 - 1))
