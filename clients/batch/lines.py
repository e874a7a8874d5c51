"""The files of `hamburger run-batch`: OpenAI's batch format, a request a line and an answer a line.

A request's line: {"custom_id", "method": "POST", "url": "/v1/...", "body": {...}}. An answer's: {"id", "custom_id",
"response": {"status_code", "request_id", "body"}, "error": null}, and `request_digest`, which is ours: what was asked.
Where none came, "response" is null, and "error" {"code", "message"}.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

from hamburger.clients.json_lines import read_rows
from hamburger.clients.output_files import reading

_LONGEST_ID = 100  # characters of an error's message


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One request; body: JSON, as it is sent. model: its name, None where it has none.

    digest: equal for equal requests, whatever they are called and whoever goes first.
    """

    custom_id: str
    url: str
    body: bytes
    model: str | None
    digest: str


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """What is found again of an answer's line."""

    custom_id: str
    digest: str


def read_requests(path: Path, fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[BatchRequest]:
    """The requests of a `.jsonl` or `.jsonl.gz` file, one after the other.

    fields: of every body, whatever it says itself; defaults: of those that do not say.
    Raises OSError, or ValueError that names the line, the field and the remedy.
    """
    ids: dict[str, int] = {}
    with reading("--input-file", path):
        for number, row in read_rows(path):
            where = f"{path}, line {number}"
            request = _request(where, row, fields, defaults)
            first = ids.setdefault(request.custom_id, number)
            if first != number:
                raise ValueError(
                    f"{where}: custom_id {request.custom_id[:_LONGEST_ID]!r} is that of line {first}, too: answers are "
                    "told by it, so give each its own."
                )
            yield request
    if not ids:
        raise ValueError(f"{path} holds no requests: write one object a line.")


def _request(where: str, row: Any, fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> BatchRequest:
    given = row if isinstance(row, dict) else {}
    custom_id, url, body = given.get("custom_id"), given.get("url"), given.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError(f"{where}: custom_id is missing or no text: name each request.")
    if given.get("method", "POST") != "POST":
        raise ValueError(f"{where}: method is {given['method']!r}: only POST is sent.")
    if not isinstance(url, str) or not url.startswith("/v1/") or not url.isascii() or not url.isprintable():
        raise ValueError(f"{where}: url is no path of the API: write it like /v1/chat/completions.")
    if not isinstance(body, dict):
        raise ValueError(f"{where}: body is missing or no object: it is what the request says.")
    for field in ("stream", "background"):
        if body.get(field):
            raise ValueError(f"{where}: body.{field} is set, but answers of a batch come whole: leave it out.")
    whole = {**defaults, **body, **fields}
    try:
        data = json.dumps(whole, allow_nan=False).encode()
        asked = json.dumps([url, {name: value for name, value in whole.items() if name != "priority"}], sort_keys=True)
        custom_id.encode()
    except ValueError:  # UnicodeEncodeError is one
        raise ValueError(f"{where} holds NaN, Infinity or half of a surrogate pair, which JSON has not.") from None
    except RecursionError:
        raise ValueError(f"{where}: its lists or objects are nested too deeply.") from None
    model = whole.get("model")
    digest = sha256(asked.encode()).hexdigest()[:32]
    return BatchRequest(custom_id, url, data, model if isinstance(model, str) else None, digest)


def count_missing(requests: Iterable[BatchRequest], answers: Iterable[BatchAnswer], path: Path) -> int:
    """How many requests have no answer yet. Raises ValueError where an answer of `path` is to another request."""
    digests = {answer.custom_id: answer.digest for answer in answers}
    missing = 0
    for request in requests:
        if (digest := digests.pop(request.custom_id, None)) is None:
            missing += 1
        elif digest != request.digest:
            raise _other_batch(path, request.custom_id)
    for custom_id in digests:
        raise _other_batch(path, custom_id)
    return missing


def _other_batch(path: Path, custom_id: str) -> ValueError:
    return ValueError(
        f"{path} holds the answer to another request of custom_id {custom_id[:_LONGEST_ID]!r}: name another file with "
        "--output-file, or delete that line."
    )


def answer_row(request: BatchRequest, status: int, request_id: str, body: Any) -> dict[str, Any]:
    """The line of an answer, of whatever status."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _row(request, response, None)


def lost_row(request: BatchRequest, message: str) -> dict[str, Any]:
    """The line of a request that the server did not answer."""
    return _row(request, None, {"code": "connection_lost", "message": message})


def _row(request: BatchRequest, response: dict[str, Any] | None, error: dict[str, str] | None) -> dict[str, Any]:
    return {
        "id": f"batch_req_{uuid4().hex}",
        "custom_id": request.custom_id,
        "response": response,
        "error": error,
        "request_digest": request.digest,
    }


def parse_answer(option: str, path: Path, number: int, line: bytes) -> BatchAnswer:
    """A line of an earlier run. Raises ValueError for any other."""
    try:
        row = json.loads(line)
        custom_id, digest = row["custom_id"], row["request_digest"]
        if (
            not isinstance(row["response"] or row["error"], dict)
            or not isinstance(custom_id, str)
            or not isinstance(digest, str)
        ):
            raise TypeError
        return BatchAnswer(custom_id, digest)
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ValueError(
            f"{path}, line {number} is no answer of this command: name another file with {option}."
        ) from None
