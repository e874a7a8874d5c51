"""API keys: `Authorization: Bearer KEY` or `X-Api-Key: KEY`, any of several, compared in constant time. Clients of
Anthropic may send both, each for whom it means; one that is known is enough.

Without keys everyone passes.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Sequence

from fastapi import Request

from hamburger.server.api.errors import ApiError
from hamburger.server.operation.request_log import entry_of

_KEY, _OWNER = "hamburger_key", "hamburger_owner"


def require_api_key(keys: Sequence[str]) -> Callable[[Request], Awaitable[None]]:
    """A FastAPI dependency. Raises ApiError 401 when keys are set and the request carries none of them."""
    secrets = [key.encode() for key in keys]
    owners = [hashlib.sha256(secret).hexdigest() for secret in secrets]

    async def check(request: Request) -> None:
        if not secrets:
            return
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        given = [request.headers.get("x-api-key", "")]
        if scheme.lower() == "bearer":  # else it may be a proxy's own
            given.insert(0, bearer)
        tokens = [key.strip(" \t").encode("latin-1") for key in given]  # how the header's bytes were decoded
        # A list, so that every key is compared whichever one matches.
        matches = [hmac.compare_digest(token, secret) for token in tokens for secret in secrets]
        if not any(matches):
            raise ApiError(
                401,
                "Wrong or missing API key: send `Authorization: Bearer KEY`.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        place = matches.index(True) % len(secrets)
        number = str(place + 1)
        setattr(request.state, _KEY, number)
        setattr(request.state, _OWNER, owners[place])
        entry_of(request.scope).key = number

    return check


def key_of(request: Request) -> str:
    """Which of the keys it carries, the first is "1"; "" without keys. Another one's tomorrow: see owner_of."""
    return getattr(request.state, _KEY, "")


def owner_of(request: Request) -> str:
    """Whose what it leaves here is, as long as its key is known: a SHA-256 of that, in hex; "" without keys."""
    return getattr(request.state, _OWNER, "")
