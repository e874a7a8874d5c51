"""The arguments of the application on Ray Serve: options of the replicas and settings of each, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hamburger.server.config import SettingsError
from hamburger.server.replicas.forwarding import replica_settings
from hamburger.server.replicas.ray_app import build
from hamburger.server.replicas.scale_options import read_arguments, seats

CONFIG = Path(__file__).parents[2] / "deploy/ray-serve.yaml"


def test_the_configuration_in_the_repository_is_good() -> None:
    (application,) = yaml.safe_load(CONFIG.read_text())["applications"]
    assert application["import_path"] == f"{build.__module__}:{build.__name__}"
    options, _ = read_arguments(application["args"])
    assert options.replicas == 2


def test_options_and_settings_stand_side_by_side() -> None:
    options, settings = read_arguments(
        {"replicas": "3", "max_num_seqs": "8", "kv_cache_memory": "1GiB"}
    )  # as serve run
    args = settings.engine_args()
    assert (options.replicas, args.max_num_seqs, args.kv_cache_memory) == (3, 8, 2**30)


def test_settings_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAMBURGER_MAX_NUM_SEQS", "5")
    assert read_arguments({})[1].engine_args().max_num_seqs == 5


@pytest.mark.parametrize("name", ["ssl_certfile", "ssl_keyfile", "response_file"])
def test_what_the_environment_promises_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Rather than to serve without TLS, say, where it was asked for."""
    monkeypatch.setenv(f"HAMBURGER_{name.upper()}", "/a/path")
    with pytest.raises(SettingsError, match=f"{name} is set in the environment .*What sets it here: "):
        read_arguments({})


def test_what_means_nothing_here_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    config = tmp_path / "server.yaml"
    config.write_text("port: 9000\n")
    monkeypatch.setenv("HAMBURGER_CONFIG", str(config))
    monkeypatch.setenv("HAMBURGER_ENGINE_RESTARTS", "3")
    _, settings = read_arguments({})
    assert [record.getMessage().split(" is set ")[0] for record in caplog.records] == ["port", "engine_restarts"]
    assert replica_settings(settings).engine_restarts == 0


def test_the_environment_says_how_long_answers_may_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_arguments({})[0].drain_seconds == 300
    monkeypatch.setenv("HAMBURGER_DRAIN_SECONDS", "30")
    assert read_arguments({})[0].drain_seconds == 30
    assert read_arguments({"drain_seconds": 60})[0].drain_seconds == 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"port": 1}, r"port is no setting of a replica.*http_options\.port"),
        ({"engine_restarts": 1}, "a replica whose engine died is replaced"),
        ({"replica": 2}, "no option 'replica': did you mean replicas"),
        ({"max_num_sqes": 2}, "did you mean max_num_seqs"),
        ({"weather": 2}, "Known are replicas, "),
        ({"allow_lora_loading": True, "max_loras": 2}, "one replica alone would load what a request asks for"),
        ({"replicas": 0}, "replicas is 0: "),
        ({"max_num_seqs": 0}, "max-num-seqs is 0: "),
        ({"replicas": 3, "max_replicas": 2}, r"max_replicas is 2: it must be at least replicas \(3\)"),
        ({"target_ongoing_requests": 2}, "without max_replicas"),
        ({"bundles": [{"GPU": 1}, {"GPU": 1}]}, "bundles after the first ask for GPUs"),
        ({"gpus": 2}, "reserves 2 GPUs, but tensor_parallel_size is 1"),
        ({"bundles": [{"GPU": 2}]}, "reserves 2 GPUs, but tensor_parallel_size is 1"),
        ({"gpus": 1, "tensor_parallel_size": 2}, "tensor_parallel_size is 2, but a replica reserves 1 GPUs"),
        ({"gpus": 4, "tensor_parallel_size": 2}, "reserves 4 GPUs, but tensor_parallel_size is 2"),
        ({"gpus": 0.5, "replicas": 2}, "reserves 0.5 of a GPU, but its KV pool .* set kv_cache_memory"),
        ({"bundles": [{"CPU": 1}], "cpus": 2}, "the first bundle says"),
        ({"gpus": -1}, "gpus is -1: "),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        read_arguments(arguments)


def test_bundles_of_one_device_are_passed_on() -> None:
    bundles = [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 1.0}]
    assert read_arguments({"bundles": bundles})[0].bundles == bundles


@pytest.mark.parametrize("devices", [{"gpus": 2}, {"bundles": [{"GPU": 2, "CPU": 8}]}, {}])
def test_a_split_engine_has_a_gpu_for_each_rank_or_none_at_all(devices: dict[str, Any]) -> None:
    assert read_arguments({"tensor_parallel_size": 2, **devices})[1].engine_args().tensor_parallel_size == 2


@pytest.mark.parametrize("devices", [{"gpus": 0.5}, {"bundles": [{"GPU": 0.25, "CPU": 2}]}])
def test_an_engine_may_have_part_of_a_gpu(devices: dict[str, Any]) -> None:
    assert read_arguments({"replicas": 2, "kv_cache_memory": "4GiB", **devices})[1].engine_args()


def test_an_engine_is_given_a_few_more_than_its_seats() -> None:
    assert seats(*read_arguments({"max_num_seqs": 8})) == (10, 6.0)
    assert seats(*read_arguments({"max_num_seqs": 1})) == (2, 1.0)
    given = {"max_ongoing_requests": 3, "target_ongoing_requests": 2, "max_replicas": 4}
    assert seats(*read_arguments(given)) == (3, 2.0)
