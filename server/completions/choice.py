"""Choice: one answer as it grows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hamburger.engine.request import DraftCounts, RequestUpdate
from hamburger.server.completions.echo import Echo
from hamburger.server.tools.reasoning import Reasoning
from hamburger.server.tools.tool_stream import ToolStream


class Choice:
    """One answer as it grows: what the client was sent of it, and what it has to be charged for."""

    def __init__(
        self,
        index: int,
        logprobs: Callable[[RequestUpdate], dict[str, Any]] | None,
        echo: Echo | None,
        tools: ToolStream | None,
        reasoning: Reasoning | None = None,
    ) -> None:
        self.index = index
        self.tools, self.reasoning = tools, reasoning
        self.texts: list[str] = []
        self.groups: list[list[int]] = []
        self.logprobs: list[dict[str, Any]] = []
        self.completion_tokens = 0
        self.kv_slots = 0
        self.macro_steps = 0
        self.drafts = DraftCounts()
        self.cached_tokens = 0
        self.logprob = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._logprobs = logprobs
        self._echo = echo

    def add(self, update: RequestUpdate, *, keep: bool) -> tuple[str, dict[str, Any] | None]:
        """Count a group; its text and the log-probabilities of its tokens, None where none were asked for.

        Where the prompt is echoed, the first group brings the prompt's text and log-probabilities too.
        keep: remember its text, ids and log-probabilities for the whole answer; a stream has no use for them.
        """
        self.completion_tokens, self.kv_slots = update.completion_tokens, update.kv_slots
        if self.reasoning is not None:
            self.reasoning.count(update.token_ids)
        self.macro_steps = update.macro_steps
        self.drafts.add(update.drafts)
        self.cached_tokens += update.cached_tokens
        self.logprob += sum(entry.logprob for entry in update.logprobs or ())
        self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason
        logprobs = None if self._logprobs is None else self._logprobs(update)
        text = update.text if self._echo is None else self._echo.text + update.text
        self._echo = None
        if keep:
            self.texts.append(text)
            if update.token_ids:
                self.groups.append(update.token_ids)
            if logprobs is not None:
                self.logprobs.append(logprobs)
        return text, logprobs
