"""What wraps every request: its id, and one line of JSON about it. Pure ASGI, so that streams stream."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID = "X-Request-Id"
_USABLE_ID = re.compile(r"[\x21-\x7e]{1,128}")
access_logger = logging.getLogger("hamburger.access")


class RequestIds:
    """Answers each request with its X-Request-Id: the client's own, if it sent a usable one, else a new one.

    logs: write one line a request to `access_logger` when it has ended: JSON, never with anything of the body.
    """

    def __init__(self, app: ASGIApp, logs: bool = False) -> None:
        self._app = app
        self._logs = logs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = given if _USABLE_ID.fullmatch(given) else uuid.uuid4().hex
        start, status, size = time.monotonic(), 499, 0  # 499: the client left before an answer

        async def send_with_id(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            else:
                size += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            status = 500
            raise
        finally:
            if self._logs:
                access_logger.info(_line(scope, request_id, status, size, time.monotonic() - start))


def _line(scope: Scope, request_id: str, status: int, size: int, seconds: float) -> str:
    client = scope.get("client")
    fields: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "request_id": request_id,
        "client": client[0] if client else None,
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "bytes": size,
        "seconds": round(seconds, 4),
    }
    return json.dumps(fields)
