"""The event with which a stream of the Responses API says that it breaks off."""

from __future__ import annotations

from typing import Any

from hamburger.server.api.errors import ApiError

PATH = "/v1/responses"


def responses_error(error: ApiError, number: int) -> dict[str, Any]:
    return {
        "type": "error", "sequence_number": number, "code": error.code, "message": str(error), "param": error.param,
    }  # fmt: skip


def failed_event(response: dict[str, Any], error: ApiError, number: int) -> dict[str, Any]:
    """The last event of a stream that broke off. response: the object, as an earlier event told it."""
    failed = {**response, "status": "failed", "error": {"code": "server_error", "message": str(error)}}
    return {"type": "response.failed", "sequence_number": number, "response": failed}
