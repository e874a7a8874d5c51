"""unless_client_leaves with a scripted client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hamburger.server.api.errors import ApiError
from hamburger.server.api.streaming import unless_client_leaves
from hamburger.server.operation.request_log import CLIENT_LEFT


class Client:
    """What is heard of it: nothing, until it leaves or fails."""

    def __init__(self) -> None:
        self.says: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.is_watched = False

    async def receive(self) -> dict[str, Any]:
        self.is_watched = True
        try:
            return await asyncio.shield(self.says)
        finally:
            self.is_watched = False


async def forever(ended: list[str]) -> None:
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        ended.append("work")


async def test_what_the_work_gives_and_raises_while_the_client_stays() -> None:
    client = Client()

    async def work(value: int) -> int:
        await asyncio.sleep(0.01)
        assert client.is_watched
        return 10 // value

    assert await unless_client_leaves(client.receive, work(2)) == 5
    with pytest.raises(ZeroDivisionError):
        await unless_client_leaves(client.receive, work(0))
    assert not client.is_watched


@pytest.mark.parametrize("fails", [False, True])
async def test_a_client_that_leaves_ends_the_work(fails: bool) -> None:
    client, ended, task = Client(), list[str](), asyncio.current_task()
    if fails:
        asyncio.get_running_loop().call_later(0.01, client.says.set_exception, OSError("gone"))
    else:
        asyncio.get_running_loop().call_later(0.01, client.says.set_result, {"type": "http.disconnect"})
    with pytest.raises(ApiError) as caught:
        await unless_client_leaves(client.receive, forever(ended))
    assert (caught.value.status, ended) == (CLIENT_LEFT, ["work"])
    assert task is not None
    assert not task.cancelling()  # whoever called goes on
    await asyncio.sleep(0)


@pytest.mark.parametrize("leaves", [False, True])
async def test_who_is_cancelled_from_outside_stays_so(leaves: bool) -> None:
    client, ended = Client(), list[str]()
    task = asyncio.create_task(unless_client_leaves(client.receive, forever(ended)))
    await asyncio.sleep(0.01)
    if leaves:
        client.says.set_result({"type": "http.disconnect"})
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["work"]
    assert not client.is_watched
