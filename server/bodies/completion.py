"""CompletionBody: POST /v1/completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, WithJsonSchema

from hamburger.engine.sampling_defaults import OPENAI_DEFAULTS, SamplingDefaults
from hamburger.engine.types.errors import InvalidRequest
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.server.bodies.generation import MAX_CHOICES, GenerationBody
from hamburger.server.bodies.known_fields import REFUSED_COMPLETION

DEFAULT_TOKENS = 16  # what the OpenAI API says of completions


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


Prompts = Annotated[list[Any], BeforeValidator(_prompts), WithJsonSchema({"type": ["string", "array"]})]


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    refused: ClassVar = REFUSED_COMPLETION
    prompt_name: ClassVar = "prompt"

    prompt: Prompts
    echo: bool | None = Field(
        None, description="Give the prompt back before the answer, with `logprobs` also its tokens' log-probabilities."
    )
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None

    @property
    def goes_on(self) -> bool:
        return True

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def num_prompt_logprobs(self) -> int | None:
        numbers = [self.prompt_logprobs]
        if self.echo:
            # Without an answer the engine is only asked for the prompt's log-probabilities.
            numbers.append(0 if self.logprobs is None and self.token_limit()[1] == 0 else self.logprobs)
        return max((number for number in numbers if number is not None), default=None)

    @property
    def leaves_limit(self) -> bool:
        """Whether the default limits the answer. A null is no default here: it is all that fits, as vLLM has it."""
        return not self.model_fields_set & {"max_tokens", "max_completion_tokens"}

    @property
    def least_room(self) -> int:
        return DEFAULT_TOKENS if self.leaves_limit else super().least_room

    def sampling_params(
        self, confidence: float | None, grammar: str | None = None, defaults: SamplingDefaults = OPENAI_DEFAULTS
    ) -> list[SamplingParams]:
        if self.best_of is not None and not self.num_choices <= self.best_of <= MAX_CHOICES:
            raise InvalidRequest(
                f"best_of is {self.best_of}: it must be at least n ({self.num_choices}) and at most {MAX_CHOICES}.",
                "best_of",
            )
        params = super().sampling_params(confidence, grammar, defaults)
        if self.num_samples == self.num_choices:
            return params
        if self.stream:
            raise InvalidRequest("best_of above n cannot be streamed: which answers are best is known last.", "best_of")
        # Their log-probabilities say which answers are best.
        return [replace(choice, logprobs=choice.logprobs or 0) for choice in params]

    @property
    def num_samples(self) -> int:
        return self.num_choices if self.best_of is None else self.best_of
