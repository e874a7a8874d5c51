"""Errors in Anthropic's shape, which is ours and says `type` twice."""

from __future__ import annotations

from typing import Any

from hamburger.server.api.errors import ApiError, error_body

PATH = "/v1/messages"
_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


def messages_error(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    """request_id: None where the answer has begun, and its head has said it."""
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    told = {**error_body(error)["error"], "type": kind}
    if error.status == 400 and error.param == "thread":  # by which Anthropic's clients know to do without
        told["details"] = {"error_code": "thread_unsupported_request"}
    return {"type": "error", "error": told} | ({} if request_id is None else {"request_id": request_id})
