"""Settings: where they come from, in which order, and one clear line for each that is wrong."""

from pathlib import Path
from typing import Any

import pytest

from hamburger.engine.dial.confidence_dial import AutoConfidence
from hamburger.engine.types.config import SETTLE_SETTINGS
from hamburger.server.cli import build_parser, main
from hamburger.server.config import ServeSettings, SettingsError
from hamburger.server.load_settings import load_settings
from hamburger.server.serve_arguments import GROUPS
from hamburger.server.setting_values import parse_bytes


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ServeSettings.model_fields, "config"):
        monkeypatch.delenv(f"HAMBURGER_{name.upper()}", raising=False)


def test_command_line_beats_environment_beats_file_beats_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("port: 1001\nmax-queue: 11\nblock_size: 8\n")
    monkeypatch.setenv("HAMBURGER_PORT", "1002")
    monkeypatch.setenv("HAMBURGER_MAX_QUEUE", "12")
    settings = load_settings({"port": "1003"}, str(file))
    args = settings.engine_args()
    assert (settings.port, args.max_queue, args.block_size, args.max_num_seqs) == (1003, 12, 8, 64)
    monkeypatch.setenv("HAMBURGER_CONFIG", str(file))
    assert load_settings({}).engine_args().block_size == 8


def test_every_setting_is_an_option_and_reaches_the_engine() -> None:
    given = {
        "model": "m", "base": "b", "served_model_name": "s", "host": "0.0.0.0", "port": "9", "api_key": "k",
        "device": "cpu", "dtype": "float32", "max_model_len": "128", "max_num_seqs": "3",
        "max_num_batched_slots": "64", "kv_cache_memory": "2GiB", "block_size": "4", "confidence": "0.5",
        "max_queue": "7", "max_queue_seconds": "1.5", "drain_seconds": "2", "engine_restarts": "1",
        "tool_parser": "hermes", "quantization": "none", "attention_backend": "torch", "also": "other=x",
        "api_key_file": "keys", "key_requests": "3", "key_tokens_per_minute": "999", "key_queue_share": "0.5",
        "allow_priority": "false", "public_operation": "false", "playground": "false", "cors_origin": "*",
        "ssl_certfile": "c",
        "ssl_keyfile": "k", "response_store": "5MiB", "response_file": "r", "max_body_size": "1MiB",
        "max_stop_strings": "5", "compact_json": "true",
        "target_tpot_ms": "40", "min_confidence": "0.3", "max_confidence": "0.9",
        "access_log": "false", "otlp_traces_endpoint": "http://c", "log_format": "json",
        "max_connections": "9", "client_seconds": "7", "sse_keep_alive_seconds": "12",
        "prefix_cache": "false", "log_level": "debug",
        "enforce_eager": "true",
        "tensor_parallel_size": "2",
        "overlap_steps": "off",
        "groups": "verified",
        "lora": "a=x", "max_loras": "3", "max_lora_rank": "9", "allow_lora_loading": "true",
        "model_alias": "x,y", "chat_template": "t", "chat_template_kwargs": '{"a": 1}',
        "sampling_defaults": '{"top_k": -1}',
        "kv_cache_dtype": "int8", "settle": "true", "settle_window": "96", "settle_growth": "0.25",
        "settle_keep": "0.5", "settle_limit": "700",
    }  # fmt: skip
    assert given.keys() == ServeSettings.model_fields.keys()
    options = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]
    namespace = vars(build_parser().parse_args(["serve", *options]))
    settings = load_settings({name: namespace[name] for name in given})
    assert [model.name for model in settings.also] == ["other"]
    assert [adapter.name for adapter in settings.lora] == ["a"]
    args = settings.model_copy(update={"tensor_parallel_size": 1}).engine_args()
    assert (args.max_loras, args.max_lora_rank) == (3, 9)
    assert (args.settle, args.settle_window, args.settle_growth) == (True, 96, 0.25)
    assert (args.settle_keep, args.settle_limit) == (0.5, 700)
    no_settling: dict[str, Any] = {"settle": False, **dict.fromkeys(SETTLE_SETTINGS)}
    args = settings.model_copy(update={"lora": [], "max_loras": 0, **no_settling}).engine_args()  # ranks have neither
    assert (args.model, args.base, args.device, args.dtype) == ("m", "b", "cpu", "float32")
    assert (args.max_model_len, args.max_num_seqs, args.max_num_batched_slots) == (128, 3, 64)
    assert (args.kv_cache_memory, args.block_size, args.confidence) == (2 << 30, 4, 0.5)
    assert (args.max_queue, args.max_queue_seconds, args.prefix_cache) == (7, 1.5, False)
    assert (args.quantization, args.attention_backend, args.enforce_eager) == ("none", "torch", True)
    assert (args.quantization, args.tensor_parallel_size) == ("none", 2)
    assert args.groups == "verified"
    assert args.kv_cache_dtype == "int8"
    assert args.overlap_steps == "off"
    assert "k" not in repr(settings).replace("kv_cache_memory", "").replace("block_size", "").split("api_key")[-1][:5]


def test_on_and_off_may_stand_plain_in_yaml(tmp_path: Path) -> None:
    file = tmp_path / "settings.yml"
    for written, read in (("on", "on"), ("off", "off"), ("auto", "auto"), ("'on'", "on")):
        file.write_text(f"overlap_steps: {written}\n")
        assert load_settings({}, str(file)).engine_args().overlap_steps == read
    file.write_text("overlap_steps: maybe\n")
    with pytest.raises(SettingsError, match=r"overlap_steps in .* is 'maybe'"):
        load_settings({}, str(file))


def test_auto_confidence_gives_the_engine_its_upper_bound() -> None:
    given = {"confidence": "auto", "target_tpot_ms": "40"}
    settings = load_settings(given)
    assert settings.engine_args().confidence is None
    assert settings.auto_confidence() == AutoConfidence(target_seconds=0.04)
    settings = load_settings(given | {"min_confidence": "0.3", "max_confidence": "0.9"})
    assert settings.engine_args().confidence == 0.9
    assert settings.auto_confidence() == AutoConfidence(target_seconds=0.04, min_confidence=0.3)
    assert load_settings({"confidence": "0.5"}).auto_confidence() is None
    assert load_settings({}).auto_confidence() is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"confidence": "auto"}, "confidence is auto, but nothing says what for: add --target-tpot-ms"),
        ({"target_tpot_ms": "40"}, "target_tpot_ms is given, but confidence is not auto"),
        ({"confidence": "0.5", "min_confidence": "0.3"}, "min_confidence is given, but confidence is not auto"),
        ({"max_confidence": "0.9"}, "max_confidence is given, but confidence is not auto"),
    ],
)
def test_auto_confidence_and_its_target_go_together(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(given).auto_confidence()


@pytest.mark.parametrize(
    ("text", "size"), [("4GiB", 4 << 30), ("512 MiB", 512 << 20), ("1.5g", 3 << 29), ("1000", 1000), ("2kB", 2000)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"port": "70000"}, "--port"),
        ({"confidence": "2"}, "--confidence"),
        ({"confidence": "automatic"}, "--confidence"),
        ({"target_tpot_ms": "0"}, "--target-tpot-ms"),
        ({"min_confidence": "-1"}, "--min-confidence"),
        ({"dtype": "int3"}, "--dtype"),
        ({"kv_cache_memory": "much"}, "--kv-cache-memory"),
        ({"max_model_len": "x"}, "--max-model-len"),
        ({"max_queue_seconds": "0"}, "--max-queue-seconds"),
    ],
)
def test_a_wrong_option_is_named_as_written(given: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsError, match=f"^{named} is ") as caught:
        load_settings(given)
    assert "\n" not in str(caught.value)


def test_a_wrong_variable_or_key_is_named_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAMBURGER_PORT", "many")
    with pytest.raises(SettingsError, match=r"^HAMBURGER_PORT is 'many'"):
        load_settings({})
    monkeypatch.delenv("HAMBURGER_PORT")
    file = tmp_path / "serve.yaml"
    for text, message in (
        ("port: many", "port in .* is 'many'"),
        ("prot: 1", "unknown key 'prot': did you mean port"),
        ("- 1", "must hold"),
        ("a: [", "is not YAML"),
        ("port: 1\nmodel: a\nport: 2", "is not YAML: port is there twice"),
        ("max-model-len: 1\nmax_model_len: 2", "has a setting twice, with - and with _"),
    ):
        file.write_text(text)
        with pytest.raises(SettingsError, match=message):
            load_settings({}, str(file))
    with pytest.raises(SettingsError, match="cannot be read"):
        load_settings({}, str(tmp_path / "none.yaml"))
    with pytest.raises(SettingsError, match="--config is empty"):
        load_settings({}, "")


def test_a_yaml_file_may_merge_others_and_say_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "<<: [{port: 1, host: a}, {port: 2}]\nport: 3\nsampling_defaults: &s {top_k: 1}\n"
        "chat_template_kwargs: {<<: *s, top_k: 2}\n"
    )
    settings = load_settings({}, str(file))
    assert (settings.host, settings.port, settings.sampling_defaults) == ("a", 3, {"top_k": 1})
    assert settings.chat_template_kwargs == {"top_k": 2}


def test_a_variable_with_a_slip_is_named_and_those_of_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HAMBURGER_PORT_8000_TCP", "HAMBURGER_SERVICE_PORT", "HAMBURGER_SERVICE_HOST"):
        monkeypatch.setenv(name, "tcp://10.0.0.1:8000")  # as Kubernetes does for a service of this name
    load_settings({})
    for slip, meant in (("MAX_NUM_SEQ", "MAX_NUM_SEQS"), ("API_KEYS", "API_KEY"), ("APIKEY", "API_KEY")):
        monkeypatch.setenv(f"HAMBURGER_{slip}", "4")
        with pytest.raises(SettingsError, match=f"HAMBURGER_{slip} .* is no setting: did you mean HAMBURGER_{meant}"):
            load_settings({})
        monkeypatch.delenv(f"HAMBURGER_{slip}")


@pytest.mark.parametrize("key", ["ключ", "a\tb", "a b\x7f"])
def test_a_key_that_clients_cannot_send_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(SettingsError, match=r"^api_key: key 2 of 2 must be printable ASCII") as caught:
        ServeSettings(api_key=["first", key]).api_keys()
    assert key not in str(caught.value)
    file = tmp_path / "keys"
    file.write_text(f"first # of somebody\n{key}\n", encoding="utf-8")
    with pytest.raises(SettingsError, match=r"^api_key_file .*: key 2 of 2 must be printable ASCII"):
        ServeSettings(api_key_file=file).api_keys()


def test_a_secret_is_never_shown() -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings({"api_key": 5})
    assert "5" not in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["serve", "--confidence", "2"], "--confidence is '2': it must be auto or a number in [0, 1]"),
        (["serve", "--confidence", "auto"], "add --target-tpot-ms"),
        (["serve", "--bogus"], "--bogus"),
        (["serve", "a", "--model", "b"], "twice"),
        (["serve", "no/such/model/here"], "no/such/model/here"),
        (["serve", "--max-num-seqs", "9", "--max-num-batched-slots", "5"], "max_num_batched_slots"),
        (["serve", "--host", "no.such.host.invalid"], "no.such.host.invalid"),
        (["serve", "--host", "a..b"], "host is 'a..b'"),
        ([], "COMMAND"),
        (["fly"], "fly"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main([*argv, "--port", "0"] if argv[:1] == ["serve"] else argv)
    except SystemExit as error:
        code = error.code
    err = capsys.readouterr().err
    assert code == 2
    assert said in err
    assert err.count("\n") == 1
    assert err.startswith("hamburger: ")


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("hamburger ")


@pytest.mark.parametrize(
    "value",
    ["https://a.example/", "a.example", "https://A.example", "https://*.example", "https://a.example b", "*, a"],
)
def test_what_no_browser_sends_as_an_origin_is_refused(value: str) -> None:
    with pytest.raises(SettingsError, match="is no origin: write it as browsers do"):
        load_settings({"cors_origin": value})


@pytest.mark.parametrize("value", ["", " ", ",", " , "])
@pytest.mark.parametrize("name", ["api_key", "cors_origin"])
def test_a_list_that_is_given_but_empty_is_refused(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match="empty"):
        load_settings({name: value})


def test_the_help_says_what_each_option_takes_and_its_default_as_one_writes_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    out = capsys.readouterr().out
    assert [line[:-1] for line in out.splitlines() if line.endswith(":") and line[0] != " "] == [
        "positional arguments", "options", *GROUPS.values()
    ]  # fmt: skip
    told = " ".join(out.split())
    assert "--settle true|false whether" in told
    assert "--groups auto|composed|verified verified: the model" in told
    for default in ("64MiB", "8MiB", "600", "true", "false"):
        assert f"(default: {default})" in told
    assert "True" not in told
    assert "False" not in told
