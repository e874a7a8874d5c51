"""OpenAI's two forms of an answer: a chat's message, and a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hamburger.engine.request import RequestUpdate
from hamburger.server.completions.choice import Choice
from hamburger.server.completions.echo import Echo
from hamburger.server.completions.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    join_chat_logprobs,
    join_completion_logprobs,
)
from hamburger.server.completions.openai_reply import OpenAIReply


class ChatReply(OpenAIReply):
    """chat.completion: a message, streamed as deltas. The role comes with the first token, never before it."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    _empty_delta: Mapping[str, Any] = {"delta": {}}

    def _prompt_in_answer(self) -> dict[str, Any]:
        return self._of_prompt(0)

    def _content(self, choice: Choice) -> dict[str, Any]:
        text, thought = "".join(choice.texts), {}
        if choice.reasoning is not None:
            reasoning, text = choice.reasoning.add(text, is_final=True)
            thought = self._thought(reasoning)
        if choice.tools is None:
            return {"message": {"role": "assistant", **thought, "content": text, "refusal": None}}
        content, calls = choice.tools.message(text)
        message: dict[str, Any] = {"role": "assistant", **thought, "content": content, "refusal": None}
        if not calls:
            return {"message": message}
        return {"message": message | {"tool_calls": calls}, "finish_reason": self._reason(choice, choice.finish_reason)}

    def _delta(self, choice: Choice, text: str, first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        is_final = choice.finish_reason is not None
        if choice.reasoning is not None:
            reasoning, text = choice.reasoning.add(text, is_final=is_final)
            delta |= self._thought(reasoning)
        if choice.tools is not None:
            delta |= choice.tools.add(text, is_final=is_final)
        elif text or choice.reasoning is None:
            delta["content"] = text
        return {"delta": delta}

    def _thought(self, reasoning: str) -> dict[str, Any]:
        return {"reasoning_content": reasoning} if reasoning and self._shows_reasoning else {}

    def _says_anything(self, said: Mapping[str, Any]) -> bool:
        return any(said["delta"].get(name) for name in ("content", "tool_calls", "reasoning_content"))

    def _reason(self, choice: Choice, finish_reason: str | None) -> str | None:
        return finish_reason if choice.tools is None else choice.tools.reason(finish_reason, choice.stop_reason)

    def _logprobs(self, echo: Echo | None) -> Callable[[RequestUpdate], dict[str, Any]]:
        return ChatLogprobs(self._tokenizer, as_ids=self._tokens_as_ids)

    def _join(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        return join_chat_logprobs(parts)


class CompletionReply(OpenAIReply):
    """text_completion: the same shape streamed or not. Choice index = prompt index x n + choice."""

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"
    _empty_delta: Mapping[str, Any] = {"text": ""}

    def _prompt_in_choice(self, choice: Choice) -> dict[str, Any]:
        return self._of_prompt(choice.index // self._samples_a_prompt)

    def _content(self, choice: Choice) -> dict[str, Any]:
        return {"text": "".join(choice.texts)}

    def _delta(self, choice: Choice, text: str, first: bool) -> dict[str, Any]:
        return {"text": text}

    def _says_anything(self, said: Mapping[str, Any]) -> bool:
        return bool(said["text"])

    def _logprobs(self, echo: Echo | None) -> Callable[[RequestUpdate], dict[str, Any]]:
        return CompletionLogprobs(
            self._tokenizer, self._skip_special_tokens, echo, as_ids=self._tokens_as_ids, num_top=self._num_top
        )

    def _join(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        return join_completion_logprobs(parts)
