"""The playground: a page at / that shows what this server does. Static files, the same for everyone; knows no engine.

The files need no key. What the page asks of the API does, like anybody's requests.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

STATIC = Path(__file__).resolve().parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
# No inline code, nothing of other servers, and no text of a model ever becomes markup: the page builds nodes.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Asked again each time, and answered 304 while nothing changed: a new version's files never mix with an old one's.
    "Cache-Control": "no-cache",
}


class _File:
    """One file as it is sent. Its text lies in memory: a few hundred KiB in all, read once."""

    def __init__(self, path: Path) -> None:
        self._body = path.read_bytes()
        self._type = _TYPES[path.suffix]
        self._tag = f'"{hashlib.sha256(self._body).hexdigest()[:32]}"'

    def answer(self, request: Request) -> Response:
        headers = {**_HEADERS, "ETag": self._tag}
        if self._tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self._body, media_type=self._type, headers=headers)


def playground_routes() -> APIRouter:
    """/ and the files behind it: those that lie in static/ now, by their names, and nothing else."""
    router = APIRouter(include_in_schema=False)
    files = {
        path.relative_to(STATIC).as_posix(): _File(path) for path in sorted(STATIC.rglob("*")) if path.suffix in _TYPES
    }

    @router.head("/")
    @router.get("/")
    async def page(request: Request) -> Response:
        return files["index.html"].answer(request)

    @router.head("/playground/{name:path}")
    @router.get("/playground/{name:path}")
    async def file(request: Request, name: str) -> Response:
        found = files.get(name)
        if found is None:
            raise HTTPException(404)
        return found.answer(request)

    return router
