"""OpenAI's answers as plain dicts: a chunk is built for every group of every stream, so nothing heavy stands here."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hamburger.engine.request import RequestUpdate
from hamburger.server.api.errors import ApiError, error_body
from hamburger.server.api.events import DONE, data_event
from hamburger.server.api.model_context import ServedModel
from hamburger.server.bodies.generation import GenerationBody
from hamburger.server.completions.choice import Choice
from hamburger.server.completions.echo import Echo
from hamburger.server.completions.logprobs import PromptLogprobs
from hamburger.server.server_tokenizer import ServerTokenizer
from hamburger.server.tools.reasoning import Reasoning
from hamburger.server.tools.tool_stream import ToolStream

_LOGGED_USAGE = ("prompt_tokens", "completion_tokens", "kv_slots", "tokens_per_kv", "macro_steps", "tokens_per_step")


class OpenAIReply:
    """A Reply (server/api/reply.py): its id, its choices and its usage. Subclasses know the two shapes."""

    id_prefix: str
    object: str
    chunk_object: str
    _empty_delta: Mapping[str, Any]  # of a streamed choice that adds nothing

    def __init__(
        self,
        body: GenerationBody,
        served: ServedModel,
        tokenizer: ServerTokenizer,
        prompts: Sequence[list[int]],
        echoes: Sequence[Echo] = (),
        tools: Sequence[ToolStream] | None = None,
        reasoning: Sequence[Reasoning] | None = None,
    ) -> None:
        """prompts: the token ids of each. echoes: the prompt that each choice gives back first; none at all where no
        prompt is echoed.

        tools: for each choice, what finds the calls in its text; None where there are no tools. reasoning: the same of
        what the model writes for itself.
        """
        self.id = f"{self.id_prefix}{uuid.uuid4().hex}"
        self.confidence: float | None = None  # named in the usage, where the server chooses it
        self._tokenizer = tokenizer
        self._skip_special_tokens = body.skip_special_tokens is not False
        self._common_fields = {
            "created": int(time.time()),
            "model": body.model or served.name,
            "system_fingerprint": served.fingerprint,
        }
        self._return_groups = bool(body.return_groups)
        self._usage_in_chunks = body.wants_continuous_usage
        self._wants_usage = body.wants_usage
        self._has_prediction = body.has_prediction
        self.prompt_tokens = sum(map(len, prompts))
        self._prompt_ids = prompts if body.return_token_ids else None
        self._prompt_scores = None
        if body.prompt_logprobs is not None:
            self._prompt_scores = [PromptLogprobs(tokenizer, prompt, body.prompt_logprobs) for prompt in prompts]
        self._num_top = body.num_logprobs()
        self._shows_reasoning = body.shows_reasoning
        self._tokens_as_ids = bool(body.return_tokens_as_token_ids)
        self._samples_a_prompt, self._choices_a_prompt = body.num_samples, body.num_choices
        self.choices = [
            Choice(
                i,
                self._logprobs(echo) if self._num_top is not None else None,
                echo,
                None if tools is None else tools[i],
                None if reasoning is None else reasoning[i],
            )
            for i, echo in enumerate(echoes or [None] * (len(prompts) * body.num_samples))
        ]

    def add(self, index: int, update: RequestUpdate) -> None:
        """Take a group into an answer that is sent as a whole."""
        self.choices[index].add(update, keep=True)
        if self._prompt_scores is not None:
            self._prompt_scores[index // self._samples_a_prompt].add(update)

    def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        choices = []
        for index, choice in enumerate(self._best()):
            whole = {
                "index": index,
                "logprobs": self._join(choice.logprobs) if choice.logprobs else None,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                **self._content(choice),
            }
            if self._return_groups:
                whole["groups"] = choice.groups
            if self._prompt_ids is not None:
                whole["token_ids"] = [token_id for group in choice.groups for token_id in group]
            choices.append(whole | self._prompt_in_choice(choice))
        common = {**self._common_fields, **self._prompt_in_answer()}
        return {"id": self.id, "object": self.object, **common, "choices": choices, "usage": self.usage()}

    def chunks(self, index: int, update: RequestUpdate) -> list[dict[str, Any]]:
        """The streamed piece that one group adds, if it adds anything; after an answer's last text another one, which
        says why it ended, as many clients read text only while no reason is given."""
        choice = self.choices[index]
        first = choice.macro_steps == 0
        text, logprobs = choice.add(update, keep=False)
        said = self._delta(choice, text, first)
        piece: dict[str, Any] = {"index": index, "logprobs": logprobs, **said, "finish_reason": None}
        if self._return_groups and update.token_ids:
            piece["group"] = _group(update)
        of_answer = {}
        if self._prompt_ids is not None:
            piece["token_ids"] = update.token_ids
            if first:
                piece |= self._prompt_in_choice(choice)
                of_answer = self._prompt_in_answer()
        pieces, says_anything = [piece], self._says_anything(said)
        is_held_back = not (says_anything or first or logprobs or self._usage_in_chunks)
        if is_held_back and update.finish_reason is None and "group" not in piece and "token_ids" not in piece:
            return []
        if update.finish_reason is not None:
            if says_anything:
                pieces.append({"index": index, "logprobs": None, **self._empty_delta})
            pieces[-1]["finish_reason"] = self._reason(choice, update.finish_reason)
            pieces[-1]["stop_reason"] = update.stop_reason
        chunks = [self._with_usage(self._chunk([piece])) for piece in pieces]
        chunks[0] |= of_answer
        return chunks

    def _with_usage(self, chunk: dict[str, Any]) -> dict[str, Any]:
        if self._usage_in_chunks:
            chunk["usage"] = self.usage()
        elif self._wants_usage:
            chunk["usage"] = None
        return chunk

    def events(self, index: int, update: RequestUpdate) -> bytes:
        return b"".join(map(data_event, self.chunks(index, update)))

    def end(self) -> bytes:
        """With include_usage a chunk of it comes first."""
        usage = data_event(self._chunk([]) | {"usage": self.usage()}) if self._wants_usage else b""
        return usage + DONE

    def failure(self, error: ApiError) -> bytes:
        return data_event(error_body(error)) + DONE

    def usage(self) -> dict[str, Any]:
        """What the client saw so far, summed over the choices."""
        completion_tokens = sum(choice.completion_tokens for choice in self.choices)
        kv_slots = sum(choice.kv_slots for choice in self.choices)
        macro_steps = sum(choice.macro_steps for choice in self.choices)
        # The choices of one prompt share it: it counts once, and so does what was cached of it before they came.
        cached_tokens = sum(min(choice.cached_tokens for choice in prompt) for prompt in self._prompts())
        confidence = {} if self.confidence is None else {"confidence": self.confidence}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
            "kv_slots": kv_slots,
            "tokens_per_kv": _rate(completion_tokens, kv_slots),
            "macro_steps": macro_steps,
            "tokens_per_step": _rate(completion_tokens, macro_steps),
            **confidence,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
            **self._completion_details(),
        }

    def _completion_details(self) -> dict[str, Any]:
        """In OpenAI's names: tokens of what the model wrote for itself, where they can be told, and what came of the
        prediction that the request brought."""
        thought = [None if choice.reasoning is None else choice.reasoning.num_tokens for choice in self.choices]
        known = [number for number in thought if number is not None]
        details = {"reasoning_tokens": sum(known)} if known else {}
        if not self._has_prediction:
            return {"completion_tokens_details": details} if details else {}
        accepted = sum(choice.drafts.accepted_of_prediction for choice in self.choices)
        drafted = sum(choice.drafts.drafted_of_prediction for choice in self.choices)
        details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
        return {"completion_tokens_details": details}

    def counts(self) -> dict[str, Any]:
        """What the log says of it: the usage of all choices together, and what ended them."""
        usage = self.usage()
        reasons = {choice.finish_reason or "abort" for choice in self.choices}
        return {
            "answer_id": self.id,
            "choices": len(self.choices),
            **{name: usage[name] for name in _LOGGED_USAGE},
            "drafted_tokens": sum(choice.drafts.drafted for choice in self.choices),
            "accepted_tokens": sum(choice.drafts.accepted for choice in self.choices),
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "finish_reason": ",".join(sorted(reasons)),
        }

    def _prompts(self) -> list[list[Choice]]:
        n = self._samples_a_prompt
        return [self.choices[i : i + n] for i in range(0, len(self.choices), n)]

    def _best(self) -> list[Choice]:
        """All choices; with best_of, of each prompt the n with the highest log-probability per token, best first."""
        if self._samples_a_prompt == self._choices_a_prompt:
            return self.choices
        ranked = [sorted(prompt, key=lambda c: -c.logprob / max(c.completion_tokens, 1)) for prompt in self._prompts()]
        return [choice for prompt in ranked for choice in prompt[: self._choices_a_prompt]]

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": self.chunk_object, **self._common_fields, "choices": choices}

    def _of_prompt(self, index: int) -> dict[str, Any]:
        """What was asked of a prompt: its token ids, their log-probabilities."""
        told: dict[str, Any] = {}
        if self._prompt_ids is not None:
            told["prompt_token_ids"] = self._prompt_ids[index]
        if self._prompt_scores is not None:
            told["prompt_logprobs"] = self._prompt_scores[index].written
        return told

    def _prompt_in_choice(self, choice: Choice) -> dict[str, Any]:
        """What of it belongs into each choice."""
        return {}

    def _prompt_in_answer(self) -> dict[str, Any]:
        """What of it belongs into the answer as a whole."""
        return {}

    def _content(self, choice: Choice) -> dict[str, Any]:
        """The fields of a whole choice that differ."""
        raise NotImplementedError

    def _delta(self, choice: Choice, text: str, first: bool) -> dict[str, Any]:
        """The fields of a streamed choice that differ."""
        raise NotImplementedError

    def _says_anything(self, said: Mapping[str, Any]) -> bool:
        """Whether a delta brings text or calls."""
        raise NotImplementedError

    def _reason(self, choice: Choice, finish_reason: str) -> str | None:
        """In the API's words."""
        return finish_reason

    def _logprobs(self, echo: Echo | None) -> Callable[[RequestUpdate], dict[str, Any]]:
        raise NotImplementedError

    def _join(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        raise NotImplementedError


def _group(update: RequestUpdate) -> dict[str, Any]:
    """What one macro-step emitted, and what it checked for that."""
    group = {"index": update.macro_steps - 1, "token_ids": update.token_ids, "stop_probs": update.stop_probs}
    if (drafts := update.drafts) is None:
        return group
    return group | {
        "drafted": drafts.token_ids,
        "accepted": drafts.num_accepted,
        "chances": [round(chance, 4) for chance in drafts.chances],
        "drafter": drafts.drafter,
    }


def _rate(num_tokens: int, number: int) -> float | None:
    return round(num_tokens / number, 4) if number else None
