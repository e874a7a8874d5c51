"""The engine's process under a real server: it dies, starts again, works for long, and is never left behind."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines_of_servers import ENDLESS, OPTIONS, Streams, engine_pid, in_the_middle, until
from hamburger.server.api.errors import ENGINE_ENDED
from processes import is_alive
from real_server import RealServer
from slow_cases import slow


@pytest.mark.slow
def test_a_killed_engine_is_told_to_32_streams_and_ends_the_server(grafted_folder: Path) -> None:
    with RealServer(str(grafted_folder), *OPTIONS, env={"HAMBURGER_MAX_NUM_SEQS": "40"}) as server:
        engine = engine_pid(server)
        with in_the_middle(server, [engine], lambda: [Streams(server, 32)], 32) as [streams]:
            killed_at = time.monotonic()
            os.kill(engine, signal.SIGKILL)
        streams.join()
        assert len(streams.endings) == 32
        for error, done in streams.endings:
            assert done == "data: [DONE]"
            body = json.loads(error.removeprefix("data: "))["error"]
            assert (body["type"], body["code"]) == ("service_unavailable", "engine_unavailable")
            assert body["message"] == ENGINE_ENDED
        assert max(streams.ended_at) - killed_at < 5
        assert server.wait(20) == 1  # for its supervisor
        assert "The engine died: its process" in server.log()
        assert "SIGKILL" in server.log()
        assert "Traceback" not in server.log()


def test_an_engine_is_started_again_when_told_to(grafted_folder: Path) -> None:
    with RealServer(str(grafted_folder), *OPTIONS, "--engine-restarts", "1") as server:
        body = {**ENDLESS, "stream": False, "max_tokens": 8}
        before = server.post("/v1/completions", body).json()["choices"][0]["text"]
        first = engine_pid(server)
        with in_the_middle(server, [first], lambda: [Streams(server, 4)], 4) as [streams]:
            os.kill(first, signal.SIGKILL)
        streams.join()
        assert all("engine_unavailable" in error for error, _ in streams.endings)
        refused = server.post("/v1/completions", body)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert server.get("/ready").status_code == 503
        assert server.get("/health").json() == {"status": "ok", "models": {"burger": "restarting"}}
        until(lambda: server.get("/ready").status_code == 200)
        assert server.post("/v1/completions", body).json()["choices"][0]["text"] == before
        assert engine_pid(server) != first
        os.kill(engine_pid(server), signal.SIGKILL)  # no restart is left
        assert server.wait(20) == 1


def test_http_answers_during_a_long_prefill_and_has_no_torch(grafted_folder: Path) -> None:
    options = (*OPTIONS, "--max-num-batched-slots", "4096")
    with RealServer(str(grafted_folder), *options, env={"HAMBURGER_MAX_NUM_SEQS": "64"}) as server:
        assert "libtorch" not in Path(f"/proc/{server.pid}/maps").read_text()
        assert "libtorch" in Path(f"/proc/{engine_pid(server)}/maps").read_text()
        prompt = [[5 + i] * 500 for i in range(20)]  # one alone would be scored once for all
        num_steps = math.ceil(20 * 500 / 4096)
        body = {"model": "burger", "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 5, "echo": True}
        asked = threading.Thread(target=lambda: server.post("/v1/completions", body))
        asked.start()
        until(lambda: server.metric("hamburger_num_requests_running") > 0)
        num_answers = 0
        with httpx.Client(base_url=server.url, timeout=10) as client:
            while asked.is_alive():
                assert client.get("/health").status_code == 200
                num_answers += 1
        assert num_answers > 4 * num_steps  # who waits for the engine has one a step


@pytest.mark.slow
def test_sigterm_under_load_finishes_what_runs_and_takes_nothing_new(grafted_folder: Path) -> None:
    with RealServer(str(grafted_folder), *OPTIONS, "--max-num-seqs", "16", "--drain-seconds", "60") as server:
        engine = engine_pid(server)
        streams = Streams(server, 32)  # twice the seats
        until(lambda: server.metric("hamburger_num_requests_waiting") == 16)
        os.kill(server.pid, signal.SIGTERM)
        until(lambda: "stopping: " in server.log())
        refused = server.post("/v1/completions", {**ENDLESS, "stream": False, "max_tokens": 1})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["code"] == "engine_unavailable"
        assert server.get("/health").status_code == 200  # it lives,
        assert server.get("/ready").status_code == 503  # but others should be asked
        streams.join()
        assert server.wait(30) == 0
        for last, done in streams.endings:
            assert done == "data: [DONE]"
            assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert len(streams.endings) == 32
        assert not is_alive(engine)


def test_a_server_that_drains_keeps_no_connection(grafted_folder: Path) -> None:
    """Whoever asks again over one it has would be refused, instead of finding the server that takes its place."""
    with RealServer(str(grafted_folder), *OPTIONS, "--drain-seconds", "60") as server:
        idle = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        idle.request("GET", "/version")
        idle.getresponse().read()
        with in_the_middle(server, [engine_pid(server)], lambda: [Streams(server, 1)], 1) as [streams]:
            os.kill(server.pid, signal.SIGTERM)
            assert idle.sock.recv(1) == b""
            refused = server.post("/v1/completions", {**ENDLESS, "stream": False})
            assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        streams.join()
        [(last, done)] = streams.endings
        assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert done == "data: [DONE]"
        assert server.wait(30) == 0
        idle.close()


@pytest.mark.parametrize("sig", [signal.SIGKILL, slow(signal.SIGTERM)])
def test_no_engine_is_left_behind(grafted_folder: Path, sig: signal.Signals) -> None:
    with RealServer(str(grafted_folder), *OPTIONS, "--drain-seconds", "0") as server:
        engine = engine_pid(server)
        Streams(server, 0)
        os.kill(server.pid, sig)
        server.wait(20)
        until(lambda: not is_alive(engine))


def test_a_second_signal_stops_at_once(grafted_folder: Path) -> None:
    with RealServer(str(grafted_folder), *OPTIONS, "--drain-seconds", "60") as server:
        engine = engine_pid(server)
        body = {**ENDLESS, "n": 30}
        thread = threading.Thread(target=lambda: _ignore(server, body))
        thread.start()
        until(lambda: server.metric("hamburger_num_requests_running") > 0)
        os.kill(server.pid, signal.SIGINT)
        until(lambda: "A second signal stops at once" in server.log())
        os.kill(server.pid, signal.SIGINT)
        assert server.wait(10) == 128 + signal.SIGINT
        until(lambda: not is_alive(engine))
        thread.join(20)


def _ignore(server: RealServer, body: dict[str, Any]) -> None:
    with contextlib.suppress(httpx.TransportError):  # it is cut off on purpose
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
