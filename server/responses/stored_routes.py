"""What can be done with a stored response: read it and what it was asked, delete it, end it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request

from hamburger.engine.types.errors import InvalidRequest, shown
from hamburger.server.api.auth import owner_of
from hamburger.server.api.errors import ApiError
from hamburger.server.responses.store import ResponseStore


def stored_routes(store: ResponseStore, running: Mapping[str, asyncio.Task[None]]) -> APIRouter:
    """running: those in the background that are being written, by the ids of their responses."""
    router = APIRouter()

    @router.get("/v1/responses/{response_id}")
    async def retrieve(request: Request, response_id: str, stream: bool = False) -> dict[str, Any]:
        """A stored response, as it is now."""
        if stream:
            message = (
                "A stored response is not streamed: leave stream out, and ask again until it is no more in_progress."
            )
            raise InvalidRequest(message, "stream")
        return store.get(response_id, owner_of(request), "response_id").response

    @router.get("/v1/responses/{response_id}/input_items")
    async def input_items(
        request: Request,
        response_id: str,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> dict[str, Any]:
        """What it was asked, the last item first unless `order` is asc; `after`: the id of the last item of a page."""
        items = store.get(response_id, owner_of(request), "response_id").items
        # One without an id was stored before items had them.
        data = [{"id": f"item_{number}", **item} for number, item in enumerate(items)]
        if order == "desc":
            data.reverse()
        ids = [item["id"] for item in data]
        if after is not None and after not in ids:
            raise InvalidRequest(f"after is {shown(after)}, which is no item of this response.", "after")
        first = 0 if after is None else ids.index(after) + 1
        page = ids[first : first + limit]
        ends = {"first_id": page[0] if page else None, "last_id": page[-1] if page else None}
        return {
            "object": "list", "data": data[first : first + limit], **ends, "has_more": first + limit < len(data),
        }  # fmt: skip

    @router.delete("/v1/responses/{response_id}")
    async def delete(request: Request, response_id: str) -> dict[str, Any]:
        """Forget it; one that is still being written ends."""
        store.delete(response_id, owner_of(request))
        return {"id": response_id, "object": "response", "deleted": True}

    @router.post("/v1/responses/{response_id}/cancel")
    async def cancel(request: Request, response_id: str) -> dict[str, Any]:
        """End one that is being written in the background."""
        stored = store.get(response_id, owner_of(request), "response_id")
        if not stored.response["background"]:
            raise ApiError(400, "Only a response in the background can be cancelled.", param="response_id")
        if stored.cancel is not None and (task := running.get(response_id)) is not None:
            stored.cancel()
            await asyncio.wait({task})
        return store.get(response_id, owner_of(request), "response_id").response

    return router
