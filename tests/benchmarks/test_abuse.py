"""benchmarks/abuse.py: what it draws, and how it judges."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from typing import Any

import pytest

from abusing.attack import why_wrong
from abusing.bodies import BASES, BOMBS, Bodies
from serving import serving

ERROR = {"message": "no", "type": "t", "param": None, "code": None}


async def document() -> Any:
    async with serving([[97]]) as server:
        return (await server.client.get("/openapi.json")).json()


async def test_a_number_and_a_seed_give_the_same_body_again() -> None:
    found = await document()
    first, second, other = Bodies(found, 1), Bodies(found, 1), Bodies(found, 2)
    drawn = [first.draw(i) for i in range(3000)]
    assert drawn == [second.draw(i) for i in range(3000)]
    assert drawn != [other.draw(i) for i in range(3000)]
    assert {attack.path for attack in drawn} == set(BASES)
    kinds = Counter(attack.kind for attack in drawn)
    assert min(kinds["by the schema"], kinds["one thing is odd"]) > 900
    assert {"bomb", "cut", "no UTF-8", "noise", "no JSON number", "too deep", "twice", "another type"} < set(kinds)
    from_schema = [attack for attack in drawn if attack.kind == "by the schema" and attack.path.startswith("/v1/")]
    answers = [(attack, json.loads(attack.data)) for attack in from_schema]
    has_end = Counter((is_bounded(body), attack.leaves is None) for attack, body in answers)
    assert has_end[False, True] == 0 < has_end[False, False]
    assert 0.01 < has_end[True, False] / has_end.total() < 0.06
    assert all(not isinstance(n := body.get("n"), int) or n <= 3 or n >= 2**20 for _, body in answers)
    assert all(json.dumps(bomb(random.Random(1))) for bomb in BOMBS)


def is_bounded(body: dict[str, Any]) -> bool:
    return any(body.get(name) is not None for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"))


async def test_fields_may_be_left_out() -> None:
    bodies = Bodies(await document(), 1, without={"priority"})
    drawn = [bodies.draw(i).data for i in range(500)]
    assert not any(b"priority" in data for data in drawn)
    assert any(b"min_tokens" in data for data in drawn)


@pytest.mark.parametrize(
    ("status", "text", "named"),
    [
        (200, '{"choices": []}', None),
        (200, 'data: {"a": 1}\n\ndata: [DONE]\n\n', None),
        (200, 'data: {"a": 1}\n\n', "without an end"),
        (200, "event: a\ndata: {}\n\n", "without an end"),
        (200, "event: a\ndata: {}\n\nevent: message_stop\ndata: {}\n\n", None),
        (200, "event: a\ndata: {}\n\nevent: response.completed\ndata: {}\n\n", None),
        (400, json.dumps({"error": ERROR}), None),
        (400, "Bad Request", "without the error's shape"),
        (400, json.dumps({"detail": []}), "without the error's shape"),
        (400, json.dumps({"error": {**ERROR, "message": "x" * 5000}}), "5[0-9]+ characters"),
        (400, json.dumps({"error": {**ERROR, "message": "<a.B object at 0x7f>"}}), "insides"),
        (503, json.dumps({"error": {**ERROR, "code": "queue_full"}}), None),
        (503, json.dumps({"error": {**ERROR, "code": "engine_unavailable"}}), "503: no"),
        (500, json.dumps({"error": ERROR}), "500: no"),
    ],
)
def test_what_is_wrong_with_an_answer(status: int, text: str, named: str | None) -> None:
    found = why_wrong(status, text)
    if named is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(named, found)
