"""Random scripted answers, and what a client must see of them, worked out without groups, slots or streaming."""

from __future__ import annotations

import random
from dataclasses import dataclass

from fakes import BOS, EOS, PAD
from hamburger.engine.types.messages import FinishReason
from hamburger.engine.types.sampling_params import SamplingParams

CONTEXT = 256
CHARACTERS = "aab bcé→漢😀"
STOPS = ("a", "ab", "aab", "b b", "é", "→漢", "😀", "漢a", "c\n", "bcbcb")


@dataclass(frozen=True, slots=True)
class Case:
    """One request: its prompt, its params, and the groups that the model emits untrimmed."""

    prompt_ids: list[int]
    params: SamplingParams
    groups: list[list[int]]


@dataclass(frozen=True, slots=True)
class Expected:
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None


def random_case(draw: random.Random) -> Case:
    """Text with multi-byte characters and special tokens, cut into groups anywhere, long enough to reach max_tokens."""
    max_tokens = draw.randint(1, 40)
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        kind = draw.random()
        tokens += [EOS] if kind < 0.04 else [PAD] if kind < 0.06 else draw.choice(CHARACTERS).encode()
    groups: list[list[int]] = []
    while tokens:
        size = draw.randint(1, 4)
        groups.append(tokens[:size])
        tokens = tokens[size:]
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw.choice([0, 0, 0, draw.randint(0, max_tokens)]),
        stop=tuple(draw.sample(STOPS, draw.randint(0, 3))),
        stop_token_ids=tuple(draw.sample([0x20, 0x62, 0xA9, PAD], draw.choice([0, 0, 1]))),
        ignore_eos=draw.random() < 0.3,
        logprobs=draw.choice([None, 0, 2]),
    )
    return Case([BOS, *draw.choices(range(97, 123), k=draw.randint(0, 9))], params, groups)


def expected(case: Case) -> Expected:
    """Walk the flat tokens until one ends the answer. All text here is whole characters, one completed at a time."""
    params = case.params
    data, text = b"", ""
    token_ids: list[int] = []
    for token_id in (token_id for group in case.groups for token_id in group):
        token_ids.append(token_id)
        may_end = len(token_ids) > params.min_tokens
        # A token that ends the answer is none of its text.
        if may_end and token_id == EOS and not params.ignore_eos:
            return Expected(token_ids, data.decode(errors="replace"), "stop", None)
        if may_end and token_id in params.stop_token_ids:
            return Expected(token_ids, data.decode(errors="replace"), "stop", token_id)
        data += bytes([token_id]) if token_id < BOS else b""
        before, text = text, data.decode(errors="ignore")
        found = [stop for stop in params.stop if text != before and text.endswith(stop)]
        if may_end and found:
            stop = max(found, key=len)
            return Expected(token_ids, text.removesuffix(stop), "stop", stop)
        if len(token_ids) == params.max_tokens:
            return Expected(token_ids, data.decode(errors="replace"), "length", None)
    raise ValueError("the script ended before the answer")
