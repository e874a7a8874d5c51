"""What the server tells of itself: its settings once, with secrets masked, for people and as JSON."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from hamburger.engine.logs import JsonFormatter
from hamburger.server.cli import main
from hamburger.server.config import ServeSettings, SettingsError
from hamburger.server.operation.console import announce_settings, announcer, secrets_of, settings_without_secrets
from hamburger.server.operation.tracing import open_traces

SETTINGS = ServeSettings(api_key=["sk-first", "sk-second"], port=8123, api_key_file=Path("keys"), cors_origin=["*"])


def test_people_are_told_what_differs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf-token")
    announce_settings(SETTINGS, announcer("text"))
    line = capsys.readouterr().out
    settings = "port 8123, api_key ['***', '***'], api_key_file keys, cors_origin ['*'], HF_TOKEN ***"
    assert line.endswith(f"s] settings: {settings}\n")
    monkeypatch.delenv("HF_TOKEN")
    announce_settings(ServeSettings(), announcer("text"))
    assert capsys.readouterr().out == ""


def test_further_models_are_told_as_they_were_written(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ServeSettings(also=["bold=,confidence=0.3", "base=builtin"])
    announce_settings(settings, announcer("text"))
    assert capsys.readouterr().out.endswith("also ['bold=,confidence=0.3', 'base=builtin']\n")


def test_json_has_all_of_them(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUGGING_FACE_HUB_TOKEN", "hf-token")
    settings = SETTINGS.model_copy(update={"log_format": "json"})
    with caplog.at_level(logging.INFO, logger="hamburger.start"):
        announce_settings(settings, announcer("json"))
    [record] = caplog.records
    told = json.loads(JsonFormatter().format(record))["settings"]
    assert told.keys() == ServeSettings.model_fields.keys() | {"HUGGING_FACE_HUB_TOKEN"}
    assert (told["port"], told["api_key_file"], told["max_queue"]) == (8123, "keys", 1024)
    assert "sk-" not in str(told)
    assert "hf-token" not in str(told)


@pytest.mark.parametrize(
    "endpoint", ["http://user:pass-word@host:4318", "https://pass-word@host/v1/traces", "u:pass-word@h"]
)
def test_an_endpoint_with_a_password_is_refused_and_not_shown(endpoint: str) -> None:
    with pytest.raises(SettingsError, match="OTEL_EXPORTER_OTLP_HEADERS") as caught:
        open_traces(endpoint)  # which `serve` does before it logs anything
    assert "pass-word" not in str(caught.value)


def test_all_keys_and_tokens_are_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf-token")
    file = tmp_path / "keys"
    file.write_text("sk-of-the-file\n")
    settings = SETTINGS.model_copy(update={"api_key_file": file})
    assert secrets_of(settings) == ["sk-first", "sk-second", "sk-of-the-file", "hf-token"]
    assert "sk-" not in str(settings_without_secrets(settings, {}))


def test_why_it_does_not_start_is_json_where_the_log_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HAMBURGER_LOG_FORMAT", "json")
    for argv in (["--max-queue", "no"], ["--ssl-certfile", "no-such", "--log-format", "json"]):
        assert main(["serve", "--port", "0", *argv]) == 2
        told = json.loads(capsys.readouterr().err)
        assert (told["level"], told["logger"]) == ("error", "hamburger.start")
        assert argv[0].removeprefix("--").replace("-", "_") in told["message"].replace("-", "_")


def test_in_json_what_is_announced_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hamburger.start"):
        announcer("json")("ready\n  try: curl")
    assert [record.getMessage() for record in caplog.records] == ["ready"]
