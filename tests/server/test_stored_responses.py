"""Stored responses: read again, gone on with, cancelled in the background and forgotten; and their store."""

from __future__ import annotations

import asyncio
import resource
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import openai
import pytest

from fakes import EOS
from gates import StepGate
from hamburger.server.api.errors import ApiError
from hamburger.server.config import SettingsError
from hamburger.server.responses.store import ResponseStore, Stored
from responses_api import HELLO, RESPONSES, ROOM, TEXT, client, prompt_of
from serving import MODEL, ByChoice, Served, error_of, serving, typed_events, until


async def test_responses_are_stored_gone_on_with_and_forgotten() -> None:
    async with client() as (api, server):
        first = await api.responses.create(model=MODEL, input="Hi", instructions="Not for later.")
        second = await api.responses.create(model=MODEL, input="More", previous_response_id=first.id)
        assert prompt_of(server) == f"user: Hi\nassistant: {TEXT}\nuser: More\nassistant: "
        assert second.previous_response_id == first.id
        assert (await api.responses.retrieve(first.id)).to_dict() == first.to_dict()
        [item] = (await api.responses.input_items.list(first.id)).data
        assert item.to_dict()["content"] == [{"type": "input_text", "text": "Hi"}]
        await api.responses.delete(first.id)
        for work in (api.responses.retrieve(first.id), api.responses.delete(first.id)):
            with pytest.raises(openai.NotFoundError, match="not stored"):
                await work
        unstored = await api.responses.create(model=MODEL, input="Hi", store=False)
        with pytest.raises(openai.NotFoundError) as told:
            await api.responses.create(model=MODEL, input="Hi", previous_response_id=unstored.id)
        assert told.value.param == "previous_response_id"
        async with api.responses.stream(model=MODEL, input="Hi") as stream:
            streamed = await stream.get_final_response()
        assert (await api.responses.retrieve(streamed.id)).output_text == TEXT


async def test_input_items_come_in_pages_the_last_first() -> None:
    async with client() as (api, server):
        said = [str(number) for number in range(25)]
        asked: Any = [{"role": "user", "content": text} for text in said]
        response = await api.responses.create(model=MODEL, input=asked)

        async def listed(**query: Any) -> list[str]:
            pages = api.responses.input_items.list(response.id, **query)
            return [item.to_dict()["content"][0]["text"] async for item in pages]  # type: ignore[index]

        assert await listed() == said[::-1]
        assert await listed(order="asc", limit=7) == said
        page = await api.responses.input_items.list(response.id)
        assert (len(page.data), page.has_more) == (20, True)
        assert await listed(order="asc", after="item_22") == said[23:]
        for query, param in (({"limit": 0}, "limit"), ({"order": "up"}, "order"), ({"after": "item_25"}, "after")):
            told = await server.client.get(f"{RESPONSES}/{response.id}/input_items", params=query)
            assert told.status_code == 400
            assert error_of(told)["param"] == param
        with pytest.raises(openai.BadRequestError, match="not streamed"):
            await api.responses.retrieve(response.id, stream=True)
        assert (await api.responses.retrieve(response.id, stream=False)).id == response.id


async def test_a_response_is_its_own_clients_only() -> None:
    async with client(api_key="one", settings={"api_key": "one,two"}) as (api, _):
        mine = await api.responses.create(model=MODEL, input="Hi")
        other = api.with_options(api_key="two")
        with pytest.raises(openai.NotFoundError):
            await other.responses.retrieve(mine.id)
        with pytest.raises(openai.NotFoundError):
            await other.responses.create(model=MODEL, input="Hi", previous_response_id=mine.id)


async def test_one_in_the_background_ends_by_itself_or_when_it_is_cancelled() -> None:
    gate = StepGate()
    async with client(runner=ByChoice(HELLO, gate=gate)) as (api, _):
        waiting = await api.responses.create(model=MODEL, input="Hi", background=True)
        assert waiting.status == "in_progress"
        assert (await api.responses.retrieve(waiting.id)).status == "in_progress"
        with pytest.raises(openai.BadRequestError, match="still being written"):
            await api.responses.create(model=MODEL, input="Hi", previous_response_id=waiting.id)
        given_up = await api.responses.create(model=MODEL, input="Hi", background=True)
        deleted = await api.responses.create(model=MODEL, input="Hi", background=True)
        cancelled = await api.responses.cancel(given_up.id)
        assert (cancelled.status, cancelled.output) == ("cancelled", [])
        await api.responses.delete(deleted.id)
        gate.set()
        async with asyncio.timeout(10):
            while (found := await api.responses.retrieve(waiting.id)).status == "in_progress":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (found.status, found.output_text) == ("completed", TEXT)
        assert (await api.responses.cancel(waiting.id)).status == "completed"  # too late
        with pytest.raises(openai.NotFoundError):
            await api.responses.retrieve(deleted.id)
        foreground = await api.responses.create(model=MODEL, input="Hi")
        with pytest.raises(openai.BadRequestError, match="in the background"):
            await api.responses.cancel(foreground.id)


async def ended(server: Served, started: dict[str, Any]) -> dict[str, Any]:
    """The response in the background once it is no more in progress."""
    found = started
    async with asyncio.timeout(10):
        while found["status"] == "in_progress":
            await asyncio.sleep(0.01)
            found = (await server.client.get(f"{RESPONSES}/{started['id']}")).json()
    return found


@pytest.mark.parametrize("breaks", ["cancelled", "failed"])
async def test_what_had_come_of_one_that_broke_off_is_kept(breaks: str) -> None:
    gate = StepGate()
    runner = ByChoice(HELLO, gate=gate, fail_at_step=3)
    async with serving(runner=runner, **ROOM) as server:
        started = await server.ok(RESPONSES, {"input": "Hi", "background": True})
        for _ in range(2):
            gate.step()
        [stream] = server.engine._streams
        await until(lambda: stream.answer.completion_tokens == 7)
        if breaks == "cancelled":
            found = await server.ok(f"{RESPONSES}/{started['id']}/cancel", {})
        else:
            gate.step()
            found = await ended(server, started)
        assert found["status"] == breaks
        [item] = found["output"]
        assert (item["status"], item["content"][0]["text"]) == ("incomplete", TEXT[:7])
        assert found["usage"]["output_tokens"] == 7
        gate.set()


async def test_a_fault_of_ours_in_the_background_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a secret of the server")

    monkeypatch.setattr("hamburger.server.completions.openai_reply.OpenAIReply.add", broken)
    async with serving(HELLO, **ROOM) as server:
        started = await server.ok(RESPONSES, {"input": "Hi", "background": True})
        found = await ended(server, started)
    assert found["status"] == "failed"
    assert "secret" not in found["error"]["message"]


class FullDisk:
    """A database that takes nothing more."""

    in_transaction = True

    def __init__(self, database: Any, fails: tuple[str, ...]) -> None:
        self._database, self._fails = database, fails
        self.close = database.close

    def execute(self, text: str, *values: Any) -> Any:
        if text.startswith(self._fails):
            raise sqlite3.OperationalError("database or disk is full")
        return self._database.execute(text, *values)


@pytest.mark.parametrize("fails", [("INSERT",), ("INSERT", "DELETE")])
async def test_a_full_disk_takes_no_answer_along(
    fails: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stores: list[ResponseStore] = []

    class Noted(ResponseStore):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            stores.append(self)

    monkeypatch.setattr("serving.ResponseStore", Noted)
    gate = StepGate()
    async with serving(runner=ByChoice(HELLO, gate=gate), **ROOM) as server:
        running = await server.ok(RESPONSES, {"input": "Hi", "background": True})
        monkeypatch.setattr(stores[0], "_database", FullDisk(stores[0]._database, fails))
        status, error = await server.refused(RESPONSES, {"input": "Hi", "background": True})
        assert (status, error["param"]) == (503, "background")
        await until(lambda: len([*server.engine._streams]) == 1)  # what nobody will read is given up
        gate.set()
        answer = await server.ok(RESPONSES, {"input": "Hi"})
        assert answer["output"][0]["content"][0]["text"] == TEXT
        streamed = typed_events((await server.post(RESPONSES, {"input": "Hi", "stream": True})).text)
        assert streamed[-1]["type"] == "response.completed"
        await until(lambda: not [*server.engine._streams])
        assert (await server.client.get(f"{RESPONSES}/{answer['id']}")).status_code == 404
        lost = await ended(server, running)  # not in progress for ever
        assert (lost["status"], lost["error"]["message"]) == ("failed", "Its end could not be stored.")
    assert "cannot be stored: database or disk is full" in caplog.text


@contextmanager
def full_disk(path: Path) -> Iterator[None]:
    """What is written to the store of this path cannot grow its files."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.with_name(f"{path.name}-wal").stat().st_size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_what_a_full_disk_does_not_delete_is_still_there(tmp_path: Path) -> None:
    path, ended = tmp_path / "responses", list[str]()
    store = ResponseStore(1000, path)
    store.put(stored("a", 100))
    store.put(stored("running", cancel=lambda: ended.append("running")))
    with full_disk(path):
        for name in ("a", "running"):
            with pytest.raises(ApiError) as told:
                store.delete(name, "")
            assert (told.value.status, told.value.code) == (503, "response_not_deleted")
        store.put(stored("b", 100))
        store.put(stored("c", 900))  # which would take the room of a
    assert [name in store for name in ("a", "running", "b", "c")] == [True, True, False, False]
    assert store.get("a", "").response == {"id": "a", "x": "a" * 100}
    assert store.get("running", "").cancel is not None
    assert not ended
    for name in ("a", "running"):
        store.delete(name, "")
    assert ended == ["running"]
    store.put(stored("d", 900))  # all of the room is there again
    assert len(store) == 1


def test_a_response_that_the_disk_does_not_give_is_a_503(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = ResponseStore(1000, tmp_path / "responses")
    store.put(stored("a", 100))
    database, broken = store._database, Mock()
    store._database = broken
    broken.execute.side_effect = sqlite3.OperationalError("disk I/O error")
    with pytest.raises(ApiError, match="cannot be read now: try again later") as told:
        store.get("a", "")
    assert (told.value.status, told.value.code) == (503, "response_not_read")
    assert "The response a cannot be read: disk I/O error" in caplog.text
    store._database = database
    assert store.get("a", "").response["id"] == "a"
    store.close()


async def test_a_response_that_the_disk_does_not_take_says_that_it_is_not_stored(tmp_path: Path) -> None:
    path = tmp_path / "responses"
    async with client(settings={"response_file": path}) as (api, _):
        with full_disk(path):
            lost = await api.responses.create(model=MODEL, input="Hi")
        kept = await api.responses.create(model=MODEL, input="Hi")
        assert [response.to_dict()["store"] for response in (lost, kept)] == [False, True]
        with pytest.raises(openai.NotFoundError):
            await api.responses.retrieve(lost.id)
        assert (await api.responses.retrieve(kept.id)).to_dict()["store"] is True


async def test_a_response_that_is_not_deleted_is_one_typed_error(tmp_path: Path) -> None:
    path = tmp_path / "responses"
    async with client(settings={"response_file": path}) as (api, _):
        first = await api.responses.create(model=MODEL, input="Hi")
        with full_disk(path), pytest.raises(openai.APIStatusError, match="still stored") as told:
            await api.responses.delete(first.id)
        assert (told.value.status_code, told.value.code) == (503, "response_not_deleted")
        assert (await api.responses.retrieve(first.id)).output_text == TEXT
        await api.responses.delete(first.id)


def stored(name: str, size: int = 0, owner: str = "", **fields: Any) -> Stored:
    return Stored({"id": name, "x": "a" * size}, [], [], owner=owner, **fields)


def test_a_file_keeps_them_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "responses"
    store = ResponseStore(1000, path)
    store.put(stored("a", 100, owner="secret-hash"))
    store.put(stored("running", cancel=lambda: None))
    with pytest.raises(SettingsError, match="response_file"):
        ResponseStore(1000, path)  # another server's
    store.close()
    store = ResponseStore(1000, path)
    assert store.get("a", "secret-hash").response == {"id": "a", "x": "a" * 100}
    with pytest.raises(ApiError):
        store.get("a", "another key")
    broken = store.get("running", "")
    assert (broken.response["status"], broken.response["error"]["code"]) == ("failed", "server_error")
    assert broken.cancel is None
    for number in range(3):
        store.put(stored(f"r{number}", 300))
    assert ("a" in store, "r2" in store) == (False, True)  # its bound counts what was there
    store.close()
    assert path.stat().st_mode & 0o077 == 0
    path.write_bytes(b"no database" * 100)
    for wrong in (path, tmp_path, tmp_path / "missing" / "file"):
        with pytest.raises(SettingsError, match="response_file"):
            ResponseStore(1000, wrong)


async def test_a_conversation_goes_on_after_a_restart(tmp_path: Path) -> None:
    settings = {"response_file": tmp_path / "responses"}
    async with serving([[*b"hello"], [EOS]], settings=settings) as server:
        first = await server.ok(RESPONSES, {"input": "hi"})
    async with serving([[*b"again"], [EOS]], settings=settings) as server:
        assert (await server.client.get(f"{RESPONSES}/{first['id']}")).json() == first
        await server.ok(RESPONSES, {"input": "more", "previous_response_id": first["id"]})
        assert b"hello" in bytes(server.runner.prompts[-1])


async def test_where_nothing_is_stored_nothing_is_said_to_be() -> None:
    async with client(settings={"response_store": 0}) as (api, server):
        response = await api.responses.create(model=MODEL, input="Hi")
        assert (response.output_text, response.to_dict()["store"]) == (TEXT, False)
        with pytest.raises(openai.BadRequestError, match="stores no responses") as told:
            await api.responses.create(model=MODEL, input="Hi", background=True)
        assert told.value.param == "background"
        assert len(server.runner.prompts) == 1


def test_the_oldest_make_room_but_for_those_that_are_written() -> None:
    store = ResponseStore(1000)
    store.put(stored("running", 300, cancel=lambda: None))
    for number in range(5):
        store.put(stored(f"r{number}", 300))
    assert [name in store for name in ("running", "r2", "r3", "r4")] == [True, False, True, True]
    store.put(stored("r4", 10))  # in its own place
    store.put(stored("small"))
    assert len(store) == 4
    store.put(stored("too large", 2000))
    assert "too large" not in store
    assert len(store) == 4
    for name in ("running", "r3", "r4", "small"):
        store.delete(name, "")
    with pytest.raises(ApiError):
        store.get("r4", "")
    store.put(stored("r9", 900))  # all of the room is there again
    assert "r9" in store
