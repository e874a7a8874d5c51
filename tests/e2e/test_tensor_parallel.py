"""A real server whose model two processes hold: one rank's answers, and the end of any of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engines_of_servers import OPTIONS, Streams, children, engine_pid, in_the_middle, until
from hamburger.server.api.errors import ENGINE_ENDED
from processes import is_alive
from real_server import RealServer
from slow_cases import slow

SPLIT = (*OPTIONS, "--device", "cpu", "--tensor-parallel-size", "2")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def ranks_of(server: RealServer) -> list[int]:
    return children(engine_pid(server), "hamburger.engine.ranks.rank")


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "burger", "prompt": "Once upon a time", "max_tokens": 16, "ignore_eos": True, "seed": 4, **fields}


def listening_addresses(pid: int) -> set[str]:
    """Those that a process accepts TCP connections on, as the kernel writes them."""
    links = [link for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    sockets = {str(link.readlink())[len("socket:[") : -1] for link in links if "socket:" in str(link.readlink())}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in sockets:
                found.add(local.partition(":")[0])
    return found


def test_the_answers_of_one_rank(grafted_folder: Path, grafted: RealServer) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
    chat = {"model": "burger", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 40, "seed": 4}
    bodies: list[tuple[str, dict[str, Any]]] = [
        *(("/v1/completions", asked(temperature=t, confidence=c)) for t, c in ((0, 0.0), (1, 0.4))),
        ("/v1/completions", asked(temperature=0, logprobs=2, echo=True, frequency_penalty=0.5)),
        ("/v1/chat/completions", {**chat, "response_format": schema, "temperature": 1}),
    ]
    with RealServer(str(grafted_folder), *SPLIT) as server:
        assert "loading" in server.log()
        assert " on 2 x cpu in float32" in server.log()
        for path, body in bodies:
            ours, expected = (s.post(path, body).json() for s in (server, grafted))
            texts = [[c.get("text") or c["message"]["content"] for c in x["choices"]] for x in (ours, expected)]
            assert texts[0] == texts[1], body
            assert texts[0] != [""]
            assert ours["usage"] == expected["usage"]
        assert ours["usage"]["tokens_per_kv"] >= 1
        engine, [rank] = engine_pid(server), ranks_of(server)
        # Nothing that they meet at is open to others.
        assert listening_addresses(engine) | listening_addresses(rank) == {"0100007F"}
        os.kill(server.pid, signal.SIGKILL)
        server.wait(20)
        until(lambda: not is_alive(engine) and not is_alive(rank))


@pytest.mark.slow
def test_a_killed_rank_is_told_to_every_stream_and_an_engine_with_ranks_starts_again(grafted_folder: Path) -> None:
    with RealServer(str(grafted_folder), *SPLIT, "--engine-restarts", "1") as server:
        before = server.post("/v1/completions", asked(temperature=0)).json()["choices"][0]["text"]
        first, [rank] = engine_pid(server), ranks_of(server)
        with in_the_middle(server, [first, rank], lambda: [Streams(server, 8)], 8) as [streams]:
            killed_at = time.monotonic()
            os.kill(rank, signal.SIGKILL)
        streams.join()
        assert len(streams.endings) == 8
        for error, done in streams.endings:
            assert done == "data: [DONE]"
            body = json.loads(error.removeprefix("data: "))["error"]
            assert (body["type"], body["code"]) == ("service_unavailable", "engine_unavailable")
            assert body["message"] == ENGINE_ENDED
        assert f"rank 1, its process {rank}, was ended by SIGKILL" in server.log()
        assert max(streams.ended_at) - killed_at < 20
        until(lambda: not is_alive(first))
        until(lambda: server.get("/ready").status_code == 200)
        assert server.post("/v1/completions", asked(temperature=0)).json()["choices"][0]["text"] == before
        second, [rank] = engine_pid(server), ranks_of(server)
        assert second != first
        with in_the_middle(server, [second, rank], lambda: [Streams(server, 2)], 2) as [streams]:
            os.kill(second, signal.SIGKILL)  # rank 0, in the middle of steps; no restart is left
        streams.join()
        assert all("engine_unavailable" in error for error, _ in streams.endings)
        assert server.wait(20) == 1
        until(lambda: not is_alive(rank))
        assert "Traceback" not in server.log()


@pytest.mark.slow
def test_a_rank_that_dies_while_nothing_runs_ends_the_server(grafted_folder: Path) -> None:
    with RealServer(str(grafted_folder), *SPLIT) as server:
        engine, [rank] = engine_pid(server), ranks_of(server)
        os.kill(rank, signal.SIGKILL)
        assert server.wait(20) == 1
        assert not is_alive(engine)
        assert f"The engine died: rank 1, its process {rank}, was ended by SIGKILL" in server.log()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        slow((), "tensor_parallel_size is 2, but it must divide the model's num_key_value_heads 3"),
        slow(("--quantization", "int8"), "quantization is int8, but tensor_parallel_size is 2"),
        (("--device", "cuda:1"), "device is cuda:1, but tensor_parallel_size is 2"),
    ],
)
def test_what_cannot_be_split_is_one_line(arguments: tuple[str, ...], told: str) -> None:
    command = [str(Path(sys.executable).parent / "hamburger"), "serve", "--tensor-parallel-size", "2", *arguments]
    ended = subprocess.run([*command, "--port", "0"], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert told in ended.stderr
    assert "Traceback" not in ended.stderr
