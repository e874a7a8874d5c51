"""GenerationBody: the fields that chat and text completions share, and how they become SamplingParams.

Types are strict (a bool is no int, "1" is no number) and null means the default. Ranges are checked once, by
SamplingParams; a field that is known but not served is known_fields.py's business, any other is ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, WithJsonSchema
from pydantic_core import CoreSchema

from hamburger.engine.sampling_defaults import OPENAI_DEFAULTS, SamplingDefaults
from hamburger.engine.types.errors import InvalidRequest, shown
from hamburger.engine.types.sampling_params import MAX_SEED, RANGES, SamplingParams
from hamburger.server.bodies.answer_format import AnswerFormat
from hamburger.server.schema import ListOf, Schema

MAX_CHOICES = 128
MAX_BIASES = 10_000  # and stop_token_ids
MIN_SEED = -MAX_SEED - 1
_RANGES = {
    **RANGES,
    "n": (1, MAX_CHOICES),
    "seed": (MIN_SEED, MAX_SEED),
    "top_k": (-1, math.inf),
    "top_logprobs": RANGES["logprobs"],
}

_FIELD = re.compile(r"""(?<![\w'"])[a-z_]+(?![\w'"])""")  # a name that is not quoted


def _strings(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _not_too_many(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"it holds {len(value):,} tokens, but at most {MAX_BIASES:,} are allowed")
    return value


Strings = Annotated[
    ListOf[str],
    BeforeValidator(_strings),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]


class StreamOptions(Schema):
    """include_usage: a last chunk with the usage. continuous_usage_stats: the usage so far in every chunk too."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(AnswerFormat):
    """The fields that chat and text completions share; SamplingParams says what they mean."""

    prompt_name: ClassVar[str]

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = Field(None, description="Another name of max_tokens.")
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 or -1 is off.")
    min_p: float | None = None
    n: int | None = None
    seed: int | None = Field(None, description="-1 is none.")
    stop: Strings | None = None
    stop_token_ids: ListOf[int] | None = Field(None, max_length=MAX_BIASES)
    include_stop_str_in_output: bool | None = Field(None, description="The text ends behind the stop string.")
    no_stop_trim: bool | None = Field(None, description="Another name of include_stop_str_in_output.")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_not_too_many)] | None = None
    allowed_token_ids: ListOf[int] | None = Field(None, min_length=1, description="All that the answer may be made of.")
    bad_words: ListOf[str] | None = Field(None, max_length=1000, description="Texts that the answer must not have.")
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: int | None = Field(
        None, ge=-(2**31), lt=2**31, description="Lower goes first, and may take the place of higher; the default is 0."
    )
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="Most tokens of each prompt; -1: as many as fit beside max_tokens. null: all."
    )
    truncation_side: Literal["left", "right"] | None = Field(None, description="What is cut: left, unless told.")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=256, description="Only requests with the same one share cached prompt slots."
    )
    confidence: float | None = Field(
        None,
        description="In [0, 1]. Composed groups: how sure each further token of a group must be; higher is safer and "
        "slower. Verified groups: the least chance of acceptance at which a draft is made; 0 is automatic, 1 is none.",
    )
    settle: bool | None = Field(
        None, description="False: all tokens of the answer keep their KV slots. The default is the server's."
    )
    prompt_logprobs: int | None = Field(
        None, description="Log-probability and rank of each token of the prompt, and so many of the likeliest there."
    )
    return_groups: bool | None = Field(None, description="Show which tokens were emitted by one macro-step.")
    return_token_ids: bool | None = Field(None, description="The ids of the prompt and of the answer.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Log-probabilities name tokens `token_id:N`, which no two share."
    )

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The OpenAPI document shows the ranges, which SamplingParams checks."""
        schema = handler.resolve_ref_schema(handler(core))
        for name in _RANGES.keys() & schema["properties"].keys():
            low, high = _RANGES[name]
            value = schema["properties"][name]["anyOf"][0]
            if value["type"] != "boolean":  # a chat's logprobs
                value |= {"minimum": low} if high == math.inf else {"minimum": low, "maximum": high}
        schema["properties"]["top_p"]["anyOf"][0] |= {"exclusiveMinimum": 0, "maximum": 1}
        return schema

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def num_samples(self) -> int:
        """Answers that are generated for each prompt; the likeliest num_choices of them are given."""
        return self.num_choices

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def shows_reasoning(self) -> bool:
        return True

    @property
    def has_prediction(self) -> bool:
        return False

    @property
    def goes_on(self) -> bool:
        """Whether the answer's text goes on with that of the prompt."""
        raise NotImplementedError

    def num_logprobs(self) -> int | None:
        """How many of each token's likeliest rivals are reported; None for no log-probabilities."""
        raise NotImplementedError

    def num_prompt_logprobs(self) -> int | None:
        """How many of each prompt token's likeliest rivals are computed; None for no log-probabilities of it."""
        return self.prompt_logprobs

    def token_limit(self) -> tuple[str, int | None]:
        """The name of the field that limits the answer's tokens, as the client wrote it, and its value."""
        new, old = self.max_completion_tokens, self.max_tokens
        if new is not None and old is not None and new != old:
            raise InvalidRequest(
                f"max_completion_tokens is {new}, but max_tokens is {old}: give one of them.", "max_tokens"
            )
        return ("max_tokens", old) if new is None else ("max_completion_tokens", new)

    @property
    def least_room(self) -> int:
        """Tokens of the answer beside which a prompt is cut to fit."""
        most = self.token_limit()[1]
        return 1 if most is None else most

    def cut(self, prompt: list[int], max_model_len: int) -> list[int]:
        """A prompt's tokens, as truncate_prompt_tokens asks. Raises InvalidRequest."""
        most = self.truncate_prompt_tokens
        if most == 0:
            message = "truncate_prompt_tokens is 0: it must be at least 1, or -1 for as many as fit."
            raise InvalidRequest(message, "truncate_prompt_tokens")
        if most == -1:
            most = max(1, max_model_len - self.least_room)
        if most is None or len(prompt) <= most:
            return prompt
        return prompt[:most] if self.truncation_side == "right" else prompt[len(prompt) - most :]

    def sampling_params(
        self, confidence: float | None, grammar: str | None = None, defaults: SamplingDefaults = OPENAI_DEFAULTS
    ) -> list[SamplingParams]:
        """One for each of the `n` choices (SamplingParams.each_choice).

        defaults: of fields that the body leaves out, or null.

        Raises InvalidRequest that names the field as the client wrote it.
        """
        if not 1 <= self.num_choices <= MAX_CHOICES:
            raise InvalidRequest(f"n is {self.n}: it must be in [1, {MAX_CHOICES}].", "n")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is given, but stream is not true.", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs is given, but stream is true: no stream has them.", "prompt_logprobs")
        if self.top_k is not None and self.top_k < -1:
            raise InvalidRequest(f"top_k is {self.top_k}: it must be at least 0, or -1, which is off as well.", "top_k")
        limit_name, max_tokens = self.token_limit()
        given = {
            "min_tokens": self.min_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": _logit_bias(self.logit_bias),
            "stop": self.stop and tuple(self.stop),
            "include_stop_str_in_output": self.include_stop_str_in_output or self.no_stop_trim,
            "stop_token_ids": self.stop_token_ids and tuple(self.stop_token_ids),
            "allowed_token_ids": self.allowed_token_ids and tuple(self.allowed_token_ids),
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": self.skip_special_tokens,
        }
        options: dict[str, Any] = {**defaults, **{name: value for name, value in given.items() if value is not None}}
        options |= {
            "max_tokens": max_tokens,
            "logprobs": self.num_logprobs(),
            "prompt_logprobs": self.num_prompt_logprobs(),
            "grammar": grammar,
            "confidence": confidence,
            "settle": self.settle,
        }
        seed = self._unsigned_seed()
        try:
            return SamplingParams(seed=seed, **options).each_choice(self.num_samples)
        except InvalidRequest as error:
            raise named_as_written(error, limit_name, self.prompt_name) from error

    def _unsigned_seed(self) -> int | None:
        """The engine's have no sign; OpenAI's and vLLM's may have one, and vLLM's -1 is none."""
        if self.seed is None or self.seed == -1:
            return None
        if not MIN_SEED <= self.seed <= MAX_SEED:
            raise InvalidRequest(f"seed is {shown(self.seed)}: it must be in [-2^63, 2^63 - 1].", "seed")
        return self.seed % (MAX_SEED + 1)


def named_as_written(error: InvalidRequest, limit_name: str, prompt_name: str) -> InvalidRequest:
    """The same error in the client's words; the engine says max_tokens, prompt and prediction_ids."""
    return renamed(error, {"max_tokens": limit_name, "prompt": prompt_name, "prediction_ids": "prediction"})


def renamed(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """The same error, in `param` and message of other fields. names: from old to new.

    A name that is a word of English (`stop`) is a field's only where the message begins with it, and what is quoted are
    the client's own words.
    """

    def other(found: re.Match[str]) -> str:
        name = found[0]
        return names.get(name, name) if "_" in name or not found.start() else name

    error.param = None if error.param is None else names.get(error.param, error.param)
    error.args = (_FIELD.sub(other, str(error)),)
    return error


def _logit_bias(value: dict[str, float] | None) -> dict[int, float] | None:
    if value is None:
        return None
    for key in value:
        if not re.fullmatch(r"-?[0-9]{1,18}", key):
            raise InvalidRequest(f"logit_bias has the key {shown(key)}: keys are token ids.", "logit_bias")
    return {int(key): bias for key, bias in value.items()}
