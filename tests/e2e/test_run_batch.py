"""`hamburger run-batch` on a real server: chats, completions, responses and messages, answered as alone."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import httpx
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from hamburger.clients.batch import command
from real_server import RealServer

GREEDY = {"temperature": 0, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 9, **GREEDY},
    "/v1/completions": {"prompt": ["ab", "cd"], "max_tokens": 7, **GREEDY},
    "/v1/responses": {"input": "hello there", "max_output_tokens": 9, "temperature": 0, "store": False},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "temperature": 0},
}


def run_batch(server: RealServer, rows: list[dict[str, Any]], folder: Path, *options: str) -> int:
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    files = ["-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl")]
    return command.run(parser.parse_args([*files, "--url", server.url, *options]))


def answers(path: Path) -> dict[str, dict[str, Any]]:
    return {row["custom_id"]: row["response"] for row in map(json.loads, path.read_text().splitlines())}


def text_of(body: dict[str, Any]) -> Any:
    if body.get("object") == "response":
        return [part["text"] for item in body["output"] for part in item["content"]]
    if body.get("type") == "message":
        return [part["text"] for part in body["content"]]
    return [choice.get("text") or choice["message"]["content"] for choice in body["choices"]]


def test_a_batch_is_answered_as_its_requests_are_alone(grafted: RealServer, tmp_path: Path) -> None:
    rows = [
        {"custom_id": f"{url} {i}", "method": "POST", "url": url, "body": {"model": "burger", **body}}
        for url, body in BODIES.items()
        for i in range(10)
    ]
    assert run_batch(grafted, rows, tmp_path, "--concurrency", "25") == 0
    found = answers(tmp_path / "out.jsonl")
    assert set(found) == {row["custom_id"] for row in rows}
    for url, body in BODIES.items():
        alone = httpx.post(grafted.url + url, json={"model": "burger", **body}, timeout=60).json()
        for i in range(10):
            assert text_of(found[f"{url} {i}"]["body"]) == text_of(alone)
            assert found[f"{url} {i}"]["request_id"]
    ChatCompletion.model_validate(found["/v1/chat/completions 0"]["body"])
    Completion.model_validate(found["/v1/completions 0"]["body"])
    Response.model_validate(found["/v1/responses 0"]["body"])


def test_what_the_server_refuses_is_told_apart(grafted: RealServer, tmp_path: Path) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "good": BODIES["/v1/chat/completions"],
        "unknown model": {"model": "other", **BODIES["/v1/chat/completions"]},
        "wrong field": {**BODIES["/v1/chat/completions"], "temperature": -1},
    }
    rows = [{"custom_id": name, "url": "/v1/chat/completions", "body": body} for name, body in bodies.items()]
    rows.append({"custom_id": "a wrong rank", "url": "/v1/messages", "body": BODIES["/v1/messages"]})  # it has none
    rows.append({"custom_id": "no such path", "url": "/v1/embeddings", "body": {"input": "hello"}})
    assert run_batch(grafted, rows, tmp_path, "--priority", "3") == 1
    assert set(answers(tmp_path / "out.jsonl")) == {"good"}
    failed = answers(tmp_path / "out.errors.jsonl")
    assert {name: answer["status_code"] for name, answer in failed.items()} == {
        "unknown model": 404, "wrong field": 400, "a wrong rank": 400, "no such path": 404
    }  # fmt: skip
    assert failed["wrong field"]["body"]["error"]["param"] == "temperature"
