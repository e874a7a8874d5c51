"""Reads a request's JSON body into a schema. Whatever is wrong with it is a 400 that names the field (413: too large).

FastAPI's own validation is not used: it answers 422, accepts NaN, and puts no bound on the size of a body.
"""

from __future__ import annotations

import logging
from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError
from pydantic_core import from_json

from hamburger.engine.errors import InvalidRequest
from hamburger.server.errors import ApiError
from hamburger.server.protocol import GenerationBody
from hamburger.server.schema import Schema
from hamburger.server.unsupported import reject_unsupported

logger = logging.getLogger(__name__)
S = TypeVar("S", bound=Schema)


async def read_body(request: Request, schema: type[S], max_bytes: int) -> S:
    """The request's body as `schema`. Raises InvalidRequest or ApiError 413."""
    body = await _read_json(request, max_bytes)
    if issubclass(schema, GenerationBody):
        reject_unsupported(schema.unsupported, body)
    if ignored := body.keys() - schema.model_fields.keys():
        logger.debug("ignored fields: %s", ", ".join(sorted(ignored)))
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = str(first["loc"][0]) if first["loc"] else None
        message = first["msg"].removeprefix("Value error, ")
        raise InvalidRequest(f"{_path(first['loc'])}: {message}.", field) from error


async def _read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > max_bytes:
            raise ApiError(413, f"The request's body has more than {max_bytes} bytes (max_body_size).")
    try:
        body = from_json(bytes(data), allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"The request's body is not valid JSON: {error}.") from error
    if not isinstance(body, dict):
        raise InvalidRequest("The request's body must be a JSON object.")
    return body


def _path(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "role") -> messages[0].role"""
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location)
    return path.removeprefix(".") or "body"
