"""What a request asks of the sampler, validated once. No torch, no HTTP."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any

from hamburger.engine.types.errors import InvalidRequest, cut, shown

MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1
# Lowest and highest value, both allowed; None is not checked.
RANGES: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "n": (1, 2**14),
        "min_tokens": (0, math.inf),
        "temperature": (0, 100),
        "top_k": (0, math.inf),
        "min_p": (0, 1),
        "seed": (0, MAX_SEED),
        "presence_penalty": (-2, 2),
        "frequency_penalty": (-2, 2),
        "repetition_penalty": (1e-3, 1e3),  # beyond that float32 logits overflow
        "logprobs": (0, MAX_LOGPROBS),
        "prompt_logprobs": (0, MAX_LOGPROBS),
        "confidence": (0, 1),
    }
)
_WHOLE = ("n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs")
_NUMBERS = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "confidence"
)  # fmt: skip
_TOKEN_IDS = "a list of token ids"
_FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "settle")
_IDS = ("stop_token_ids", "allowed_token_ids", "prediction_ids")
_OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs", "confidence", "settle")  # they may be None


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Most tokens that a model writes for itself: behind `begin`, or from the answer's first token on where that is
    None, and before `end`, which it must write then. Token ids of its markers."""

    tokens: int
    begin: int | None
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one answer is generated. Every limit counts tokens, never slots.

    n: answers to the prompt, from LLM. To the engine each is a request of its own, with one of each_choice.
    max_tokens: most tokens to generate; None means as many as the context leaves, 0 is for prompt_logprobs alone.
    min_tokens: no end token, stop token or stop string ends the answer before this many tokens.
    temperature: 0 is greedy, whatever top_p, top_k and min_p say.
    top_k: 0 means off, as -1 does. top_p in (0, 1], min_p in [0, 1].
    seed: in [0, 2**63); None, or -1, draws a fresh one for each request. Noise is keyed by (seed, output token index).
    presence_penalty, frequency_penalty: in [-2, 2], over generated tokens, as OpenAI defines them.
    repetition_penalty: in [0.001, 1000], over prompt and generated tokens (CTRL, arXiv 1909.05858).
    logit_bias: token id -> value in [-100, 100] added to its logit.
    logprobs: None for none; k >= 0 gives the chosen token's log-probability and the k likeliest tokens'
        (of the model's own distribution, before temperature, penalties and filters).
    prompt_logprobs: the same for each token of the prompt but the first, from the trunk over single tokens.
    stop: strings that end the answer; the text ends before the earliest-completing one.
    include_stop_str_in_output: the text ends behind that string instead.
    stop_token_ids: tokens that end the answer, beside the model's end tokens.
    allowed_token_ids: all that the answer may be made of; empty for all tokens. An end token ends it if it is one.
    bad_words: token ids, each word's at least one, that must not come one after the other.
    thinking: how long it may think; None: as long as it likes.
    ignore_eos: the model's end tokens are ordinary tokens.
    grammar: what the answer must look like as a whole, as engine/grammar/writing.py writes it; None for any text.
    confidence: in [0, 1]; None takes the server's default. Of composed groups, how sure a further token must be; of
        verified groups, the least chance to be accepted at which a draft is made. 1 runs no micro-step.
    settle: whether old tokens of the answer give slots back; None takes the server's default.
    prediction_ids: tokens of a text that the answer is expected to follow, which verified groups then draft from.

    Raises InvalidRequest that names the field when a value is of another type, or out of range.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    thinking: ThinkingBudget | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    grammar: str | None = None
    confidence: float | None = None
    settle: bool | None = None
    prediction_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # Many write a list, one text or None, as vLLM takes them.
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        object.__setattr__(self, "stop", _all("stop", stop, str, "a string or a list of strings"))
        self._check_types()
        for name, off in (("top_k", 0), ("seed", None)):  # as vLLM has it
            if getattr(self, name) == -1:
                object.__setattr__(self, name, off)
        if self.max_tokens is not None:
            least = 1 if self.prompt_logprobs is None else 0
            _in_range("max_tokens", self.max_tokens, least, math.inf, ", or left out for all that fits")
            # Of 4,300 digits Python reads a number, but does not write one that is greater.
            _in_range("max_tokens", self.max_tokens, least, 2**63 - 1)
        for name, (low, high) in RANGES.items():
            if (value := getattr(self, name)) is not None:
                _in_range(name, value, low, high)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, but max_tokens is {self.max_tokens}: lower min_tokens.", "min_tokens"
            )
        if not 0 < self.top_p <= 1:
            raise InvalidRequest(f"top_p is {self.top_p}: it must be in (0, 1].", "top_p")
        for token_id, bias in self.logit_bias.items():
            if token_id < 0 or not -100 <= bias <= 100:
                raise InvalidRequest(
                    f"logit_bias[{token_id}] is {bias}: keys are token ids, values lie in [-100, 100].", "logit_bias"
                )
        if any(not s for s in self.stop):
            raise InvalidRequest("stop holds an empty string: remove it.", "stop")
        if any(not word for word in self.bad_words):
            raise InvalidRequest("bad_words holds an empty word: remove it.", "bad_words")
        if any(t < 0 for t in self.stop_token_ids):
            raise InvalidRequest("stop_token_ids holds a negative id.", "stop_token_ids")
        if self.grammar is not None and self.min_tokens:
            raise InvalidRequest("min_tokens does not go with a grammar, which ends the answer itself.", "min_tokens")

    def _check_types(self) -> None:
        """What type checkers see, told to those who use none; lists become tuples."""
        for names, kind, wanted in (
            (_WHOLE, Integral, "a whole number"),
            (_NUMBERS, Real, "a number"),
            (_FLAGS, bool, "True or False"),
        ):
            for name in names:
                value = getattr(self, name)
                is_wrong = not isinstance(value, kind) or (kind is not bool and isinstance(value, bool))
                if is_wrong and not (value is None and name in _OPTIONAL):
                    raise InvalidRequest(f"{name} is {shown(value)}: it must be {wanted}.", name)
        for name in _IDS:
            object.__setattr__(self, name, _all(name, getattr(self, name), Integral, _TOKEN_IDS))
        wanted = f"a list with {_TOKEN_IDS} for each word"
        words = _all("bad_words", self.bad_words, Iterable, wanted)
        object.__setattr__(self, "bad_words", tuple(_all("bad_words", word, Integral, wanted) for word in words))
        bias = self.logit_bias
        if not isinstance(bias, Mapping) or not _are(Integral, bias) or not _are(Real, bias.values()):
            raise InvalidRequest(f"logit_bias is {shown(bias)}: it must map token ids to numbers.", "logit_bias")
        if self.thinking is not None and not isinstance(self.thinking, ThinkingBudget):
            raise InvalidRequest(f"thinking is {shown(self.thinking)}: it must be a ThinkingBudget.", "thinking")
        if self.grammar is not None and not isinstance(self.grammar, str):
            raise InvalidRequest(f"grammar is {shown(self.grammar)}: it must be a string.", "grammar")

    def each_choice(self, number: int) -> list[SamplingParams]:
        """For each of `number` answers to one prompt: answer i's seed is `seed + i`, so that they differ."""
        if self.seed is None or number == 1:
            return [self] * number
        return [replace(self, seed=(self.seed + i) % (MAX_SEED + 1)) for i in range(number)]

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that came already change what comes next."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


def _all(name: str, values: Any, kind: type, wanted: str) -> tuple[Any, ...]:
    """The values of a field, all of one type. Raises InvalidRequest unless they are."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise InvalidRequest(f"{name} is {shown(values)}: it must be {wanted}.", name)
    held = tuple(values)
    if not _are(kind, held):
        wrong = next(value for value in held if not isinstance(value, kind) or isinstance(value, bool))
        raise InvalidRequest(f"{name} holds {shown(wrong)}: it must be {wanted}.", name)
    return held


def _are(kind: type, values: Iterable[Any]) -> bool:
    """Whether all are of this kind, and no bool. By their types, which are few, as values may be many thousand."""
    return all(issubclass(found, kind) and found is not bool for found in {*map(type, values)})


def _in_range(name: str, value: float, low: float, high: float, remedy: str = "") -> None:
    """Raise InvalidRequest unless low <= value <= high (a NaN is outside)."""
    if not low <= value <= high:
        bounds = f"at least {low:g}" if high == math.inf else f"in [{low:g}, {high:g}]"
        raise InvalidRequest(f"{name} is {cut(str(value))}: it must be {bounds}{remedy}.", name)
