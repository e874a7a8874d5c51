"""uvicorn for tests, which ends when it is told to: the library's looks ten times a second, and then waits a tenth."""

from __future__ import annotations

import asyncio
import socket

import uvicorn


class QuickServer(uvicorn.Server):
    """It ends as the library's does, but looks more often whether it should."""

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.005)


class AbruptServer(QuickServer):
    """It cuts off whoever is still connected: nobody waits for an answer when the test is over."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        tasks = list(self.server_state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # for the connections to be told
