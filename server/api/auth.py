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

_OWNER = "hamburger_owner"


class ApiKeys:
    """The keys that are known now; others may take their place at any time, from any thread."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self.replace(keys)

    def replace(self, keys: Sequence[str]) -> None:
        secrets = [key.encode() for key in keys]
        self.known = [(secret, hashlib.sha256(secret).hexdigest()) for secret in secrets]  # and whose it is


def require_api_key(keys: ApiKeys) -> Callable[[Request], Awaitable[None]]:
    """A FastAPI dependency. Raises ApiError 401 when keys are set and the request carries none of them."""

    async def check(request: Request) -> None:
        known = keys.known
        if not known:
            return
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        given = [request.headers.get("x-api-key", "")]
        if scheme.lower() == "bearer":  # else it may be a proxy's own
            given.insert(0, bearer)
        tokens = [key.strip(" \t").encode("latin-1") for key in given]  # how the header's bytes were decoded
        # A list, so that every key is compared whichever one matches.
        matches = [hmac.compare_digest(token, secret) for token in tokens for secret, _ in known]
        if not any(matches):
            raise ApiError(
                401,
                "Wrong or missing API key: send `Authorization: Bearer KEY`.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        place = matches.index(True) % len(known)
        setattr(request.state, _OWNER, known[place][1])
        entry_of(request.scope).key = str(place + 1)

    return check


def owner_of(request: Request) -> str:
    """Whose it is, and what it leaves here, as long as its key is known: a SHA-256 of that, in hex; "" without keys."""
    return getattr(request.state, _OWNER, "")
