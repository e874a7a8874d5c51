"""ChatBody: POST /v1/chat/completions; and ChatPrompt, what of it makes the prompt."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from hamburger.engine.grammar.source import GrammarSource
from hamburger.engine.types.errors import InvalidRequest
from hamburger.engine.types.sampling_params import MAX_LOGPROBS
from hamburger.server.bodies.generation import GenerationBody
from hamburger.server.bodies.known_fields import REFUSED_CHAT
from hamburger.server.bodies.message import Message, Text
from hamburger.server.schema import ListOf, Schema
from hamburger.server.tools.reasoning import EFFORTS, template_kwargs
from hamburger.server.tools.tool_fields import MAX_TOOLS, Tool, ToolChoice
from hamburger.server.tools.tool_parsers import Family
from hamburger.server.tools.tool_use import ToolUse


class ChatPrompt(Schema):
    """What the chat template makes a prompt of, beside the messages."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(None, description="The answer goes on with the last message.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables for the chat template.")
    tools: ListOf[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal[EFFORTS] | None = Field(  # type: ignore[valid-type]
        None, description="Of models whose template reads it; none: no thinking."
    )
    enable_thinking: bool | None = Field(None, description="The same, as yes or no.")

    def template_variables(self, template: str | None) -> dict[str, Any]:
        """What the chat template is told. Raises InvalidRequest."""
        return {
            **template_kwargs(template, self.reasoning_effort, self.enable_thinking),
            **(self.chat_template_kwargs or {}),
        }

    def tool_use(self, family: Family, form: GrammarSource | None = None) -> ToolUse | None:
        """What is to be made of the tools; None where there are none. Raises InvalidRequest.

        form: what an answer is to be that is no call; None: free text.
        """
        if not self.tools or self.tool_choice == "none":
            if self.tool_choice not in (None, "none", "auto"):
                raise InvalidRequest("tool_choice asks for a call, but there are no tools.", "tool_choice")
            return None
        parallel = self.parallel_tool_calls is not False
        return ToolUse(self.tools, self.tool_choice, family, parallel=parallel, form=form)


class Prediction(Schema):
    """A text that the answer is expected to follow, at least in parts. It changes how soon the answer comes, not what
    it says."""

    type: Literal["content"]
    content: Text


class ChatBody(GenerationBody, ChatPrompt):
    """POST /v1/chat/completions."""

    refused: ClassVar = REFUSED_CHAT
    prompt_name: ClassVar = "messages"

    messages: ListOf[Message] = Field(min_length=1)
    logprobs: bool | None = None
    top_logprobs: int | None = None
    include_reasoning: bool | None = Field(None, description="False: what the model writes for itself is left out.")
    separate_reasoning: bool | None = Field(None, description="False: it stays in the text.")
    thinking_token_budget: int | None = Field(
        None, ge=-1, description="Most tokens that the model writes for itself; -1: as many as it likes."
    )
    prediction: Prediction | None = Field(
        None, description="Predicted Outputs, of verified groups: what the answer is expected to follow."
    )

    @property
    def shows_reasoning(self) -> bool:
        return self.include_reasoning is not False

    @property
    def has_prediction(self) -> bool:
        return self.prediction is not None

    @property
    def goes_on(self) -> bool:
        return bool(self.continue_final_message)

    def predicted_text(self) -> str:
        """What the answer is expected to follow; empty where nothing is. Raises InvalidRequest."""
        if self.prediction is None:
            return ""
        if self.num_choices > 1:
            raise InvalidRequest(f"n is {self.n}, but a prediction is of one answer: leave one of them out.", "n")
        if self.tools:
            raise InvalidRequest("A prediction does not go with tools: leave one of them out.", "tools")
        return self.prediction.content

    def tool_use(self, family: Family, form: GrammarSource | None = None) -> ToolUse | None:
        name, form = self.source() or ("", form)
        tools = super().tool_use(family, form)
        if tools is not None and tools.form is not None and not tools.form.is_json:
            message = f"Tools go with an answer in JSON, but not with this {name}: "
            raise InvalidRequest(f"{message}give a JSON Schema, or set tool_choice to none.", name)
        return tools

    def num_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise InvalidRequest(
                f"top_logprobs is {self.top_logprobs}: it must be in [0, {MAX_LOGPROBS}].", "top_logprobs"
            )
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs is given, but logprobs is not true.", "top_logprobs")
        return self.top_logprobs or 0 if self.logprobs else None
