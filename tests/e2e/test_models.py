"""A HAMburger and its plain base behind one real server: both answer at once, one dies, all drain."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engines_of_servers import ENDLESS, Streams, in_the_middle, until
from hamburger.server.api.errors import ENGINE_ENDED
from processes import is_alive
from real_server import RealServer

BURGER = "smollm2-135m-hamburger"
MESSAGES: Any = [{"role": "user", "content": "Name three colours."}]
SMALL = ("--served-model-name", "a", "--dtype", "float32", "--kv-cache-memory", "64MiB")


def engine_pids(server: RealServer) -> list[int]:
    """In the order in which they were started."""
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    return [int(pid) for pid in children if b"hamburger.engine.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def has_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def ending(stream: Streams) -> Any:
    """The last event's JSON of one stream; [DONE] must follow it."""
    stream.join()
    [(last, done)] = stream.endings
    assert done == "data: [DONE]"
    return json.loads(last.removeprefix("data: "))


async def test_the_embedded_hamburger_and_its_base_answer_at_once() -> None:
    options = (
        "--also",
        "base=builtin",
        "--prefix-cache",
        "false",
        "--max-model-len",
        "256",
        "--kv-cache-memory",
        "64MiB",
    )
    with RealServer(*options) as server:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)

        async def ask(model: str) -> Any:
            return await client.chat.completions.create(
                model=model,
                messages=MESSAGES,
                max_tokens=24,
                temperature=0,
                extra_body={"confidence": 0.2, "ignore_eos": True},
            )

        names = (BURGER, "base")
        alone = [await ask(name) for name in names]
        together = await asyncio.gather(*(ask(name) for name in names))
        for name, first, second in zip(names, alone, together, strict=True):
            assert first.model == second.model == name
            assert first.choices[0].message.content == second.choices[0].message.content
        burger, base = together
        assert burger.usage.tokens_per_kv == base.usage.tokens_per_kv == 1.0
        assert burger.system_fingerprint != base.system_fingerprint
        listed = [model.id for model in (await client.models.list()).data if "@" not in model.id]
        assert listed == [BURGER, "base"]
        assert (await client.models.retrieve("base")).id == "base"
        with pytest.raises(openai.NotFoundError, match=f"{BURGER}, base"):
            await ask("another")
        for name in names:
            label = f'model_name="{name}"'
            assert server.metric("hamburger_generation_tokens_total", label) == 48
        assert server.metric("hamburger_macro_steps_total", 'model_name="base"') == 48
        # Whether its drafts pay beside a busy test, only the clock knows. It has a micro decoder, the base has none.
        async with httpx.AsyncClient() as http:
            told = (await http.get(f"{server.url}/metrics")).text.splitlines()
        drafters = [line for line in told if line.startswith("hamburger_drafted") and 'drafter="micro"' in line]
        assert [any(f'model_name="{name}"' in line for line in drafters) for name in names] == [True, False]
        first, second = engine_pids(server)
        assert [has_torch(pid) for pid in (server.pid, first, second)] == [False, True, True]
        await client.close()
    assert not is_alive(first)
    assert not is_alive(second)


@pytest.mark.slow
def test_a_killed_engine_ends_the_server_once_the_others_answers_are_through(grafted_folder: Path) -> None:
    options = (*SMALL, "--also", f"b={grafted_folder}", "--drain-seconds", "60")
    with RealServer(str(grafted_folder), *options) as server:
        first, second = engines = engine_pids(server)
        with in_the_middle(server, engines, lambda: [Streams(server, 1, model=name) for name in "ab"], 2) as streams:
            os.kill(second, signal.SIGKILL)
        error = ending(streams[1])["error"]
        assert error["code"] == "engine_unavailable"
        assert error["message"] == ENGINE_ENDED
        assert ending(streams[0])["choices"][0]["finish_reason"] == "length"  # whole: drained, not cut off
        assert server.wait(30) == 1
        assert "The engine of b died" in server.log()
        assert "Traceback" not in server.log()
        until(lambda: not is_alive(first))


@pytest.mark.slow
def test_one_engine_starts_again_while_the_other_serves(grafted_folder: Path) -> None:
    options = (*SMALL, "--also", f"b={grafted_folder},confidence=1", "--engine-restarts", "1")
    with RealServer(str(grafted_folder), *options) as server:
        body = {**ENDLESS, "max_tokens": 8, "stream": False}
        before = server.post("/v1/completions", {**body, "model": "b"}).json()
        assert before["usage"]["tokens_per_kv"] == 1.0  # its own confidence
        first, second = engine_pids(server)
        os.kill(second, signal.SIGKILL)
        until(lambda: server.get("/ready").status_code == 503)
        told = server.get("/ready").json()
        assert told["models"] == {"a": "ready", "b": "the engine starts again"}
        lives = server.get("/health")
        assert (lives.status_code, lives.json()["models"]) == (200, {"a": "ok", "b": "restarting"})
        assert server.post("/v1/completions", {**body, "model": "a"}).status_code == 200
        refused = server.post("/v1/completions", {**body, "model": "b"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        until(lambda: server.get("/ready").status_code == 200)
        after = server.post("/v1/completions", {**body, "model": "b"}).json()
        assert after["choices"][0]["text"] == before["choices"][0]["text"]
        assert first in engine_pids(server)
        assert second not in engine_pids(server)


def test_sigterm_drains_all(grafted_folder: Path) -> None:
    options = (*SMALL, "--also", f"b={grafted_folder}", "--drain-seconds", "60")
    with RealServer(str(grafted_folder), *options) as server:
        engines = engine_pids(server)
        with in_the_middle(server, engines, lambda: [Streams(server, 1, model=name) for name in "abab"], 4) as streams:
            os.kill(server.pid, signal.SIGTERM)
            until(lambda: "stopping: " in server.log())
            assert server.get("/ready").json()["models"] == {"a": "draining", "b": "draining"}
            assert server.get("/health").status_code == 200  # it lives, but others should be asked
            for name in ("a", "b"):
                refused = server.post("/v1/completions", {**ENDLESS, "model": name, "stream": False})
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
                assert int(refused.headers["retry-after"]) > 0
        for stream in streams:
            assert ending(stream)["choices"][0]["finish_reason"] == "length"
        assert server.wait(30) == 0
        assert not any(is_alive(pid) for pid in engines)
