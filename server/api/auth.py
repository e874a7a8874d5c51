"""API keys: `Authorization: Bearer KEY` or `X-Api-Key: KEY`, any of several, compared in constant time.

Without keys everyone passes.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence

from fastapi import Request

from hamburger.server.api.errors import ApiError
from hamburger.server.operation.request_log import entry_of

_KEY = "hamburger_key"


def require_api_key(keys: Sequence[str]) -> Callable[[Request], Awaitable[None]]:
    """A FastAPI dependency. Raises ApiError 401 when keys are set and the request carries none of them."""
    secrets = [key.encode() for key in keys]

    async def check(request: Request) -> None:
        if not secrets:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":  # Anthropic's clients; Authorization may be a proxy's own
            given = request.headers.get("x-api-key", "")
        token = given.strip(" \t").encode("latin-1")  # how the header's bytes were decoded
        # A list, so that every key is compared whichever one matches.
        matches = [hmac.compare_digest(token, secret) for secret in secrets]
        if not any(matches):
            raise ApiError(
                401,
                "Wrong or missing API key: send `Authorization: Bearer KEY`.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        number = str(matches.index(True) + 1)
        setattr(request.state, _KEY, number)
        entry_of(request.scope).key = number

    return check


def key_of(request: Request) -> str:
    """Which of the keys it carries, the first is "1"; "" without keys."""
    return getattr(request.state, _KEY, "")
