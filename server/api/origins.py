"""Web pages: a browser lets every page send simple requests to any server, also to one that only this machine reaches.

The rules are those of Go's net/http.CrossOriginProtection: what the browser says of the page's origin (Sec-Fetch-Site,
Origin), with the origins that the operator allows. Programs send neither, and pass.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from urllib.parse import urlsplit

from fastapi import Request
from starlette.datastructures import Headers

from hamburger.engine.types.errors import shown
from hamburger.server.api.errors import ApiError


def require_known_page(allowed: Collection[str]) -> Callable[[Request], Awaitable[None]]:
    """A FastAPI dependency: `check_origin` of requests that have a body. allowed: origins, or "*" for all."""

    async def check(request: Request) -> None:
        if request.method == "POST":
            check_origin(request.headers, allowed)

    return check


def check_origin(headers: Headers, allowed: Collection[str]) -> None:
    """Raise ApiError 403 for a request of a web page whose origin is neither this server's nor allowed."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if "*" in allowed or origin in allowed or site in ("same-origin", "none"):
        return
    if site is None and (origin is None or _host(origin) == headers.get("host")):
        return
    raise ApiError(
        403,
        f"Web pages of the origin {shown(origin)} may not use this server: the operator can allow it (cors_origin).",
        code="origin_not_allowed",
    )


def _host(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""
