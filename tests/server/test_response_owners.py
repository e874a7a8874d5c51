"""Whose stored responses are: their key's, whatever place it has among the keys, over restarts."""

from __future__ import annotations

import hashlib
import logging
import sqlite3
from pathlib import Path

import pytest

from fakes import EOS
from hamburger.server.responses.store import ResponseStore
from responses_api import RESPONSES
from serving import serving

SCRIPT = [[*b"hello"], [EOS]]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_a_client_never_reads_what_another_stored_when_keys_come_and_go(tmp_path: Path) -> None:
    settings = {"response_file": tmp_path / "responses"}
    async with serving(SCRIPT, settings={**settings, "api_key": "alice,bob"}) as server:
        made = (await server.post(RESPONSES, {"input": "mine"}, headers=bearer("alice"))).json()
    path = f"{RESPONSES}/{made['id']}"
    assert not [path for path in tmp_path.iterdir() if b"alice" in path.read_bytes()]  # noqa: ASYNC240
    async with serving(SCRIPT, settings={**settings, "api_key": "bob"}) as server:
        for theirs in (path, f"{path}/input_items"):
            response = await server.client.get(theirs, headers=bearer("bob"))
            assert (response.status_code, response.json()["error"]["param"]) == (404, "response_id")
        assert (await server.client.delete(path, headers=bearer("bob"))).status_code == 404
        goes_on = {"input": "more", "previous_response_id": made["id"]}
        assert (await server.post(RESPONSES, goes_on, headers=bearer("bob"))).status_code == 404
    async with serving(SCRIPT, settings=settings) as server:  # without keys
        assert (await server.client.get(path)).status_code == 404
    async with serving(SCRIPT, settings={**settings, "api_key": "carol,bob,alice"}) as server:
        assert (await server.client.get(path, headers=bearer("alice"))).json() == made
        assert (await server.client.get(path, headers=bearer("carol"))).status_code == 404


def test_what_a_file_of_the_first_form_says_of_owners_is_not_believed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "responses"
    ResponseStore(1000, path).close()
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 0")
        for name, number in (("of nobody", ""), ("of the first key", "1"), ("of the second", "2")):
            row = name, hashlib.sha256(number.encode()).hexdigest(), b'[{"id":"x"},[],[]]'
            database.execute("INSERT INTO responses (id, owner, is_written, text) VALUES (?, ?, 1, ?)", row)
    database.close()
    with caplog.at_level(logging.WARNING):
        store = ResponseStore(1000, path)
    assert "2 responses of an earlier version are dropped" in caplog.text
    assert store.get("of nobody", "").response == {"id": "x"}
    assert len(store) == 1
    store.close()
    again = ResponseStore(1000, path)
    assert len(again) == 1
    again.close()
