"""A scripted server that also writes chats, tokenizes to bytes and echoes log-probabilities. For eval-tasks tests."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from hamburger.clients.evaluation import command
from scripted_server import Reply, ScriptedServer, error_body

DATA = Path(__file__).parents[1] / "data" / "eval"


def byte_logprob(token: int) -> float:
    return -(token % 13 + 1) / 8


def text_logprob(text: str) -> float:
    """The log-likelihood of a text whose tokens are its bytes."""
    return sum(map(byte_logprob, text.encode()))


@dataclass
class EvalServer(ScriptedServer):
    """write: prompt -> answer, 3 tokens in 2 KV slots. has_tokenize: else a 404. full: so many requests get a 429."""

    write: Callable[[str], str] = lambda prompt: "I do not know."
    has_tokenize: bool = True
    full: int = 0

    def __post_init__(self) -> None:
        self.answer = self._reply

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/tokenize")
        async def tokenize(request: Request) -> Response:
            if not self.has_tokenize:
                return JSONResponse({"detail": "Not Found"}, status_code=404)
            tokens = list((await request.json())["prompt"].encode())
            return JSONResponse({"tokens": tokens, "count": len(tokens)})

        app.mount("/", super().app())
        return app

    def _reply(self, body: dict[str, Any]) -> Reply:
        if self.full:
            self.full -= 1
            return Reply(body=error_body("queue full", 429), status=429)
        usage = {"prompt_tokens": 9, "completion_tokens": 3, "kv_slots": 2}
        if "messages" in body:
            message = {"role": "assistant", "content": self.write(body["messages"][0]["content"])}
            choices: list[dict[str, Any]] = [{"index": 0, "message": message, "finish_reason": "stop"}]
        else:
            choices = [self.echo(index, prompt) for index, prompt in enumerate(body["prompt"])]
            choices.reverse()  # their order is told by `index` alone
        return Reply(body={"choices": choices, "usage": usage})

    def echo(self, index: int, prompt: str | list[int]) -> dict[str, Any]:
        """A choice with every prompt token but the first scored, and one new token."""
        tokens = list(prompt.encode()) if isinstance(prompt, str) else prompt
        logprobs = [None, *map(byte_logprob, tokens[1:]), -0.5]
        return {"index": index, "text": "...", "finish_reason": "length", "logprobs": {"token_logprobs": logprobs}}


def evaluate(server: EvalServer, out: Path, *arguments: str) -> int:
    """Run the command on the small task files; returns its exit code."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    options = ["--base-url", server.url, "--data", str(DATA), "--out", str(out), "--resamples", "50", *arguments]
    return command.run(parser.parse_args(options))


def report(out: Path) -> dict[str, Any]:
    """What it wrote."""
    found: dict[str, Any] = json.loads(out.read_text())
    return found
