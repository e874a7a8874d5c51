"""Disconnects, the context limit, signals and wrong options, on real server processes."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines_of_servers import engine_pid
from real_server import RealServer
from slow_cases import slow

HAMBURGER = str(Path(sys.executable).parent / "hamburger")
LONG = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "temperature": 0}


def test_disconnected_streams_free_their_slots(grafted: RealServer) -> None:
    for stream in (True, False):
        aborted = grafted.metric("hamburger_request_success_total", 'finished_reason="abort"')
        # A client that left is noticed a second later: the work must be longer, however fast steps are.
        body = json.dumps({"model": "burger", **LONG, "n": 64, "stream": stream, "confidence": 1.0}).encode()
        sockets = []
        for _ in range(8):
            s = socket.create_connection(("127.0.0.1", grafted.port))
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            head += f"Content-Length: {len(body)}\r\n\r\n"
            s.sendall(head.encode() + body)
            sockets.append(s)
        deadline = time.monotonic() + 20
        while grafted.metric("hamburger_num_requests_running") == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        for s in sockets:
            s.close()
        grafted.wait_idle()
        assert grafted.metric("hamburger_kv_cache_usage_perc") == 0
        assert grafted.metric("hamburger_request_success_total", 'finished_reason="abort"') > aborted


def test_a_prompt_at_the_context_limit_is_served_and_one_over_it_is_refused(embedded: RealServer) -> None:
    model = "smollm2-135m-hamburger"

    def complete(prompt_tokens: int, **fields: Any) -> httpx.Response:
        body = {"model": model, "prompt": [28] * prompt_tokens, "temperature": 0, **fields}
        return embedded.post("/v1/completions", body)

    full = complete(511).json()
    assert full["usage"]["completion_tokens"] == 1
    assert complete(510, max_tokens=2, ignore_eos=True).json()["choices"][0]["finish_reason"] == "length"
    for response, param in ((complete(512), "prompt"), (complete(510, max_tokens=3), "max_tokens")):
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
        assert "512" in response.json()["error"]["message"]


def test_metrics_count_what_clients_saw(grafted: RealServer) -> None:
    grafted.wait_idle()
    names = ("prompt_tokens_total", "generation_tokens_total", "kv_slots_total")
    before = {name: grafted.metric(f"hamburger_{name}") for name in names}
    body = {
        "model": "burger",
        "prompt": "Hello",
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "confidence": 0,
    }
    usage = grafted.post("/v1/completions", body).json()["usage"]
    grafted.wait_idle()
    grown = {name: grafted.metric(f"hamburger_{name}") - before[name] for name in names}
    assert grown["prompt_tokens_total"] == usage["prompt_tokens"]
    assert grown["generation_tokens_total"] == usage["completion_tokens"] == 8
    assert grown["kv_slots_total"] == usage["prompt_tokens"] + usage["kv_slots"]
    for process in ("server", "engine"):
        assert grafted.metric("hamburger_resident_memory_bytes", f'process="{process}"') > 30e6
    assert 0 < time.time() - grafted.metric("hamburger_engine_start_time_seconds") < 3600


@pytest.mark.parametrize("closed", ["2>&-", slow(">&-"), slow("<&- >&- 2>&-")])
def test_standard_streams_may_be_closed(grafted_folder: Path, closed: str) -> None:
    """Sockets would take their numbers, and be what the processes write their lines to."""
    options = ("--served-model-name", "burger", "--dtype", "float32", "--kv-cache-memory", "64MiB")
    with RealServer(str(grafted_folder), *options, closed=closed) as server:
        assert server.post("/v1/completions", {**LONG, "max_tokens": 4}).status_code == 200
        for pid in (server.pid, engine_pid(server)):
            assert not [n for n in range(3) if "socket:" in str(Path(f"/proc/{pid}/fd/{n}").readlink())]
        assert server.stop(signal.SIGTERM) == 0


@pytest.mark.slow  # test_engine_process.py: SIGTERM under load, and SIGINT twice
@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_cleanly_with_streams_open(grafted_folder: Path, sig: signal.Signals) -> None:
    options = ("--served-model-name", "burger", "--dtype", "float32", "--kv-cache-memory", "64MiB")
    with RealServer(str(grafted_folder), *options) as server:
        endings: list[str] = []

        def stream() -> None:
            body = {"model": "burger", **LONG, "stream": True, "confidence": 1.0}
            try:
                with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
                    endings.append([line for line in response.iter_lines() if line][-1])
            except httpx.TransportError as error:
                endings.append(repr(error))

        threads = [threading.Thread(target=stream) for _ in range(4)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 20
        while server.metric("hamburger_num_requests_running") < 4 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert server.stop(sig) == 0
        for thread in threads:
            thread.join(20)
        assert endings == ["data: [DONE]"] * 4  # finished, or told so: never cut off
        assert "Traceback" not in server.log()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--confidence", "2"], "confidence"),
        slow(["--max-model-len", "many"], "max-model-len"),
        (["no/such/folder"], "no/such/folder"),
        slow(["--max-model-len", "100000"], "max_model_len"),
        slow(["--kv-cache-memory", "1MiB"], "kv_cache_memory"),
        slow(["--no-such-option"], "no-such-option"),
    ],
)
def test_a_wrong_option_is_one_clear_line_and_exit_code_2(arguments: list[str], named: str) -> None:
    done = subprocess.run([HAMBURGER, "serve", "--port", "0", *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_a_port_in_use_is_told_before_loading() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = str(s.getsockname()[1])
        done = subprocess.run([HAMBURGER, "serve", "--port", port], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert port in done.stderr
    assert "loading" not in done.stdout + done.stderr
