"""The event with which a stream of the Responses API says that it breaks off."""

from __future__ import annotations

from typing import Any

from hamburger.server.api.errors import ApiError

PATH = "/v1/responses"


def responses_error(error: ApiError, number: int) -> dict[str, Any]:
    return {
        "type": "error", "sequence_number": number, "code": error.code, "message": str(error), "param": error.param,
    }  # fmt: skip
