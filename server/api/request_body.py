"""Reads a request's JSON body into a schema. Whatever is wrong with it is a 400 that names the field (413: too large).

FastAPI's own validation is not used: it answers 422, accepts NaN, and puts no bound on the size of a body. What a body
costs to read is a matter of its values more than of its bytes, and is paid in one piece, which everybody waits for: so
they are counted before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import ClientDisconnect

from hamburger.engine.types.errors import InvalidRequest, cut, shown
from hamburger.server.api.errors import ApiError
from hamburger.server.bodies.generation import renamed
from hamburger.server.bodies.refusals import reject_unserved
from hamburger.server.config import ServeSettings
from hamburger.server.operation.request_log import CLIENT_LEFT
from hamburger.server.schema import Schema

logger = logging.getLogger(__name__)
S = TypeVar("S", bound=Schema)
_QUOTE = "'"
MAX_VALUES = 300_000  # of a body; a tenth of a second of reading and checking them
MAX_CONTAINERS = 30_000  # objects and lists among them
MAX_NAMES = 100_000  # of objects' values: each costs three times what a list's value does


async def read_body(request: Request, schema: type[S], settings: ServeSettings) -> S:
    """The request's body as `schema`. Raises InvalidRequest, or ApiError: 415 not called JSON, 413 too large, 408 too
    slow, 499 gone."""
    _check_type(request.headers.get("content-type", ""))
    if (encoding := request.headers.get("content-encoding", "identity")).lower() != "identity":
        message = f"The request's Content-Encoding is {shown(encoding)}: send the body as it is."
        raise ApiError(415, message, param="Content-Encoding", code="unsupported_media_type")
    length = request.headers.get("content-length", "")
    if "expect" in request.headers and length.isdecimal() and int(length) > settings.max_body_size:
        raise _too_large(settings)  # who waits for a word need not send it
    data = await read_whole(request, settings)
    if len(data) > settings.max_body_size:
        raise _too_large(settings)
    check_number(data)
    body = _parse(data)
    reject_unserved(schema.refused, body)
    if ignored := body.keys() - schema.model_fields.keys():
        logger.debug("ignored fields: %s", ", ".join(sorted(ignored)))
    return validated(schema, body)


def validated(schema: type[S], body: Mapping[str, Any]) -> S:
    """A parsed body as `schema`. Raises InvalidRequest."""
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = str(first["loc"][0]) if first["loc"] else None
        raise InvalidRequest(f"{_path(first['loc'])}: {_in_words(first)}.", field) from error


def _in_words(error: ErrorDetails) -> str:
    """What pydantic says, where it does not speak of its own parts."""
    match error["type"], error.get("ctx", {}):
        case "model_type" | "model_attributes_type" | "dict_type", _:
            return "it must be an object"
        case "union_tag_not_found", {"discriminator": field}:
            return f"it must be an object with a {str(field).strip(_QUOTE)}"
        case "union_tag_invalid", {"discriminator": field, "tag": tag, "expected_tags": expected}:
            return f"its {str(field).strip(_QUOTE)} is {shown(tag)}, and must be one of {expected}"
    return error["msg"].removeprefix("Value error, ")


@contextlib.contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Errors inside name a field as the client knows it. names: from ours to theirs."""
    try:
        yield
    except InvalidRequest as error:
        renamed(error, names)
        raise


async def read_whole(request: Request, settings: ServeSettings) -> bytes:
    """The whole body, or so much of one larger than max_body_size that it shows. Raises ApiError: 408 too slow, 499
    gone.
    """
    data = bytearray()
    try:
        async with asyncio.timeout(settings.client_seconds):
            async for chunk in request.stream():
                data += chunk
                if len(data) > settings.max_body_size:
                    break
    except TimeoutError as error:
        message = f"The request's body took more than {settings.client_seconds:g} s to arrive (client_seconds)."
        raise ApiError(408, message, headers={"Connection": "close"}) from error
    except ClientDisconnect as error:  # no fault of ours, and nobody to tell
        raise ApiError(CLIENT_LEFT, "The client closed the connection.") from error
    return bytes(data)


def _too_large(settings: ServeSettings) -> ApiError:
    return ApiError(413, f"The request's body has more than {settings.max_body_size} bytes (max_body_size).")


def _check_type(content_type: str) -> None:
    """Browsers let any web page send a body that is not said to be JSON, and ask nobody before."""
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json" and not (media_type.startswith("application/") and media_type[-5:] == "+json"):
        raise ApiError(
            415,
            f"The request's Content-Type is {shown(content_type)}: send JSON, as application/json.",
            param="Content-Type",
            code="unsupported_media_type",
        )


def check_number(data: bytes) -> None:
    """Raise InvalidRequest for more values than a body may have: commas, colons and brackets, of what is no text."""
    if data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_CONTAINERS:
        bare = data.replace(rb"\\", b"").replace(rb"\"", b"")
        if bare.count(b'"') <= 4 * MAX_VALUES:  # else its texts alone, with their names, are too many
            bare = b"".join(bare.split(b'"')[::2])
        containers = bare.count(b"[") + bare.count(b"{")
        for number, most, noun in (
            (containers, MAX_CONTAINERS, "objects and lists"),
            (bare.count(b":"), MAX_NAMES, "names"),
            (bare.count(b",") + containers, MAX_VALUES, "values"),
        ):
            if number > most:
                message = f"The request's body has {number:,} {noun}, but at most {most:,} are allowed"
                raise InvalidRequest(f"{message}: send it in parts.")


def _parse(data: bytes) -> dict[str, Any]:
    try:
        body = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        if "recursion limit" in str(error):
            raise InvalidRequest("The request's body is nested too deeply: have fewer levels.") from error
        raise InvalidRequest(f"The request's body is not valid JSON: {error}.") from error
    if not isinstance(body, dict):
        raise InvalidRequest("The request's body must be a JSON object.")
    return body


def _path(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "role") -> messages[0].role"""
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{cut(step)}" for step in location)
    return path.removeprefix(".") or "body"
