"""A server of scripted answers, asked by OpenAI's own client for responses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from openai import AsyncOpenAI

from fakes import EOS
from serving import Served, on_port, serving, split

TEXT = "Hello wörld"
HELLO = [*split(TEXT, 3, 4, 4, 1), [EOS]]
ROOM: dict[str, Any] = {"max_model_len": 2048, "num_blocks": 1024}
RESPONSES = "/v1/responses"


@asynccontextmanager
async def client(
    script: list[list[int]] = HELLO, api_key: str = "unused", **fields: Any
) -> AsyncIterator[tuple[AsyncOpenAI, Served]]:
    async with (
        serving(script, **{**ROOM, **fields}) as server,
        on_port(server.app) as port,
        AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=api_key, max_retries=0) as api,
    ):
        yield api, server


def prompt_of(server: Served) -> str:
    return bytes(server.runner.prompts[-1]).decode()
