"""A real server's log: every line is JSON, from both processes, and no secret is in it."""

from __future__ import annotations

import json
from pathlib import Path

from engines_of_servers import engine_pid
from real_server import RealServer

KEY, TOKEN = "sk-key-of-the-operator", "hf_token-of-the-operator"
HEADER = "Authorization: Bearer token-of-the-collector"  # not as OpenTelemetry wants it, which quotes it


def test_every_line_is_json_and_secrets_are_masked(grafted_folder: Path) -> None:
    options = ["--served-model-name", "burger", "--dtype", "float32", "--kv-cache-memory", "64MiB"]
    options += ["--log-format", "json", "--log-level", "debug"]
    options += ["--otlp-traces-endpoint", "http://127.0.0.1:9"]
    env = {"HAMBURGER_API_KEY": KEY, "HF_TOKEN": TOKEN, "OTEL_EXPORTER_OTLP_HEADERS": f"x-tenant=a, {HEADER}"}
    with RealServer(str(grafted_folder), *options, env=env) as server:
        body = {"model": "burger", "prompt": "words of the prompt", "max_tokens": 6, "ignore_eos": True}
        answers = [
            server.post("/v1/completions", body | more, Authorization=f"Bearer {key}")
            for key, more in ((KEY, {}), (KEY, {"stream": True}), (KEY, {"max_tokens": -1}), (f"{KEY}x", {}))
        ]
        assert [answer.status_code for answer in answers] == [200, 200, 400, 401]
        environment = Path(f"/proc/{engine_pid(server)}/environ").read_bytes()
        assert b"PATH=" in environment
        assert KEY.encode() not in environment
        assert server.stop() == 0
        log = server.log()
    lines = [json.loads(line) for line in log.splitlines()]
    assert {"time", "level", "logger", "message"} <= set.intersection(*(set(line) for line in lines))
    assert any("Header format invalid" in line["message"] for line in lines)
    for secret in (KEY, TOKEN, HEADER, "words of the prompt"):
        assert secret not in log
    [settings] = [line["settings"] for line in lines if line["message"] == "settings"]
    assert (settings["api_key"], settings["HF_TOKEN"]) == (["***"], "***")
    assert (settings["log_level"], settings["max_queue"]) == ("debug", 1024)
    requests = [line for line in lines if line["logger"] == "hamburger.request" and line["method"] == "POST"]
    assert [(line["status"], line["completion_tokens"]) for line in requests] == [
        (200, 6), (200, 6), (400, None), (401, None),
    ]  # fmt: skip
    whole = requests[0]
    assert whole["kv_slots"] >= 2
    assert 0 <= whole["queue_seconds"] <= whole["ttft_seconds"] <= whole["seconds"]
    assert any(line["message"].startswith("ready: burger on cpu") for line in lines)
