"""The requests that OpenAI clients send: fields and types, and how they become SamplingParams. No engine, no text.

Types are strict (a bool is no int, "1" is no number) and null means the default. Ranges are checked once, by
SamplingParams; a field that is known but not served is unsupported_fields.py's business, any other is ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, WithJsonSchema
from pydantic_core import CoreSchema

from hamburger.engine.types.errors import InvalidRequest, shown
from hamburger.engine.types.sampling_params import MAX_LOGPROBS, MAX_SEED, RANGES, SamplingParams
from hamburger.server.api.message import Message, Text
from hamburger.server.api.structured_output import ResponseFormat, StructuredOutputs
from hamburger.server.api.unsupported_fields import UNSUPPORTED_CHAT, UNSUPPORTED_COMPLETION, AsksNothing
from hamburger.server.schema import ListOf, Schema
from hamburger.server.tools.tool_parsers import Family
from hamburger.server.tools.tool_use import Tool, ToolChoice, ToolUse

MAX_CHOICES = 128
MAX_BIASES = 10_000  # and stop_token_ids
_RANGES = {**RANGES, "n": (1, MAX_CHOICES), "top_k": (-1, math.inf), "top_logprobs": RANGES["logprobs"]}


def _strings(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _not_too_many(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"it holds {len(value):,} tokens, but at most {MAX_BIASES:,} are allowed")
    return value


def _prompts(value: Any) -> Any:
    """The four forms of `prompt` as a list of texts or of token-id lists."""
    prompts = [value] if isinstance(value, str) or _are_ids(value) else value
    if not isinstance(prompts, list) or not prompts or not all(isinstance(p, str) or _are_ids(p) for p in prompts):
        raise ValueError("it must be a string, a list of strings, a list of token ids, or a list of lists of token ids")
    if len({type(prompt) for prompt in prompts}) > 1:
        raise ValueError("it mixes texts and token ids")
    return prompts


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token_id) is int for token_id in value)


Strings = Annotated[
    ListOf[str],
    BeforeValidator(_strings),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
Prompts = Annotated[list[Any], BeforeValidator(_prompts), WithJsonSchema({"type": ["string", "array"]})]


class StreamOptions(Schema):
    """include_usage: a last chunk with the usage. continuous_usage_stats: the usage so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Prediction(Schema):
    """A text that the answer is expected to follow, at least in parts. It changes how soon the answer comes, not what
    it says."""

    type: Literal["content"]
    content: Text


class GenerationBody(Schema):
    """The fields that chat and text completions share; SamplingParams says what they mean."""

    unsupported: ClassVar[Mapping[str, AsksNothing]]
    prompt_name: ClassVar[str]

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 or -1 is off.")
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: Strings | None = None
    stop_token_ids: ListOf[int] | None = Field(None, max_length=MAX_BIASES)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_not_too_many)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int | None = Field(
        None, ge=-(2**31), lt=2**31, description="Lower goes first, and may take the place of higher; the default is 0."
    )
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
    return_groups: bool | None = Field(None, description="Show which tokens were emitted by one macro-step.")

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
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def has_prediction(self) -> bool:
        return False

    def num_logprobs(self) -> int | None:
        """How many of each token's likeliest rivals are reported; None for no log-probabilities."""
        raise NotImplementedError

    def num_prompt_logprobs(self) -> int | None:
        """How many of each prompt token's likeliest rivals are reported; None for no log-probabilities of it."""
        return None

    def token_limit(self) -> tuple[str, int | None]:
        """The name of the field that limits the answer's tokens, as the client wrote it, and its value."""
        return "max_tokens", self.max_tokens

    def sampling_params(self, confidence: float | None, grammar: str | None = None) -> list[SamplingParams]:
        """One for each of the `n` choices: choice i's seed is `seed + i`, so that they differ.

        Raises InvalidRequest that names the field as the client wrote it.
        """
        if not 1 <= self.num_choices <= MAX_CHOICES:
            raise InvalidRequest(f"n is {self.n}: it must be in [1, {MAX_CHOICES}].", "n")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is given, but stream is not true.", "stream_options")
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
            "stop_token_ids": self.stop_token_ids and tuple(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": self.skip_special_tokens,
        }
        options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        options |= {
            "max_tokens": max_tokens,
            "logprobs": self.num_logprobs(),
            "prompt_logprobs": self.num_prompt_logprobs(),
            "grammar": grammar,
            "confidence": confidence,
            "settle": self.settle,
        }
        try:
            first = SamplingParams(seed=self.seed, **options)
        except InvalidRequest as error:
            raise named_as_written(error, limit_name, self.prompt_name) from error
        if self.seed is None or self.num_samples == 1:
            return [first] * self.num_samples
        return [SamplingParams(seed=(self.seed + i) % (MAX_SEED + 1), **options) for i in range(self.num_samples)]


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    unsupported: ClassVar = UNSUPPORTED_CHAT
    prompt_name: ClassVar = "messages"

    messages: ListOf[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(None, description="The answer goes on with the last message.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables for the chat template.")
    tools: ListOf[Tool] | None = Field(None, max_length=128)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = Field(
        None, description="Predicted Outputs, of verified groups: what the answer is expected to follow."
    )

    @property
    def has_prediction(self) -> bool:
        return self.prediction is not None

    def predicted_text(self) -> str:
        """What the answer is expected to follow; empty where nothing is. Raises InvalidRequest."""
        if self.prediction is None:
            return ""
        if self.num_choices > 1:
            raise InvalidRequest(f"n is {self.n}, but a prediction is of one answer: leave one of them out.", "n")
        if self.tools:
            raise InvalidRequest("A prediction does not go with tools: leave one of them out.", "tools")
        return self.prediction.content

    def tool_use(self, family: Family) -> ToolUse | None:
        """What is to be made of the tools; None where there are none. Raises InvalidRequest."""
        if not self.tools or self.tool_choice == "none":
            if self.tool_choice not in (None, "none", "auto"):
                raise InvalidRequest("tool_choice asks for a call, but there are no tools.", "tool_choice")
            return None
        if (self.response_format is not None and self.response_format.type != "text") or self.structured_outputs:
            raise InvalidRequest("Structured output does not go with tools: set tool_choice to none.", "tools")
        return ToolUse(self.tools, self.tool_choice, family, parallel=self.parallel_tool_calls is not False)

    def num_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise InvalidRequest(
                f"top_logprobs is {self.top_logprobs}: it must be in [0, {MAX_LOGPROBS}].", "top_logprobs"
            )
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs is given, but logprobs is not true.", "top_logprobs")
        return self.top_logprobs or 0 if self.logprobs else None

    def token_limit(self) -> tuple[str, int | None]:
        new, old = self.max_completion_tokens, self.max_tokens
        if new is not None and old is not None and new != old:
            raise InvalidRequest(
                f"max_completion_tokens is {new}, but max_tokens is {old}: give one of them.", "max_tokens"
            )
        return ("max_tokens", old) if new is None else ("max_completion_tokens", new)


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    unsupported: ClassVar = UNSUPPORTED_COMPLETION
    prompt_name: ClassVar = "prompt"

    prompt: Prompts
    echo: bool | None = Field(
        None, description="Give the prompt back before the answer, with `logprobs` also its tokens' log-probabilities."
    )
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def num_prompt_logprobs(self) -> int | None:
        if not self.echo:
            return None
        # Without an answer the engine is only asked for the prompt's log-probabilities.
        return 0 if self.logprobs is None and self.max_tokens == 0 else self.logprobs

    def sampling_params(self, confidence: float | None, grammar: str | None = None) -> list[SamplingParams]:
        if self.best_of is not None and not self.num_choices <= self.best_of <= MAX_CHOICES:
            raise InvalidRequest(
                f"best_of is {self.best_of}: it must be at least n ({self.num_choices}) and at most {MAX_CHOICES}.",
                "best_of",
            )
        params = super().sampling_params(confidence, grammar)
        if self.num_samples == self.num_choices:
            return params
        if self.stream:
            raise InvalidRequest("best_of above n cannot be streamed: which answers are best is known last.", "best_of")
        # Their log-probabilities say which answers are best.
        return [replace(choice, logprobs=choice.logprobs or 0) for choice in params]

    @property
    def num_samples(self) -> int:
        return self.num_choices if self.best_of is None else self.best_of


def named_as_written(error: InvalidRequest, limit_name: str, prompt_name: str) -> InvalidRequest:
    """The same error, its `param` in the client's words; the engine says max_tokens, prompt and prediction_ids."""
    names = {"max_tokens": limit_name, "prompt": prompt_name, "prediction_ids": "prediction"}
    error.param = None if error.param is None else names.get(error.param, error.param)
    return error


def _logit_bias(value: dict[str, float] | None) -> dict[int, float] | None:
    if value is None:
        return None
    for key in value:
        if not re.fullmatch(r"-?[0-9]{1,18}", key):
            raise InvalidRequest(f"logit_bias has the key {shown(key)}: keys are token ids.", "logit_bias")
    return {int(key): bias for key, bias in value.items()}
