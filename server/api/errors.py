"""Every error leaves the server in one shape: {"error": {"message", "type", "param", "code"}}. Knows no route.

| raised                           | status | code                     |
| -------------------------------- | ------ | ------------------------ |
| InvalidRequest, TokenizerError   | 400    | null                     |
| PromptTooLong, ContextOverflow   | 400    | context_length_exceeded  |
| UnknownAdapter                   | 404    | model_not_found          |
| QueueFull                        | 429    | queue_full               |
| RateLimited                      | 429    | rate_limit_exceeded      |
| QueueTimeout                     | 503    | queue_timeout            |
| OutOfMemory                      | 503    | out_of_memory            |
| EngineDraining, EngineDead, ...  | 503    | engine_unavailable       |
| ApiError                         | its own                           |
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hamburger.engine.types.errors import (
    ContextOverflow,
    EngineDead,
    EngineDraining,
    EngineUnavailable,
    HamburgerError,
    InvalidRequest,
    OutOfMemory,
    Overloaded,
    PromptTooLong,
    QueueFull,
    RateLimited,
    TokenizerError,
    UnknownAdapter,
    cut,
)
from hamburger.server.operation.request_log import entry_of

logger = logging.getLogger(__name__)

# Of what is for operators: the log and the supervisor say it.
ENGINE_ENDED = "The engine has ended, and what it was doing is lost: try again later."
_RETRY_UNAVAILABLE = 5  # seconds: about what a restart takes
_ENDPOINTS = frozenset(f"/v1/{name}" for name in ("chat/completions", "completions", "responses", "messages", "models"))


class ApiError(Exception):
    """An error that belongs to HTTP rather than to the engine. `headers` are added to the answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers


def to_api_error(error: Exception) -> ApiError:
    """What a client gets for `error`; anything that was not raised on purpose is a 500 without its details."""
    message = str(error)
    match error:
        case ApiError():
            return error
        case PromptTooLong() | ContextOverflow():
            return ApiError(400, message, param=error.param, code="context_length_exceeded")
        case UnknownAdapter():
            return ApiError(404, message, param=error.param, code="model_not_found")
        case InvalidRequest():
            return ApiError(400, message, param=error.param)
        case TokenizerError():
            return ApiError(400, message)
        case OutOfMemory():
            return ApiError(503, message, code="out_of_memory", headers={"Retry-After": str(error.retry_after)})
        case Overloaded():
            codes = {QueueFull: (429, "queue_full"), RateLimited: (429, "rate_limit_exceeded")}
            status, code = codes.get(type(error), (503, "queue_timeout"))
            return ApiError(status, message, code=code, headers={"Retry-After": str(error.retry_after)})
        case EngineUnavailable():
            if isinstance(error, EngineDead):
                message = ENGINE_ENDED
            headers = {"Retry-After": str(_RETRY_UNAVAILABLE)}
            if isinstance(error, EngineDraining):  # over another connection another server may answer
                headers["Connection"] = "close"
            return ApiError(503, message, code="engine_unavailable", headers=headers)
        case _:
            return ApiError(500, "The server failed on this request; its log says why.")


def error_body(error: ApiError) -> dict[str, Any]:
    return {
        "error": {"message": str(error), "type": _type(error.status), "param": error.param, "code": error.code},
    }


Shape = Callable[[ApiError, str], dict[str, Any]]  # of an error and its request's id


def route_path(scope: Mapping[str, Any]) -> str:
    """Which of our paths a request asks for, whatever prefix the application has."""
    path: str = scope.get("path", "")
    return path.removeprefix(scope.get("root_path", ""))


def add_error_handlers(
    app: FastAPI, on_failure: Callable[[Scope, ApiError], None], shapes: Mapping[str, Shape]
) -> None:
    """Answer every exception in the one shape; `on_failure(scope, error)` counts each.

    shapes: other ones, by what a path begins with.
    """

    def respond(scope: Scope, error: ApiError) -> JSONResponse:
        on_failure(scope, error)
        entry_of(scope).failed(error)
        path = route_path(scope)
        shape = next((of for start, of in shapes.items() if path.startswith(start)), None)
        body = error_body(error) if shape is None else shape(error, entry_of(scope).request_id)
        return JSONResponse(body, status_code=error.status, headers=error.headers)

    async def known(request: Request, error: Exception) -> JSONResponse:
        return respond(request.scope, to_api_error(error))

    async def http(request: Request, error: Exception) -> JSONResponse:
        if not isinstance(error, HTTPException):
            raise error
        message = str(error.detail)
        if error.status_code == 404:
            message = f"There is nothing at {cut(request.url.path)}."
            path = route_path(request.scope)
            if (named := f"/v1/{path.removeprefix('/v1').strip('/')}") in _ENDPOINTS:
                message += f" Did you mean {named}? A client's base URL ends with /v1, without a slash behind it."
            elif path.startswith("/v1/"):
                message += (
                    " Served are /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages and /v1/models:"
                )
                message += " this is one text model, without embeddings, images or audio."
        elif error.status_code == 405 and re.fullmatch(r"/v1/responses/(?!resp_)[a-z_]+", request.url.path):
            message = f"{request.url.path} is not served: a response's id begins with resp_."
        elif error.status_code == 405:
            message = f"{cut(request.url.path)} does not answer {cut(request.method)}."
        return respond(request.scope, ApiError(error.status_code, message, headers=error.headers))

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        """A parameter of the address; bodies are read elsewhere (request_body.py)."""
        if not isinstance(error, RequestValidationError):
            raise error
        first = error.errors()[0]
        name = str(first["loc"][-1])
        return respond(request.scope, ApiError(400, f"{name}: {first['msg']}.", param=name))

    app.add_exception_handler(ApiError, known)
    app.add_exception_handler(HamburgerError, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_middleware(UnforeseenErrors, respond=lambda scope, error: respond(scope, to_api_error(error)))


class UnforeseenErrors:
    """Answers what nobody caught, inside of all other middleware: this answer gets its id and CORS headers too."""

    def __init__(self, app: ASGIApp, respond: Callable[[Scope, Exception], JSONResponse]) -> None:
        self._app, self._respond = app, respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def watched(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if has_begun or scope["type"] != "http":
                raise
            logger.exception("A request failed.")
            await self._respond(scope, error)(scope, receive, send)


def _type(status: int) -> str:
    names = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable"}
    return names.get(status, "server_error" if status >= 500 else "invalid_request_error")
