"""What runs inside the image: its entry point and its health check."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import healthcheck
from http_answers import answering
from real_server import free_port

ROOT = Path(__file__).parents[2]


def health(status: int) -> Callable[[str], tuple[int, bytes]]:
    """A server whose /health answers with a status."""
    return lambda path: (status if path == "/health" else 404, b'{"status": "the engine is dead"}')


@pytest.mark.parametrize(("status", "code"), [(200, 0), (401, 0), (503, 1), (404, 1)])
def test_the_health_check_follows_the_servers_health(
    status: int, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # it is for the hub, not for the server itself
    with answering(health(status)) as port:
        assert healthcheck.main({"HAMBURGER_PORT": str(port)}) == code
    assert (f"answers {status}: " in capsys.readouterr().err) == bool(code)


def test_a_server_that_is_not_there_is_not_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    assert healthcheck.main({"HAMBURGER_PORT": str(free_port())}) == 1
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("env", "url"),
    [
        ({}, "http://127.0.0.1:8000/health"),
        ({"HAMBURGER_PORT": ""}, "http://127.0.0.1:8000/health"),
        ({"HAMBURGER_PORT": "9", "HAMBURGER_SSL_CERTFILE": "/c.pem"}, "https://127.0.0.1:9/health"),
        ({"HAMBURGER_HOST": "0.0.0.0"}, "http://127.0.0.1:8000/health"),
        ({"HAMBURGER_HOST": "::"}, "http://[::1]:8000/health"),
        ({"HAMBURGER_HOST": "fd00::7", "HAMBURGER_PORT": "9"}, "http://[fd00::7]:9/health"),
        ({"HAMBURGER_HOST": "172.18.0.2"}, "http://172.18.0.2:8000/health"),
        ({"HAMBURGER_HOST": "localhost"}, "http://localhost:8000/health"),
    ],
)
def test_it_asks_where_the_server_listens(env: dict[str, str], url: str) -> None:
    assert healthcheck.health_url(healthcheck.settings_of(env)) == url


def test_it_reads_the_servers_yaml_behind_its_environment(tmp_path: Path) -> None:
    config, keys = tmp_path / "server.yaml", tmp_path / "keys"
    config.write_text(f"port: 9\nhost: 0.0.0.0\nssl_certfile: /c.pem\nsettle: true\napi_key_file: {keys}\nlora:\n")
    keys.write_text("\ufeff# ours\n\nfirst-key # of a team\nsecond-key\n")
    settings = healthcheck.settings_of({"HAMBURGER_CONFIG": str(config), "HAMBURGER_PORT": "10", "HAMBURGER_HOST": ""})
    assert healthcheck.health_url(settings) == "https://127.0.0.1:10/health"
    assert healthcheck.key_of(settings) == "first-key"
    config.write_text("api-key: [a-key, b]\n")
    assert healthcheck.key_of(healthcheck.settings_of({"HAMBURGER_CONFIG": str(config)})) == "a-key"
    config.write_text("a: [")
    assert healthcheck.settings_of({"HAMBURGER_CONFIG": str(config)}) == {"config": str(config)}


@pytest.mark.parametrize(("key", "code"), [("right", 1), ("wrong", 0)])
def test_with_a_key_it_sees_an_engine_that_is_dead(key: str, code: int) -> None:
    with answering(lambda _: (503, b"dead"), needs_key="right") as port:
        assert healthcheck.main({"HAMBURGER_PORT": str(port), "HAMBURGER_API_KEY": f" {key},other"}) == code


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, "|"),
        ({"MODEL": "/models/a", "BASE": "b/c"}, "/models/a|b/c"),
        ({"MODEL": "a", "HAMBURGER_MODEL": "x"}, "x|"),
    ],
)
def test_the_entry_point_takes_the_short_names_and_becomes_the_server(
    tmp_path: Path, env: dict[str, str], expected: str
) -> None:
    recorder = tmp_path / "hamburger"
    recorder.write_text('#!/bin/sh\necho "$$ $HAMBURGER_MODEL|$HAMBURGER_BASE $*"\n')
    recorder.chmod(0o755)
    with subprocess.Popen(
        [ROOT / "deploy" / "entrypoint.sh", "serve", "--port", "1 2"],
        env={"PATH": f"{tmp_path}{os.pathsep}{os.defpath}", **env},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        output, _ = process.communicate(timeout=30)
    assert output == f"{process.pid} {expected} serve --port 1 2\n"  # the same process: it gets the signals


def environment_behind_the_entry_point(folder: Path, env: dict[str, str]) -> dict[str, str]:
    recorder = folder / "hamburger"
    recorder.write_text("#!/bin/sh\nenv\n")
    recorder.chmod(0o755)
    env = {"PATH": f"{folder}{os.pathsep}{os.defpath}", **env}
    done = subprocess.run([ROOT / "deploy" / "entrypoint.sh"], env=env, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


def test_an_empty_setting_of_opentelemetry_is_an_unset_one(tmp_path: Path) -> None:
    given = {"OTEL_BSP_EXPORT_TIMEOUT": "", "OTEL_TRACES_SAMPLER": "always_off", "OTEL_EXPORTER_OTLP_HEADERS": "a=b,c="}
    seen = environment_behind_the_entry_point(tmp_path, given)
    del given["OTEL_BSP_EXPORT_TIMEOUT"]
    assert {name: value for name, value in seen.items() if name.startswith("OTEL_")} == given


def test_tritons_cache_moves_to_tmp_where_it_cannot_be_written(tmp_path: Path) -> None:
    usable, unusable = tmp_path / "cache" / "triton", tmp_path / "hamburger" / "triton"  # a folder inside a file
    for folder, expected in ((usable, str(usable)), (unusable, "/tmp/triton")):
        seen = environment_behind_the_entry_point(tmp_path, {"TRITON_CACHE_DIR": str(folder)})
        assert seen["TRITON_CACHE_DIR"] == expected
    assert "TRITON_CACHE_DIR" not in environment_behind_the_entry_point(tmp_path, {})
