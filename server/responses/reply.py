"""ResponsesReply: an answer in the form of the Responses API, made of the chat's.

response.created, .in_progress ─► of each item output_item.added, its deltas, output_item.done ─► response.completed
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from hamburger.engine.request import RequestUpdate
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.server.api.errors import ApiError
from hamburger.server.api.events import typed_event
from hamburger.server.completions.logprobs import TextOffsets
from hamburger.server.completions.replies import ChatReply
from hamburger.server.completions.retold import RetoldReply, calls_of
from hamburger.server.responses.body import ResponsesBody
from hamburger.server.responses.errors import responses_error
from hamburger.server.responses.logprobs import TextLogprobs

_OWN = ("kv_slots", "tokens_per_kv", "macro_steps", "tokens_per_step", "confidence")
Keep = Callable[[dict[str, Any]], None]


class ResponsesReply(RetoldReply):
    """A Reply (server/api/reply.py), made of the chat's.

    params: of the answer. response_id: its own. keep: is given the whole response, once it is there. offsets: of the
    answer's tokens.
    """

    def __init__(
        self,
        chat: ChatReply,
        response_id: str,
        body: ResponsesBody,
        params: SamplingParams,
        model: str,
        keep: Keep,
        offsets: TextOffsets,
    ) -> None:
        super().__init__(chat, response_id)
        self._body, self._params, self._model, self._keep = body, params, model, keep
        self._created = int(time.time())
        self._output: list[dict[str, Any]] = []
        self._texts: list[str] = []  # of the last item
        self._logprobs: list[dict[str, Any]] = []
        self._scores = TextLogprobs(offsets)
        self._number = 0
        self._status = "in_progress"

    @property
    def is_whole(self) -> bool:
        """Whether all of it was added; not where its client gave it up."""
        return self._chat.choices[0].finish_reason is not None

    def whole(self) -> dict[str, Any]:
        self._status = _status(self._chat.choices[0].finish_reason)
        self._take_added()
        return self._kept()

    def take_partial(self) -> None:
        """Of an answer that was added and broke off, what had come of it."""
        if any(self._chat.choices[0].texts):
            self._take_added(breaks_off=True)

    def _take_added(self, *, breaks_off: bool = False) -> None:
        """The items of an answer that was added, of which the last one alone can be cut."""
        [choice] = self._chat.whole()["choices"]
        message = choice["message"]
        calls = message.get("tool_calls", ())
        if thought := message.get("reasoning_content"):
            self._output.append(self._reasoning(thought))
        content = message["content"] or ""
        if content or not (self._output or calls):  # an answer without a text is one, too
            entries = []
            if choice["logprobs"]:
                of_answer = self._chat.choices[0]
                token_ids = [token_id for group in of_answer.groups for token_id in group]
                self._scores.add(token_ids, choice["logprobs"]["content"])
                written = "".join(of_answer.texts)
                entries = self._scores.of_whole(content, self._text_from, written, has_calls=bool(calls))
            self._output.append(self._message(content, entries))
        for call in calls:
            function = call["function"]
            self._output.append(self._call(call["id"], function["name"], function["arguments"]))
        for item in self._output:
            item["status"] = "completed"
        self._output[-1]["status"] = "incomplete" if breaks_off else self._last_status

    def events(self, index: int, update: RequestUpdate) -> bytes:
        events: list[dict[str, Any]] = []
        for chunk in self._chat.chunks(index, update):
            [choice] = chunk["choices"]
            if not self._number:
                events += self._begun()
            if choice["logprobs"]:
                self._scores.add(update.token_ids, choice["logprobs"]["content"])
            events += self._of_delta(choice["delta"])
            if choice["finish_reason"] is not None:
                self._status = _status(choice["finish_reason"])
                if not self._output:  # an answer without a text is one, too
                    events += self._opened(self._message("", []))
                if not self._has_calls:
                    self._logprobs += self._scores.rest()
                events += self._closed()
        return b"".join(map(typed_event, events))

    def _begun(self) -> Iterator[dict[str, Any]]:
        yield self._event("response.created", response=self.response())
        yield self._event("response.in_progress", response=self.response())

    def end(self) -> bytes:
        return typed_event(self._event(f"response.{self._status}", response=self._kept()))

    def failure(self, error: ApiError) -> bytes:
        begun = b"" if self._number else b"".join(map(typed_event, self._begun()))  # clients want those first
        failed = self.failed(error)
        told = begun + typed_event(responses_error(error, self._number))
        self._number += 1
        return told + typed_event(self._event("response.failed", response=failed))

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The response of an answer that broke off, which is kept."""
        self._status = "failed"
        if self._output and self._output[-1]["status"] == "in_progress":
            self._finished("incomplete")
        return self._kept({"code": "server_error", "message": str(error)})

    def cancelled(self) -> dict[str, Any]:
        """The response of one that its client gave up, which is kept."""
        self._status = "cancelled"
        return self._kept()

    def response(self, error: dict[str, Any] | None = None) -> dict[str, Any]:
        """As it is now."""
        body = self._body
        text = {"format": {"type": "text"}} if body.text is None else body.text.model_dump(exclude_none=True)
        return {
            "id": self.id, "object": "response", "created_at": self._created, "status": self._status,
            "background": bool(body.background), "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens, "model": self._model,
            "output": list(self._output), "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": body.is_stored, "temperature": float(self._params.temperature),
            "text": text, "tool_choice": _plain(body.tool_choice) or "auto",
            "tools": [_plain(tool) for tool in body.tools or ()], "top_logprobs": body.top_logprobs or 0,
            "top_p": float(self._params.top_p), "truncation": "disabled",
            "usage": None if self._status == "in_progress" else self._usage(), "user": body.user,
            "metadata": body.metadata or {},
        }  # fmt: skip

    def _kept(self, error: dict[str, Any] | None = None) -> dict[str, Any]:
        response = self.response(error)
        self._keep(response)
        return response

    def _usage(self) -> dict[str, Any]:
        usage = self._chat.usage()
        details = usage.get("completion_tokens_details", {})
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": details.get("reasoning_tokens", 0)},
            "total_tokens": usage["total_tokens"],
            **{name: usage[name] for name in _OWN if name in usage},
        }

    def _message(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        return {
            "id": f"msg_{uuid.uuid4().hex}", "type": "message", "status": self._status, "role": "assistant",
            "content": [part],
        }  # fmt: skip

    def _reasoning(self, text: str) -> dict[str, Any]:
        return {
            "id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "status": self._status, "summary": [],
            "content": [{"type": "reasoning_text", "text": text}],
        }  # fmt: skip

    def _call(self, call_id: str, name: str, arguments: str) -> dict[str, Any]:
        return {
            "id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "status": self._status, "call_id": call_id,
            "name": name, "arguments": arguments,
        }  # fmt: skip

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _of_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        item = self._output[-1]
        place: dict[str, Any] = {"item_id": item["id"], "output_index": len(self._output) - 1}
        if item["type"] != "function_call":
            place["content_index"] = 0
        return self._event(kind, **place, **fields)

    @property
    def _has_calls(self) -> bool:
        return any(item["type"] == "function_call" for item in self._output)

    @property
    def _text_from(self) -> int:
        """The character of the answer at which its output text begins."""
        reasoning = self._chat.choices[0].reasoning
        return 0 if reasoning is None else reasoning.answer_from

    def _of_delta(self, delta: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if thought := delta.get("reasoning_content"):
            if not self._output or self._output[-1]["type"] != "reasoning":
                yield from self._opened(self._reasoning(""))
            self._texts.append(thought)
            yield self._of_item("response.reasoning_text.delta", delta=thought)
        open_calls, new_calls = calls_of(delta)
        for call in open_calls:
            yield from self._of_arguments(call)
        if text := delta.get("content"):
            if not self._output or self._output[-1]["type"] != "message":
                yield from self._opened(self._message("", []))
            self._texts.append(text)
            entries = [] if self._has_calls else self._scores.of(text, self._text_from)
            self._logprobs += entries
            yield self._of_item("response.output_text.delta", delta=text, logprobs=entries)
        for call in new_calls:
            yield from self._opened(self._call(call["id"], call["function"]["name"], ""))
            yield from self._of_arguments(call)

    def _of_arguments(self, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """What a delta adds to the last item, a call."""
        if arguments := call["function"]["arguments"]:
            self._texts.append(arguments)
            yield self._of_item("response.function_call_arguments.delta", delta=arguments)

    def _opened(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._closed()
        self._output.append(item)
        index = len(self._output) - 1
        shown = item if item["type"] == "function_call" else {**item, "content": []}
        yield self._event("response.output_item.added", output_index=index, item=shown)
        if item["type"] == "message":
            yield self._of_item("response.content_part.added", part=item["content"][0])

    def _closed(self) -> Iterator[dict[str, Any]]:
        """The last item is whole, if there is one."""
        if not self._output:
            return
        item, text = self._finished("completed" if self._status == "in_progress" else self._last_status)
        if item["type"] == "message":
            [part] = item["content"]
            yield self._of_item("response.output_text.done", text=text, logprobs=part["logprobs"])
            yield self._of_item("response.content_part.done", part=part)
        elif item["type"] == "reasoning":
            yield self._of_item("response.reasoning_text.done", text=text)
        else:
            yield self._of_item("response.function_call_arguments.done", name=item["name"], arguments=text)
        index = len(self._output) - 1
        yield self._event("response.output_item.done", output_index=index, item=item)

    @property
    def _last_status(self) -> str:
        """Of the last item, once the answer has ended."""
        return "incomplete" if self._call_is_cut else self._status

    def _finished(self, status: str) -> tuple[dict[str, Any], str]:
        """The last item, with all that was told of it: itself and its text."""
        text, item = "".join(self._texts), self._output[-1]
        own: dict[str, Any]
        if item["type"] == "message":
            own = {"content": [{**item["content"][0], "text": text, "logprobs": self._logprobs}]}
            self._logprobs = []
        elif item["type"] == "reasoning":
            own = {"content": [{"type": "reasoning_text", "text": text}]}
        else:
            own = {"arguments": text}
        self._texts.clear()
        self._output[-1] = {**item, "status": status, **own}
        return self._output[-1], text


def _status(finish_reason: str | None) -> str:
    return "incomplete" if finish_reason == "length" else "completed"


def _plain(value: Any) -> Any:
    return value.model_dump() if hasattr(value, "model_dump") else value
