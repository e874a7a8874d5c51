"""One request outside the core: what it may ask for, and how its groups become text. No queues, no threads.

AsyncEngine and LLM share this, so that an answer is the same whichever of them was asked.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hamburger.engine.text.detokenizer import Detokenizer, TextDecoder
from hamburger.engine.text.stop_strings import StopStrings
from hamburger.engine.types.errors import ContextOverflow, InvalidRequest, NeverFits, PromptTooLong
from hamburger.engine.types.messages import (
    CheckedDrafts,
    EngineInfo,
    FinishReason,
    GroupOutput,
    SubmitRequest,
    TokenLogprobs,
)
from hamburger.engine.types.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One answer to generate. `request_id` must be unique among unfinished requests.

    priority: a request with a lower number goes before all with a higher one, and may take their place.
    cache_salt: only requests with the same one share slots (for tenants that must not notice each other).
    client: who sends it. Of one priority, the client that has been served the least goes first.
    lora: the name of the LoRA adapter that answers; None: the model itself.
    goes_on: whether the answer's text goes on with that of the prompt, or begins anew, as that of a chat does.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    client: str = ""
    lora: str | None = None
    goes_on: bool = False


class RequestUpdate(NamedTuple):  # one is made a group: a frozen dataclass takes three times as long
    """What one group adds to an answer, trimmed at every stop.

    text: new text that can no longer change (an unfinished character or a possible stop string is held back).
    token_ids, stop_probs, logprobs: this group's tokens, one entry a token; what the client may see.
    completion_tokens, kv_slots, macro_steps: totals so far, this group included. Slots are one a group where groups are
        composed, else one a token that has not lost its slot by settling; macro-steps are groups.
    drafts: of verified groups, what this one's macro-step checked, its accepted ones trimmed like the tokens; None
        where it checked none.
    stop_reason: the stop string or stop token id that ended the answer; None for an end token, length or abort.
    prompt_logprobs: on the first update, if asked: one entry a prompt token, None for the first.
    cached_tokens: on the first update: prompt tokens whose slots were found in the prefix cache.
    A request with max_tokens 0 has one update without tokens.
    """

    text: str
    token_ids: list[int]
    stop_probs: list[float]
    logprobs: list[TokenLogprobs] | None
    completion_tokens: int
    kv_slots: int
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int = 0
    macro_steps: int = 0
    drafts: CheckedDrafts | None = None


@dataclass(slots=True)
class DraftCounts:
    """Tokens that were drafted for an answer, and those of them that are in it: by all drafters, and by one of them,
    the prediction that came with the request."""

    drafted: int = 0
    accepted: int = 0
    drafted_of_prediction: int = 0
    accepted_of_prediction: int = 0

    def add(self, drafts: CheckedDrafts | None) -> None:
        """Count what one macro-step checked."""
        if drafts is None:
            return
        self.drafted += len(drafts.token_ids)
        self.accepted += drafts.num_accepted
        if drafts.drafter == "prediction":
            self.drafted_of_prediction += len(drafts.token_ids)
            self.accepted_of_prediction += drafts.num_accepted


def leaves_confidence(params: SamplingParams) -> bool:
    """Whether the dial may choose the confidence. It may not where a request names one, or a seed: that one is to be
    repeatable."""
    return params.confidence is None and params.seed is None


def resolve_request(
    request: GenerationRequest, info: EngineInfo, arrival_time: float, chosen_confidence: float | None = None
) -> SubmitRequest:
    """Check a request against the loaded model and fill in what it leaves open: max_tokens, seed and confidence.

    chosen_confidence: what a dial has chosen for requests that leave it; None where all take the default.
    Raises PromptTooLong, ContextOverflow, NeverFits or InvalidRequest, each naming the field at fault.
    """
    params, num_prompt_tokens = request.params, len(request.prompt_ids)
    if not num_prompt_tokens:
        raise InvalidRequest("The prompt is empty: it needs at least one token.", "prompt")
    _check_ids("prompt", request.prompt_ids, info)
    _check_ids("stop_token_ids", params.stop_token_ids, info)
    _check_ids("logit_bias", params.logit_bias, info)
    _check_ids("allowed_token_ids", params.allowed_token_ids, info)
    _check_ids("bad_words", (token_id for word in params.bad_words for token_id in word), info)
    _check_prediction(params.prediction_ids, info)
    ends = {*info.eos_token_ids, *params.stop_token_ids}
    if params.min_tokens and params.allowed_token_ids and (params.bad_words or ends >= {*params.allowed_token_ids}):
        raise InvalidRequest(
            "min_tokens forbids tokens that end the answer, and allowed_token_ids may leave no others: leave one of "
            "them out.",
            "min_tokens",
        )
    never = ends | {word[0] for word in params.bad_words if len(word) == 1}
    if params.min_tokens and len(never) >= info.vocab_size:
        raise InvalidRequest(
            "min_tokens forbids tokens that end the answer, and bad_words all others: leave one of them out.",
            "min_tokens",
        )
    if params.min_tokens and params.thinking is not None and params.thinking.end in ends:
        raise InvalidRequest(
            "min_tokens forbids tokens that end the answer, of which one must end its thoughts: leave it out of "
            "stop_token_ids, or leave min_tokens out.",
            "min_tokens",
        )
    if params.settle and not info.settles:
        how = "settle on" if info.groups == "verified" else "groups verified, and settle on"
        raise InvalidRequest(
            f"settle is true, but this engine keeps all slots: it must be started with {how}.", "settle"
        )
    context_left = info.max_model_len - num_prompt_tokens
    least = 0 if params.max_tokens == 0 else 1
    if context_left < least:
        raise PromptTooLong(
            f"This model's maximum context length is {info.max_model_len} tokens, but the prompt has "
            f"{num_prompt_tokens}{', and at least one must be left for the answer' * least}: shorten the prompt.",
            "prompt",
        )
    max_tokens = context_left if params.max_tokens is None else params.max_tokens
    if max_tokens > context_left:
        raise ContextOverflow(
            f"This model's maximum context length is {info.max_model_len} tokens, but the prompt has "
            f"{num_prompt_tokens} and max_tokens is {max_tokens}, {num_prompt_tokens + max_tokens} together: lower "
            f"max_tokens to {context_left} or shorten the prompt.",
            "max_tokens",
        )
    if params.min_tokens > max_tokens:  # of no max_tokens: what is left
        raise ContextOverflow(
            f"This model's maximum context length is {info.max_model_len} tokens, but the prompt has "
            f"{num_prompt_tokens} and min_tokens is {params.min_tokens}: lower min_tokens to {context_left} or shorten "
            "the prompt.",
            "min_tokens",
        )
    # At worst every group has one token; the last group's slot is never written.
    num_slots = num_prompt_tokens + max(max_tokens - 1, 0)
    if num_slots > info.total_slots:
        raise NeverFits(
            f"The request may need {num_slots} KV slots, but the whole pool holds {info.total_slots}: lower max_tokens "
            "or shorten the prompt.",
            "max_tokens",
        )
    confidence = info.default_confidence if params.confidence is None else params.confidence
    if chosen_confidence is not None and leaves_confidence(params):
        confidence = chosen_confidence
    params = replace(
        params,
        max_tokens=max_tokens,
        top_k=min(params.top_k, info.vocab_size),
        seed=secrets.randbits(63) if params.seed is None else params.seed,
        confidence=confidence,
    )
    return SubmitRequest(
        request.request_id,
        request.prompt_ids,
        params,
        arrival_time,
        request.priority,
        request.cache_salt,
        client=request.client,
    )


def _check_ids(param: str, token_ids: Iterable[int], info: EngineInfo) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < info.vocab_size:
            raise InvalidRequest(
                f"{param} holds the token id {token_id}, but the vocabulary is 0..{info.vocab_size - 1}.", param
            )


def _check_prediction(prediction_ids: Sequence[int], info: EngineInfo) -> None:
    if not prediction_ids:
        return
    if info.groups == "composed":
        raise InvalidRequest(
            "A prediction is given, but the groups of this server are composed, which checks no drafts: leave it out, "
            "or serve with `--groups verified`.",
            "prediction_ids",
        )
    if len(prediction_ids) > info.max_model_len:
        raise InvalidRequest(
            f"This model's maximum context length is {info.max_model_len} tokens, but the prediction has "
            f"{len(prediction_ids)}: shorten it.",
            "prediction_ids",
        )
    _check_ids("prediction_ids", prediction_ids, info)


class AnswerBuilder:
    """Turns a request's groups into updates: text, and the cut at the stop string that completes first."""

    def __init__(
        self,
        tokenizer: TextDecoder,
        params: SamplingParams,
        info: EngineInfo,
        stop_strings: Callable[[tuple[str, ...]], StopStrings],
        *,
        goes_on: bool,
    ) -> None:
        """stop_strings: may give several answers the same. goes_on: as in GenerationRequest."""
        self._detokenizer = Detokenizer(
            tokenizer,
            stop=stop_strings(params.stop) if params.stop else None,
            shows_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
            goes_on=goes_on,
        )
        self._unreported_end_ids = frozenset() if params.ignore_eos else frozenset(info.eos_token_ids)
        self._is_verified = info.groups == "verified"
        self.completion_tokens = 0
        self.macro_steps = 0
        self._dropped_slots = 0

    def push(self, output: GroupOutput) -> RequestUpdate:
        """The update of one group. When its stop_reason is a string, the caller must abort the request in the core."""
        is_last, by_token = output.finish_reason is not None, output.stop_token_id is not None
        group = self._detokenizer.push(output.token_ids, last=is_last, by_token=by_token)
        self.completion_tokens += group.num_tokens
        self.macro_steps += bool(output.token_ids)
        self._dropped_slots = output.dropped_slots
        drafts = output.drafts
        if drafts is not None and drafts.num_accepted > group.num_tokens:
            drafts = drafts._replace(num_accepted=group.num_tokens)
        stop_token_id = None if output.stop_token_id in self._unreported_end_ids else output.stop_token_id
        return RequestUpdate(
            text=group.text,
            token_ids=output.token_ids[: group.num_tokens],
            stop_probs=output.stop_probs[: group.num_tokens],
            logprobs=None if output.logprobs is None else output.logprobs[: group.num_tokens],
            completion_tokens=self.completion_tokens,
            kv_slots=self.completion_tokens - self._dropped_slots if self._is_verified else self.macro_steps,
            finish_reason=output.finish_reason if group.stop is None else "stop",
            stop_reason=stop_token_id if group.stop is None else group.stop,
            prompt_logprobs=output.prompt_logprobs,
            cached_tokens=output.cached_slots,
            macro_steps=self.macro_steps,
            drafts=drafts,
        )
