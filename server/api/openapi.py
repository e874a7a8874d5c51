"""The OpenAPI document: bodies, which FastAPI does not see (request_body.py reads them), and the shape of errors."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from hamburger.server.schema import Schema

_REFERENCE = "#/components/schemas/{model}"


class ErrorDetail(BaseModel):
    """What went wrong. param: the field that it is about."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorAnswer(BaseModel):
    """Every error has this shape."""

    error: ErrorDetail


# By name, not as a `model`: FastAPI would build a validator of its own for each route and status, at each start.
_ERROR = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=ErrorAnswer.__name__)}}}
REFUSED: dict[int | str, dict[str, Any]] = {
    "4XX": {"content": _ERROR, "description": "The request is wrong, or too much at this time."},
    "5XX": {"content": _ERROR, "description": "The server failed, has stopped or is about to."},
}
STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}
TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
_TYPED = {"type": "object", "properties": {"event": {"type": "string"}, "data": {"type": "string"}}}
TYPED_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": _TYPED}}}}


def body_of(schema: type[Schema]) -> dict[str, Any]:
    """A route's openapi_extra: its body, which `document` describes."""
    content = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=schema.__name__)}}}
    return {"requestBody": {"required": True, "content": content}}


def document(app: FastAPI, *bodies: type[Schema]) -> None:
    """Have the app's document, which is made when it is first asked for, hold the schemas of `bodies` and of errors."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schemas = made.setdefault("components", {}).setdefault("schemas", {})
            described: tuple[type[BaseModel], ...] = (ErrorAnswer, *bodies)
            for body in described:
                schema = body.model_json_schema(ref_template=_REFERENCE)
                schemas |= schema.pop("$defs", {})
                schemas[body.__name__] = schema
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend it
