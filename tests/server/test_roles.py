"""Roles of messages beyond OpenAI's: those that the model's chat template names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from fakes import EOS, ByteTokenizer
from serving import CHAT, serving


class OfNarrators(ByteTokenizer):
    """Its template knows `ipython`, and names `narrator` without writing what one says."""

    chat_template = "{{ messages }} {% if role == 'ipython' %}"
    tool_template = '{% if role == "narrator" %}'

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        return super().apply_chat_template([m for m in messages if m["role"] != "narrator"], **kwargs)


class OfJson(OfNarrators):
    """As Llama's template, which writes what the role `ipython` says as JSON."""

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        written = [{**m, "content": json.dumps(m["content"])} if m["role"] == "ipython" else m for m in messages]
        return super().apply_chat_template(written, **kwargs)


def chat(role: str, content: Any = "4 ") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": role, "content": content}]}


async def test_a_role_that_the_template_names_is_the_templates() -> None:
    async with serving([[65], [EOS]], tokenizer=OfNarrators()) as server:
        await server.post(CHAT, chat("ipython"))
        await server.post("/tokenize", chat("ipython", [{"type": "text", "text": "4 "}]))
        assert bytes(server.runner.prompts[0]).decode() == "user: 2 + 2?\nipython: 4 \nassistant: "


async def test_it_may_write_what_the_role_says_in_another_form() -> None:
    async with serving([[65], [EOS]], tokenizer=OfJson()) as server:
        await server.post(CHAT, chat("ipython", 'a "b"\n'))
        assert bytes(server.runner.prompts[0]).decode() == 'user: 2 + 2?\nipython: "a \\"b\\"\\n"\nassistant: '
        status, error = await server.refused(CHAT, chat("narrator", "2"))  # which is in another message, too
        assert (status, error["param"]) == (400, "messages")


@pytest.mark.parametrize(
    ("role", "words"),
    [
        (
            "wizard",
            "messages[1].role is 'wizard': it must be one of system, developer, user, assistant, tool, or a role",
        ),
        ("narrator", "messages has the role 'narrator', whose content the model's chat template leaves out"),
        ("", "messages[1].role: String should have at least 1 character"),
        ("a" * 65, "messages[1].role: String should have at most 64 characters"),
    ],
)
async def test_any_other_is_a_mistake(role: str, words: str) -> None:
    async with serving([[65], [EOS]], tokenizer=OfNarrators()) as server:
        for path in (CHAT, "/tokenize"):
            status, error = await server.refused(path, chat(role))
            assert status == 400
            assert error["param"] == "messages"
            assert error["message"].startswith(words)
