"""`/stats` of the terminal chat: what a HAMburger server does, and what another kind of server lacks."""

from __future__ import annotations

import httpx
import pytest

from chat_terminal import Captured, run_chat, type_lines
from hamburger.clients.chat.stats import server_stats
from hamburger.clients.connection import client_options
from hamburger.clients.wire import RequestError
from scripted_server import ScriptedServer

METRICS = """\
# HELP hamburger_num_requests_running x
hamburger_num_requests_running{model_name="tiny"} 2.0
hamburger_num_requests_waiting{model_name="tiny"} 1.0
hamburger_num_requests_running{model_name="other"} 9.0
hamburger_kv_cache_usage_perc{model_name="tiny"} 0.125
hamburger_generation_tokens_per_second{model_name="tiny"} 321.25
hamburger_tokens_per_macro_step{model_name="tiny"} 2.0
hamburger_tokens_per_kv_ratio{model_name="tiny"} 1.0
hamburger_drafted_tokens_total{model_name="tiny",drafter="micro",position="1"} 60.0
hamburger_drafted_tokens_total{model_name="tiny",drafter="lookup",position="1"} 40.0
hamburger_accepted_tokens_total{model_name="tiny",drafter="micro",position="1"} 45.0
process_cpu_seconds_total 3.0
"""


def test_stats_say_what_the_server_does(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    server.metrics = METRICS
    type_lines(monkeypatch, "/stats")
    assert run_chat(server, "--model", "tiny@0.9") == 0
    assert capsys.readouterr().err.splitlines()[1] == (
        "> 2 running, 1 waiting · 12.5 % of the KV slots in use · 321.2 tokens/s · 2.00 tokens per step · "
        "1.00 tokens per KV · 45 % of 100 drafts accepted since its start"
    )


def test_stats_of_a_lora_adapter_are_its_model_s(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    server.metrics = METRICS
    server.models = {"data": [{"id": "tiny", "parent": None}, {"id": "sql", "parent": "tiny"}]}
    type_lines(monkeypatch, "/stats")
    assert run_chat(server, "--model", "sql@0.9") == 0
    assert capsys.readouterr().err.splitlines()[1].startswith("> 2 running, 1 waiting")


def test_stats_of_another_kind_of_server_are_one_line(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    type_lines(monkeypatch, "/stats", "/stats")
    server.metrics = "vllm:num_requests_running 1.0\n"
    assert run_chat(server) == 0
    assert capsys.readouterr().err.count("tells nothing of tiny. Is it a HAMburger server?") == 2
    server.metrics = None
    type_lines(monkeypatch, "/stats")
    assert run_chat(server) == 0
    assert "error: HTTP 404" in capsys.readouterr().err


def test_stats_wait_for_seconds_and_not_for_minutes() -> None:
    waits = []

    def hang(request: httpx.Request) -> httpx.Response:
        waits.append(request.extensions["timeout"]["read"])
        raise httpx.ReadTimeout("silent", request=request)

    options = client_options("http://127.0.0.1:9", None, 600.0)
    client = httpx.Client(**options, transport=httpx.MockTransport(hang))
    with client, pytest.raises(RequestError, match="fell silent for too long"):
        server_stats(client, "tiny")
    assert waits == [10.0]


def test_stats_that_lack_a_figure_or_hold_no_number_are_one_line(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    server.metrics = METRICS.replace(" 321.25", " many")
    type_lines(monkeypatch, "/stats")
    assert run_chat(server) == 0
    assert "tells nothing of tiny. Is it a HAMburger server?" in capsys.readouterr().err
