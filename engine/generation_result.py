"""GenerationResult: one whole answer of LLM, made of its updates. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from hamburger.engine.request import DraftCounts, RequestUpdate
from hamburger.engine.types.messages import FinishReason, SubmitRequest, TokenLogprobs


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """One whole answer. token_ids, stop_probs and logprobs have one entry a token; groups are the same ids by
    macro-step.

    text ends before the stop string, token_ids with the token that completed it. stop_reason: the stop string or stop
    token id that ended the answer, else None. kv_slots: slots of the answer, one a group where groups are composed,
    else one a token. macro_steps: groups emitted. drafts: of verified groups. prompt_logprobs: one entry a prompt
    token, None for the first, which nothing predicts. prompt: its text, of a chat as the template wrote it; None where
    it was given as token ids. others: where SamplingParams.n asked for several answers, all but this one, the first.
    """

    prompt_ids: list[int]
    text: str
    token_ids: list[int]
    groups: list[list[int]]
    stop_probs: list[float]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    kv_slots: int
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    macro_steps: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)
    prompt: str | None = None
    others: tuple[GenerationResult, ...] = ()

    @property
    def prompt_token_ids(self) -> list[int]:
        """prompt_ids, as vLLM calls them."""
        return self.prompt_ids

    @property
    def outputs(self) -> list[GenerationResult]:
        """All answers to the prompt, this one first, as vLLM calls them."""
        return [self, *self.others]

    @property
    def tokens_per_kv(self) -> float:
        """Tokens a KV slot, which says nothing of speed: 1.0 where groups are verified. 0.0 where max_tokens was 0."""
        return len(self.token_ids) / self.kv_slots if self.kv_slots else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens a macro-step, that is, a pass of the trunk. 0.0 where max_tokens was 0."""
        return len(self.token_ids) / self.macro_steps if self.macro_steps else 0.0


def result_of(prompt_ids: list[int], updates: list[RequestUpdate], finish_reason: FinishReason) -> GenerationResult:
    """The whole of an answer's updates, of which there is at least one."""
    last, drafts = updates[-1], DraftCounts()
    for update in updates:
        drafts.add(update.drafts)
    return GenerationResult(
        prompt_ids=prompt_ids,
        text="".join(update.text for update in updates),
        token_ids=[token_id for update in updates for token_id in update.token_ids],
        groups=[update.token_ids for update in updates if update.token_ids],
        stop_probs=[p for update in updates for p in update.stop_probs],
        logprobs=None if last.logprobs is None else [x for update in updates for x in update.logprobs or ()],
        finish_reason=finish_reason,
        stop_reason=last.stop_reason,
        kv_slots=last.kv_slots,
        prompt_logprobs=updates[0].prompt_logprobs,
        macro_steps=last.macro_steps,
        drafts=drafts,
    )


def prompt_of(request_id: str) -> tuple[int, int]:
    """Which prompt a request (of LLM._resolve) answers, and its place among the answers to it."""
    prompt, _, place = request_id.partition(".")
    return int(prompt), int(place or 0)


def whole_results(
    finished: Iterable[tuple[SubmitRequest, GenerationResult]],
) -> Iterator[tuple[int, GenerationResult]]:
    """The number of each prompt with its result, once all answers to it are there."""
    open_prompts: dict[int, dict[int, GenerationResult]] = {}
    for request, result in finished:
        prompt, place = prompt_of(request.request_id)
        answers = open_prompts.setdefault(prompt, {})
        answers[place] = result
        if len(answers) == request.params.n:
            del open_prompts[prompt]
            scores = answers[0].prompt_logprobs
            others = (replace(answers[i], prompt_logprobs=scores) for i in range(1, len(answers)))
            yield prompt, replace(answers[0], others=tuple(others))
