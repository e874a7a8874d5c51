"""The ranges that the OpenAPI document shows are those that the server keeps, and what it names is in it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from fakes import EOS
from serving import CHAT, COMPLETIONS, HELLO, error_of, serving, split

PROMPTS: dict[str, dict[str, Any]] = {CHAT: {"messages": HELLO}, COMPLETIONS: {"prompt": "ab"}}
SCHEMAS = {CHAT: "ChatBody", COMPLETIONS: "CompletionBody"}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_values_beyond_a_shown_range_are_refused_and_its_ends_are_taken(path: str) -> None:
    async with serving([*split("hello", 5), [EOS]]) as served:
        document = (await served.client.get("/openapi.json")).json()
        properties = document["components"]["schemas"][SCHEMAS[path]]["properties"]
        values = {name: field.get("anyOf", [field])[0] for name, field in properties.items()}
        ranges = {name: value for name, value in values.items() if {"minimum", "exclusiveMinimum"} & value.keys()}
        assert {"temperature", "top_p", "seed", "n", "confidence", "repetition_penalty"} <= ranges.keys()
        for name, shown in ranges.items():
            body = PROMPTS[path] | {"max_tokens": 4} | ({"logprobs": True} if name == "top_logprobs" else {})
            for bound, outwards in (("minimum", -1), ("maximum", 1), ("exclusiveMinimum", 0)):
                if bound in shown:
                    refused = await served.client.post(path, json=body | {name: shown[bound] + outwards})
                    assert refused.status_code == 400, refused.text
                    assert error_of(refused)["param"] == name
            for bound in ("minimum", "maximum"):
                # 128 answers, or as many tokens as there are at least, are another test's business.
                if bound in shown and name not in ("n", "min_tokens"):
                    taken = await served.client.post(path, json=body | {name: shown[bound]})
                    assert taken.status_code == 200, taken.text


async def test_every_shape_that_is_named_is_described_and_errors_are_json_everywhere() -> None:
    async with serving() as served:
        document = (await served.client.get("/openapi.json")).json()
    named = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document)))
    assert named <= document["components"]["schemas"].keys()
    answers = [method["responses"]["4XX"]["content"] for path in document["paths"].values() for method in path.values()]
    assert len(answers) > 15
    for content in answers:
        assert content == {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}}
