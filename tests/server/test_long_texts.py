"""Texts that take long to tokenize: a few at once, for clients that wait for them, and none without end."""

from __future__ import annotations

import asyncio
import threading
import weakref
from functools import partial
from typing import Any

import pytest

from fakes import EOS, ByteTokenizer
from hamburger.engine.types.errors import QueueFull
from hamburger.server.api import prompts
from hamburger.server.api.errors import ApiError
from hamburger.server.api.long_texts import LongTexts
from hamburger.server.operation.request_log import CLIENT_LEFT
from serving import CHAT, COMPLETIONS, serving, until


class Client:
    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}


async def test_two_at_once_and_none_for_clients_that_left() -> None:
    go_on, begun, lock = threading.Event(), list[int](), threading.Lock()

    def work(number: int) -> int:
        with lock:
            begun.append(number)
        assert go_on.wait(20)
        return number

    texts, clients = LongTexts(2, most_characters=600), [Client() for _ in range(7)]
    waiting = [
        asyncio.create_task(texts.do(client.receive, lambda number=i: work(number), 100))  # type: ignore[misc]
        for i, client in enumerate(clients)
    ]
    with pytest.raises(QueueFull, match="600 characters of long texts are tokenized or wait for it"):
        await waiting.pop()
    await until(lambda: len(begun) == 2)
    clients[3].left.set()
    with pytest.raises(ApiError) as refused:
        await waiting[3]
    assert refused.value.status == CLIENT_LEFT
    await asyncio.to_thread(lambda: None)  # the loop's own threads are free
    text = set("abc")
    seen, client = weakref.ref(text), Client()
    client.left.set()
    with pytest.raises(ApiError):
        await texts.do(client.receive, partial(len, text), 3)
    del text
    assert seen() is None  # though its turn has not come
    assert sorted(begun) == [0, 1]
    go_on.set()
    assert [await waiting[i] for i in (0, 1, 2, 4, 5)] == [0, 1, 2, 4, 5]
    assert 3 not in begun
    texts.close()


class Counted(ByteTokenizer):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        self.texts.append(text)
        return super().encode(text, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_what_is_cut_is_not_endless(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(prompts, "MAX_TOKENIZED", 3000)
    tokenizer = Counted()
    async with serving([[120], [EOS]], tokenizer=tokenizer, max_model_len=99) as server:
        for number, fits in ((2000, True), (3001, False)):
            text = "a" * number
            asked = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
            body = {**asked, "max_tokens": 2, "truncate_prompt_tokens": 9}
            if fits:
                assert (await server.ok(path, body))["usage"]["prompt_tokens"] == 9
                continue
            status, error = await server.refused(path, body)
            assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", next(iter(asked)))
            assert "are read to be cut: shorten it" in error["message"]
    assert len(tokenizer.texts) == 1
