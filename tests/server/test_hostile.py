"""Requests that are meant to hurt: each a clear 4xx at once, in the one shape, and the server goes on."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from fakes import EOS
from serving import CHAT, COMPLETIONS, HELLO, Served, error_of, serving

DIGITS = "9" * 400


def completion(rest: str) -> str:
    return '{"prompt": "a", ' + rest + "}"


def chat(**fields: Any) -> str:
    return json.dumps({"messages": HELLO, **fields})


def schema(value: Any) -> str:
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": value}})


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"items": value}
    return value


def chained(length: int) -> dict[str, Any]:
    """Each definition refers to the next one: followed by recursion, that ends a process."""
    places = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(length)}
    return {"$defs": {**places, f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def rules(length: int) -> str:
    return "\n".join(["start: r0", *(f'r{i}: r{i + 1} "x"' for i in range(length)), f'r{length}: "x"'])


def tool(parameters: dict[str, Any], *, strict: bool = False) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}


CASES: dict[str, tuple[str, str | bytes, int]] = {
    "10 MB": (COMPLETIONS, json.dumps({"prompt": "a b " * 2_500_000}), 413),
    "a million characters": (COMPLETIONS, json.dumps({"prompt": "a" * 1_000_000}), 400),
    "a million characters of chat": (CHAT, chat(messages=[{"role": "user", "content": " " * 1_000_000}]), 400),
    "deep arrays": (COMPLETIONS, '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}", 400),
    "deep objects": (COMPLETIONS, '{"a":' * 100_000 + "1" + "}" * 100_000, 400),
    "deep schema": (CHAT, schema(nested(180)), 400),
    "lone surrogate": (COMPLETIONS, '{"prompt": "\\ud800"}', 400),
    "lone surrogate in a stop": (COMPLETIONS, completion('"stop": ["\\udc00"]'), 400),
    "raw NUL": (COMPLETIONS, b'{"prompt": "a\x00b"}', 400),
    "not UTF-8": (COMPLETIONS, b'{"prompt": "\xff"}', 400),
    "huge seed": (COMPLETIONS, completion(f'"seed": {DIGITS}'), 400),
    "huge n": (COMPLETIONS, completion(f'"n": {DIGITS}'), 400),
    "huge max_tokens": (COMPLETIONS, completion(f'"max_tokens": {DIGITS}'), 400),
    "huge float": (COMPLETIONS, completion(f'"temperature": {DIGITS}'), 400),
    "huge token id": (COMPLETIONS, '{"prompt": [' + DIGITS + "]}", 400),
    "huge bias key": (COMPLETIONS, completion('"logit_bias": {"' + DIGITS + '": 1}'), 400),
    "more digits than numbers have": (COMPLETIONS, completion(f'"max_tokens": {"9" * 6000}'), 400),
    "as many digits as are read": (COMPLETIONS, completion(f'"max_tokens": {"9" * 4300}'), 400),
    "as many digits as are read, of a chat": (CHAT, chat(max_completion_tokens=10**4300 - 1), 400),
    "10,000 stop strings": (COMPLETIONS, completion('"stop": ' + json.dumps([f"s{i}" for i in range(10_000)])), 400),
    "stop strings of 30,000 characters": (COMPLETIONS, completion('"stop": ' + json.dumps(["s" * 30_000] * 256)), 400),
    "a million answers": (COMPLETIONS, json.dumps({"prompt": ["a"] * 8_000, "best_of": 128}), 400),
    "a variable for the template that is none": (CHAT, chat(chat_template_kwargs={"self": 1}), 400),
    "a chain of references": (CHAT, schema(chained(3000)), 400),
    "a chain of references in a tool": (CHAT, chat(tools=[tool(chained(3000))], tool_choice="required"), 400),
    "a chain of rules": (COMPLETIONS, completion('"structured_outputs": ' + json.dumps({"grammar": rules(3000)})), 400),
    "a chain of references in a grammar": (
        COMPLETIONS,
        completion('"structured_outputs": ' + json.dumps({"grammar": f"start: %json {json.dumps(chained(3000))}"})),
        400,
    ),
    "a regular expression of brackets": (
        COMPLETIONS,
        completion('"structured_outputs": ' + json.dumps({"regex": "(" * 30_000 + ")" * 30_000})),
        400,
    ),
    "129 tools": (CHAT, chat(tools=[tool({})] * 129), 400),
    "a long salt": (COMPLETIONS, completion('"cache_salt": "' + "a" * 257 + '"'), 400),
    "10,000 prompts": (COMPLETIONS, json.dumps({"prompt": ["a"] * 10_000}), 400),
    "100,000 choices in an enum": (CHAT, schema({"enum": [f"x{i}" for i in range(100_000)]}), 400),
    "a multiple of much": (CHAT, schema({"type": "integer", "multipleOf": 999_983}), 400),
    "a multiple of much in a tool": (CHAT, chat(tools=[tool({"multipleOf": 999_983})], tool_choice="required"), 400),
    "a multiple of much in a strict tool": (
        CHAT,
        chat(tools=[tool({"properties": {"a": {"type": "integer", "multipleOf": 999_983}}}, strict=True)]),
        400,
    ),
    "a chain of references in a strict tool": (CHAT, chat(tools=[tool(chained(3000), strict=True)]), 400),
    "250,000 properties": (CHAT, schema({"properties": {f"p{i}": {} for i in range(250_000)}}), 400),
    "3 MB of choices": (
        COMPLETIONS,
        completion('"structured_outputs": ' + json.dumps({"choice": [f"v{i}" * 100 for i in range(5000)]})),
        400,
    ),
    "objects without end": (COMPLETIONS, completion('"x": [' + "{}," * 40_000 + "0]"), 400),
    "names without end": (COMPLETIONS, completion('"x": {' + ",".join(f'"{i}":1' for i in range(110_000)) + "}"), 400),
    "wrong ids without end": (COMPLETIONS, completion('"stop_token_ids": [' + '"a",' * 200_000 + "1]"), 400),
    "10,001 biases": (COMPLETIONS, completion('"logit_bias": ' + json.dumps({f"{i}": 1 for i in range(10_001)})), 400),
    "biases for 128 answers": (
        COMPLETIONS,
        completion('"n": 128, "logit_bias": ' + json.dumps({f"{i}": 1 for i in range(5000)})),
        400,
    ),
    "empty": (COMPLETIONS, b"", 400),
    "a list": (CHAT, b"[]", 400),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def attacked() -> AsyncIterator[Served]:
    """One server for all of it, as in life."""
    async with serving([[65], [EOS]]) as server:
        yield server


@pytest.mark.parametrize("name", CASES)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_clear_refusal_in_under_a_second(attacked: Served, name: str) -> None:
    path, data, status = CASES[name]
    await attacked.post(CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}})  # all is loaded
    start = time.monotonic()
    response = await attacked.client.post(path, content=data, headers={"Content-Type": "application/json"})
    seconds = time.monotonic() - start
    assert response.status_code == status
    assert len(error_of(response)["message"]) < 2000
    assert seconds < 10  # nothing hangs; on a machine of its own all are below a second or little more
    assert (await attacked.complete(max_tokens=1))["usage"]["completion_tokens"] == 1


async def test_references_within_the_limit_pass() -> None:
    """Also such as go in circles, or lead to nothing."""
    async with serving([[*b"[]"], [EOS]]) as server:
        for value in (chained(300), {"type": "array", "items": {"$ref": "#"}}):
            response = await server.client.post(
                CHAT, content=schema(value), headers={"Content-Type": "application/json"}
            )
            assert response.status_code == 200, response.text
        response = await server.client.post(
            CHAT, content=schema({"$ref": "#/nothing/7"}), headers={"Content-Type": "application/json"}
        )
        assert response.status_code == 400


async def test_tokenize_takes_no_more_than_it_should() -> None:
    async with serving() as server:
        for path, body, param in (
            ("/tokenize", {"prompt": "a" * 1_000_001}, "prompt"),
            ("/tokenize", {"messages": [{"role": "user", "content": "a" * 1_000_001}]}, "messages"),
            ("/detokenize", {"tokens": [97] * 250_001}, "tokens"),
        ):
            status, error = await server.refused(path, body)
            assert (status, error["param"]) == (400, param)
        told = await server.ok("/tokenize", {"prompt": "a" * 10_000, "return_token_strs": True})
        assert told["count"] == len(told["token_strs"]) >= 10_000


async def test_what_is_odd_but_right_passes() -> None:
    async with serving([[65], [EOS]]) as server:
        for rest in ('"top_k": ' + DIGITS, '"stop": []', '"prompt": "a\\u0000b"', '"x": ' + "[" * 50 + "]" * 50):
            response = await server.client.post(
                COMPLETIONS, content=completion(rest), headers={"Content-Type": "application/json"}
            )
            assert response.status_code == 200, response.text


async def test_as_many_stop_strings_as_may_be_hold_nobody_up() -> None:
    """They are made ready once for all choices, and looked for at once, however many there are."""
    stop = ["a" * 70 + f"{i:03}" for i in range(256)]
    async with serving(*[[*[[97]] * 19, [EOS]]] * 32) as server:
        body = {"prompt": "a", "stop": stop, "n": 32, "max_tokens": 20}
        asked = asyncio.create_task(server.client.post(COMPLETIONS, json=body))
        gaps = []
        while not asked.done():
            start = time.monotonic()
            assert (await server.client.get("/health")).status_code == 200
            await asyncio.sleep(0.001)
            gaps.append(time.monotonic() - start)
        assert (await asked).status_code == 200
        assert max(gaps) < 5  # on a machine of its own some .05
