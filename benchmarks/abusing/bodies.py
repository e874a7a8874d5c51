"""Bodies that a careless or a hostile client may send, drawn from a server's own OpenAPI document.

Each is drawn from (seed, number) alone, so a finding can be sent again. What would only be long is kept short: few
tokens, few choices, and clients leave that ask for an answer as long as the context.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

JSON = "application/json"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 3},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1, 2]},
}
MOST = {"max_tokens": 6, "max_completion_tokens": 6, "max_output_tokens": 6, "n": 3, "best_of": 3, "min_tokens": 6}
ODD: list[Any] = [
    None, True, -1, 0, 1, 2, 3.5, -0.0, 1e308, -1e308, 2**31, 2**63, -(2**63) - 1, 10**40, "", "x", "\x00", "\ud800",
    "\u202e", "é" * 40, "a" * 5000, [], [[]], [None], {}, {"": 0}, {"a": {"b": [1, "c"]}}, [0] * 500, ["a", 1, None],
]  # fmt: skip
# What takes long, or much, where nothing bounds it.
BOMBS: list[Callable[[random.Random], dict[str, Any]]] = [
    lambda draw: {"structured_outputs": {"json": {"type": "integer", "multipleOf": draw.randrange(50_000, 99_999)}}},
    lambda draw: {"structured_outputs": {"json": {"type": "integer", "multipleOf": 999_983}}},
    lambda draw: {
        "structured_outputs": {
            "json": {"anyOf": [{"type": "integer", "multipleOf": draw.randrange(50_000, 99_999)} for _ in range(10)]}
        }
    },
    lambda draw: {"structured_outputs": {"regex": f"(a|b)*a(a|b){{{draw.randrange(10, 30)}}}"}},
    lambda draw: {"structured_outputs": {"regex": f"\\p{{L}}{{1,{draw.randrange(1000, 4000)}}}"}},
    lambda draw: {"structured_outputs": {"choice": [f"v{draw.random()}" for _ in range(3000)]}},
    lambda draw: {"structured_outputs": {"grammar": 'start: %json {"type": "integer", "multipleOf": 999983}'}},
    lambda draw: {"stop": ["a" * draw.randrange(1, 90) + str(i) for i in range(200)], "n": 3},
    lambda draw: {"logit_bias": {str(i): 1 for i in range(2000)}},
    lambda draw: {"prompt": "a " * 400, "echo": True, "logprobs": 5, "n": 3},
    lambda draw: {"prompt": [[5] * 100 for _ in range(20)], "max_tokens": 1},
]


@dataclass(frozen=True, slots=True)
class Attack:
    """One request. kind: for the report. leaves: seconds after which its client goes, or None."""

    number: int
    kind: str
    path: str
    data: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    leaves: float | None = None


class Bodies:
    """document: what /openapi.json answers. without: fields of a body that are not sent."""

    def __init__(self, document: Mapping[str, Any], seed: int, without: Set[str] = frozenset()) -> None:
        self._seed, self._without = seed, without
        self._definitions = document.get("components", {}).get("schemas", {})
        self._paths = {
            path: self._resolved(post["requestBody"]["content"][JSON]["schema"])
            for path, methods in document["paths"].items()
            if (post := methods.get("post")) and path in BASES
        }

    def draw(self, number: int) -> Attack:
        draw = random.Random(f"{self._seed} {number}")
        path = draw.choices(list(self._paths), [4 if path.startswith("/v1/") else 1 for path in self._paths])[0]
        leaves = draw.expovariate(20) if draw.random() < 0.03 else None
        if draw.random() < 0.002:
            path = "/v1/completions"
            body = {**BASES[path], "max_tokens": 3, **draw.choice(BOMBS)(draw)}
            return Attack(number, "bomb", path, json.dumps(body).encode(), {"Content-Type": JSON}, leaves)
        body = self._body(draw, path)
        kind = "by the schema"
        if draw.random() < 0.4:
            kind, body = "one thing is odd", self._spoilt(draw, body)
        if _has_no_end(body):
            leaves = leaves or draw.uniform(0.05, 1)
        data = json.dumps(_kept_short(body)).encode()
        headers = {"Content-Type": JSON}
        if draw.random() < 0.08:
            kind, data, headers = self._broken(draw, data)
        return Attack(number, kind, path, data, headers, leaves)

    def _body(self, draw: random.Random, path: str) -> dict[str, Any]:
        body = copy.deepcopy(BASES[path])
        properties = self._paths[path].get("properties", {})
        for name in draw.sample(sorted(properties.keys() - self._without), min(len(properties), draw.randrange(7))):
            body[name] = self.value(draw, properties[name])
        if path in (CHAT, COMPLETIONS) and "max_tokens" not in body:
            body["max_tokens"] = 3
        return body

    def value(self, draw: random.Random, schema: Mapping[str, Any], depth: int = 0) -> Any:
        """Mostly one that the schema allows."""
        schema = self._resolved(schema)
        if draw.random() < 0.03 or depth > 6:
            return copy.deepcopy(draw.choice(ODD))
        for name in ("anyOf", "oneOf", "allOf"):
            if name in schema:
                return self.value(draw, draw.choice(schema[name]), depth + 1)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return draw.choice(schema["enum"])
        match schema.get("type"):
            case "string":
                return draw.choice(["", "a", "Hi there", "user", "auto", "é", "x" * draw.randrange(300)])
            case "integer":
                return draw.choice([0, 1, 2, draw.randrange(-3, 50), draw.randrange(-(2**40), 2**40)])
            case "number":
                return draw.choice([0, 1, 0.5, draw.uniform(-2, 3), draw.uniform(-1e9, 1e9)])
            case "boolean":
                return draw.random() < 0.5
            case "null":
                return None
            case "array":
                items = schema.get("items", {})
                return [self.value(draw, items, depth + 1) for _ in range(draw.choice([0, 1, 1, 2, 5]))]
        return self._object(draw, schema, depth)

    def _object(self, draw: random.Random, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        found = {}
        required = schema.get("required", [])
        for name, of in schema.get("properties", {}).items():
            if name in required or draw.random() < 0.3:
                found[name] = self.value(draw, of, depth + 1)
        if schema.get("additionalProperties") not in (None, False):
            of = schema["additionalProperties"]
            found[str(draw.randrange(100))] = self.value(draw, of if isinstance(of, dict) else {}, depth + 1)
        return found

    def _resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        while "$ref" in schema:
            schema = self._definitions[schema["$ref"].rpartition("/")[2]]
        return schema

    def _spoilt(self, draw: random.Random, body: dict[str, Any]) -> Any:
        """One place of it is another thing, or not there."""
        if draw.random() < 0.05:
            return copy.deepcopy(draw.choice(ODD))
        if draw.random() < 0.1:
            name = draw.choice(["", "no_such_field", "__class__", "a" * 300])
            return {**body, name: copy.deepcopy(draw.choice(ODD))}
        holder: Any = body
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                return body
            key = draw.choice(keys)
            if not isinstance(holder[key], (dict, list)) or draw.random() < 0.4:
                break
            holder = holder[key]
        if draw.random() < 0.25:
            del holder[key]
        elif draw.random() < 0.1:
            for _ in range(draw.choice([3, 60, 400])):
                holder[key] = [holder[key]]
        else:
            holder[key] = copy.deepcopy(draw.choice(ODD))
        return body

    @staticmethod
    def _broken(draw: random.Random, data: bytes) -> tuple[str, bytes, dict[str, str]]:
        """No JSON, or not said to be."""
        headers = {"Content-Type": JSON}
        match draw.randrange(7):
            case 0:
                return "cut", data[: draw.randrange(len(data))], headers
            case 1:
                at = draw.randrange(len(data))
                return "no UTF-8", data[:at] + draw.choice([b"\xff", b"\xc3(", b"\xed\xa0\x80"]) + data[at:], headers
            case 2:
                return "noise", draw.randbytes(draw.randrange(200)), headers
            case 3:
                number = draw.choice([b"NaN", b"Infinity", b"1e999", b"01"])
                return "no JSON number", data.replace(b"1", number), headers
            case 4:
                return "too deep", b"[" * draw.choice([50, 5000, 50000]), headers
            case 5:
                return "twice", data[:-1] + b"," + data[1:], headers
        kinds = ["text/plain", "multipart/form-data; boundary=x", "application/json; charset=latin-1", "", "\x7f"]
        return "another type", data, {"Content-Type": draw.choice(kinds)}


def _has_no_end(body: Any) -> bool:
    """An answer may be as long as the context is."""
    if not isinstance(body, dict):
        return False
    return all(body.get(name) is None for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"))


def _kept_short(body: Any) -> Any:
    if isinstance(body, dict):
        for name, most in MOST.items():
            if isinstance(number := body.get(name), int) and number > most and number < 2**20:
                body[name] = most
        if body.get("background") is True and body.get("max_output_tokens") is None:
            body["max_output_tokens"] = 3  # nobody waits for it, nor leaves
    return body
