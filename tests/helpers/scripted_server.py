"""A real HTTP server in a thread that answers as its script says, and remembers what it was asked. For client tests."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from quick_server import AbruptServer


@dataclass
class Reply:
    """One answer: a JSON `body`, or the `chunks` of a stream.

    hang: keep the connection open after the chunks; breaks: end it there. after_requests: no chunk before the server
    got so many requests. pause: seconds behind each chunk.
    """

    chunks: Sequence[bytes] = ()
    body: Any = None
    status: int = 200
    media_type: str = "text/event-stream"
    hang: bool = False
    breaks: bool = False
    after_requests: int = 0
    pause: float = 0.0


@dataclass
class ScriptedServer:
    """`answer` gives the reply to the body of a completion request; without it every request gets `replies` in turn."""

    url: str = ""
    models: Any = field(default_factory=lambda: {"object": "list", "data": [{"id": "tiny"}, {"id": "tiny@0.9"}]})
    tokens_per_word: int | None = None  # None: no /tokenize
    metrics: str | None = None  # None: no /metrics
    replies: list[Reply] = field(default_factory=list)
    answer: Callable[[dict[str, Any]], Reply] | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    disconnected: threading.Event = field(default_factory=threading.Event)

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/v1/models")
        async def models(request: Request) -> Response:
            self.keys.append(request.headers.get("authorization"))
            return JSONResponse(self.models)

        @app.get("/metrics")
        async def metrics() -> Response:
            if self.metrics is None:
                return JSONResponse({"detail": "Not Found"}, status_code=404)
            return Response(self.metrics, media_type="text/plain")

        @app.post("/tokenize")
        async def tokenize(request: Request) -> Response:
            if self.tokens_per_word is None:
                return JSONResponse({"detail": "Not Found"}, status_code=404)
            body = await request.json()
            return JSONResponse({"count": len(body["prompt"].split()) * self.tokens_per_word})

        @app.post("/v1/chat/completions")
        @app.post("/v1/completions")
        async def complete(request: Request) -> Response:
            body = await request.json()
            self.requests.append(body)
            self.paths.append(request.url.path)
            reply = self.answer(body) if self.answer else self.replies[(len(self.requests) - 1) % len(self.replies)]
            if reply.body is not None:
                return JSONResponse(reply.body, status_code=reply.status)
            return StreamingResponse(self._stream(reply), status_code=reply.status, media_type=reply.media_type)

        return app

    async def _stream(self, reply: Reply) -> AsyncIterator[bytes]:
        while len(self.requests) < reply.after_requests:  # noqa: ASYNC110 (the count has no event)
            await asyncio.sleep(0.005)
        for chunk in reply.chunks:
            yield chunk
            await asyncio.sleep(reply.pause)
        if reply.breaks:
            raise ConnectionError("as the script says")
        try:
            if reply.hang:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.disconnected.set()
            raise


@contextmanager
def serve(server: ScriptedServer, port: int = 0) -> Iterator[ScriptedServer]:
    """Run on a port, 0: a free one, until the block ends."""
    uvicorn_server = AbruptServer(uvicorn.Config(server.app(), port=port, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=uvicorn_server.run, daemon=True)
    thread.start()
    while not uvicorn_server.started:
        if not thread.is_alive():
            raise RuntimeError("the scripted server did not start")
        threading.Event().wait(0.002)
    host, port = uvicorn_server.servers[0].sockets[0].getsockname()[:2]
    server.url = f"http://{host}:{port}"
    try:
        yield server
    finally:
        uvicorn_server.should_exit = True
        thread.join(timeout=10)


def sse(event: dict[str, Any]) -> bytes:
    """One server-sent event, its text not escaped."""
    return f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()


def error_body(message: str, code: int, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}}


def hamburger_stream(groups: Sequence[tuple[str, int]], *, chat: bool = True, finish: str = "stop") -> list[bytes]:
    """A HAMburger server's stream: (text, tokens) of each group, its usage with KV slots, and the end mark."""
    chunks = []
    for index, (text, tokens) in enumerate(groups):
        group = {"index": index, "token_ids": list(range(tokens)), "stop_probs": [0.5] * tokens}
        choice: dict[str, Any] = {"index": 0, "group": group, "finish_reason": None}
        choice |= {"delta": {"content": text}} if chat else {"text": text}
        if index == len(groups) - 1:
            choice["finish_reason"] = finish
        chunks.append(sse({"choices": [choice]}))
    total = sum(tokens for _, tokens in groups)
    usage = {"prompt_tokens": 5, "completion_tokens": total, "kv_slots": len(groups), "total_tokens": 5 + total}
    return [*chunks, sse({"choices": [], "usage": usage}), b"data: [DONE]\n\n"]


def plain_stream(texts: Sequence[str]) -> list[bytes]:
    """The stream of a server that knows neither groups nor usage: role, texts, finish, end mark."""
    deltas: list[tuple[dict[str, str], str | None]] = [({"role": "assistant", "content": ""}, None)]
    deltas += [({"content": text}, None) for text in texts]
    deltas.append(({}, "stop"))
    events = [sse({"choices": [{"index": 0, "delta": d, "finish_reason": reason}]}) for d, reason in deltas]
    return [*events, b"data: [DONE]\n\n"]


def drafting_stream() -> list[bytes]:
    """A HAMburger server's stream with verified groups: 1 + 3 + 2 tokens, of 5 drafts 3 accepted."""
    groups = [("one", [1], None, 0), (" two three", [2, 3, 4], [2, 3, 9], 2), (" four", [5, 6], [5, 8], 1)]
    chunks = []
    for index, (text, token_ids, drafted, accepted) in enumerate(groups):
        group: dict[str, Any] = {"index": index, "token_ids": token_ids, "stop_probs": [0.5] * len(token_ids)}
        if drafted is not None:
            chances = [0.5] * len(drafted)
            group |= {"drafted": drafted, "accepted": accepted, "chances": chances, "drafter": "lookup"}
        finish = "stop" if index == 2 else None
        chunks.append(
            sse({"choices": [{"index": 0, "delta": {"content": text}, "group": group, "finish_reason": finish}]})
        )
    usage = {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11, "kv_slots": 6, "macro_steps": 3}
    return [*chunks, sse({"choices": [], "usage": usage}), b"data: [DONE]\n\n"]
