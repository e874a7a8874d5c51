"""Which requests go to the same engine: those of a session, or those that begin alike."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hamburger.server.replicas.affinity import affinity_key
from hamburger.server.replicas.scale_options import Affinity
from hamburger.server.responses.store import ResponseStore
from serving import CHAT

SYSTEM, HELLO = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}


def key(fields: Any, affinity: Affinity = "prefix", path: str = CHAT, **headers: str) -> str | None:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return affinity_key(path, named, dump(fields), affinity)


def dump(fields: Any) -> bytes:
    return fields if isinstance(fields, bytes) else json.dumps(fields).encode()


def test_all_turns_of_a_chat_have_one_key() -> None:
    first = key({"messages": [SYSTEM, HELLO]})
    answered = [{"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Bye."}]
    assert first is not None
    assert key({"messages": [SYSTEM, HELLO, *answered], "temperature": 0.5}) == first
    assert key({"messages": [SYSTEM, {**HELLO, "content": "Hola!"}]}) != first
    assert key({"messages": [HELLO]}) != first
    assert key({"messages": [SYSTEM, HELLO], "tools": [{"type": "function"}]}) != first


def test_other_forms_of_a_chat_have_one_key_too() -> None:
    first = key({"input": [HELLO], "instructions": "Be brief."})
    assert first is not None
    assert key({"input": [HELLO, {"type": "reasoning"}, HELLO], "instructions": "Be brief."}) == first
    assert key({"input": "Hello!", "instructions": "Be brief."}) == first
    assert key({"input": "Hello!"}) != first
    assert key({"messages": [HELLO], "system": "Be brief."}) != key({"messages": [HELLO], "system": "Be long."})


def test_a_chat_without_a_user_has_a_key_too() -> None:
    assert key({"messages": [SYSTEM]}) not in (None, key({"messages": [{**SYSTEM, "content": "?"}]}))


def test_completions_that_begin_alike_have_one_key() -> None:
    long = "x" * 600
    assert key({"prompt": long + "a"}) == key({"prompt": long + "b"}) == key({"prompt": [long, "other"]})
    assert key({"prompt": "a" + long}) != key({"prompt": "b" + long})
    assert key({"prompt": [7] * 130}) == key({"prompt": [7] * 131}) == key({"prompt": [[7] * 131, [8]]})
    assert key({"prompt": [8, *[7] * 130]}) != key({"prompt": [7] * 131})


@pytest.mark.parametrize(
    "fields",
    [
        {"a": dict.fromkeys(map(str, range(100_001)), 1)},
        {"tools": [[]] * 30_001},
        {"tools": [1] * 300_001},
        b"{",
        b"[]",
    ],
)
def test_what_a_replica_refuses_unread_has_none(fields: Any) -> None:
    assert key({"messages": [HELLO], **fields} if isinstance(fields, dict) else fields) is None


def test_a_session_comes_first() -> None:
    session = key({"prompt": "a"}, x_session_id="me")
    assert session == key({"prompt": "b"}, x_session_id="me") == key(b"", x_session_id="me")
    assert session not in (key({"prompt": "a"}), key({"prompt": "a"}, x_session_id="you"))
    assert session == key({"prompt": "b"}, "session", x_session_id="me")


@pytest.mark.parametrize(
    "fields", [b"", b"{", [1], {}, {"prompt": None}, {"messages": "x", "prompt": 7}, b"[" * 100_000]
)
def test_what_says_nothing_has_no_key(fields: Any) -> None:
    assert key(fields) is None


def test_other_affinities_look_at_less() -> None:
    assert key({"prompt": "a"}, "session") is None
    assert key({"prompt": "a"}, "none", x_session_id="me") is None


@pytest.mark.parametrize("affinity", ["prefix", "session", "none"])
def test_who_stored_a_response_is_named(affinity: Affinity) -> None:
    stored = ResponseStore(0, place="cvnotb69").new_id()
    for path, fields in [
        (f"/v1/responses/{stored}", b""),
        (f"/v1/responses/{stored}/cancel", b"{}"),
        ("/v1/responses", {"input": "And?", "previous_response_id": stored}),
        ("/v1/responses/input_tokens", {"input": "And?", "previous_response_id": stored}),
    ]:
        assert key(fields, affinity, path, x_session_id="me") == "@cvnotb69"


@pytest.mark.parametrize(
    "stored",
    [pytest.param(ResponseStore(0).new_id(), id="new"), "resp_", "resp_x_y", 7, ["a"], None, "@cvnotb69"],
)
def test_other_names_of_responses_say_nothing(stored: Any) -> None:
    first = key({"input": "And?"}, path="/v1/responses")
    assert first is not None
    assert key({"input": "And?", "previous_response_id": stored}, path="/v1/responses") == first
    assert key(b"", path=f"/v1/responses/{stored}") is None
