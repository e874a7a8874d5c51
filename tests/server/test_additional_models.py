"""`also`: how further models are written, what they inherit, and one clear line for each that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hamburger.model.checkpoints.sources import EMBEDDED_NAME
from hamburger.model.config import ConfigError
from hamburger.server.additional_models import NOT_INHERITED, OWN_SETTINGS, AdditionalModel, parse_additional_models
from hamburger.server.cli import main
from hamburger.server.config import ServeSettings, SettingsError
from hamburger.server.launch import engine_arguments, find_models
from hamburger.server.load_settings import load_settings


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ServeSettings.model_fields, "config"):
        monkeypatch.delenv(f"HAMBURGER_{name.upper()}", raising=False)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("base=builtin", [AdditionalModel("base", "builtin")]),
        (" a = x ; b = y ;", [AdditionalModel("a", "x"), AdditionalModel("b", "y")]),
        (["a=x", "b=y;c=z"], [AdditionalModel("a", "x"), AdditionalModel("b", "y"), AdditionalModel("c", "z")]),
        ("fast=,confidence=0.3", [AdditionalModel("fast", None, {"confidence": "0.3"})]),
        ("a=some, folder/x=1", [AdditionalModel("a", "some, folder/x=1")]),
        (
            "a=x.ckpt, base=y,kv-cache-memory=1GiB",
            [AdditionalModel("a", "x.ckpt", {"base": "y", "kv_cache_memory": "1GiB"})],
        ),
        ([], []),
    ],
)
def test_what_is_written_is_what_is_read(written: Any, read: list[AdditionalModel]) -> None:
    assert parse_additional_models(written) == read


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("builtin", "NAME=MODEL"),
        ("=builtin", "NAME=MODEL"),
        ("", "empty"),
        (" ; ", "empty"),
        ("a=x,port=9", "port"),
        ("a=x,num_engines=9", "num_engines"),
        ("a=x,confidence=1,confidence=0", "twice"),
        ("a=x,confidence=2", "a: confidence is '2'"),
        ("a=x,kv_cache_memory=much", "a: kv_cache_memory is 'much'"),
        ("a=x,max_num_seqs=", "a: max_num_seqs is ''"),
        ("a=x,max_num_seqs=600", "a: max_num_batched_slots is 512"),
    ],
)
def test_a_wrong_one_is_one_line_and_exit_code_2(written: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", "--also", written]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_a_list_of_anything_else_is_refused() -> None:
    for value in (5, [5], {"base": "builtin"}):
        with pytest.raises(SettingsError, match="also"):
            load_settings({"also": value})


def test_it_comes_from_the_environment_and_the_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("also:\n- a=x\n- b=y,confidence=1\n")
    assert [model.name for model in load_settings({}, str(file)).also] == ["a", "b"]
    monkeypatch.setenv("HAMBURGER_ALSO", "c=z;d=w")
    assert [model.name for model in load_settings({}, str(file)).also] == ["c", "d"]
    assert [model.name for model in load_settings({"also": ["e=v"]}, str(file)).also] == ["e"]


def test_a_further_model_inherits_all_but_what_belongs_to_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAMBURGER_BASE", "the/firsts")
    monkeypatch.setenv("HAMBURGER_CONFIDENCE", "0.4")
    monkeypatch.setenv("HAMBURGER_TOOL_PARSER", "mistral")
    given = {"model": "m", "max_num_seqs": "3", "kv_cache_memory": "1GiB", "api_key": "k", "dtype": "float32"}
    settings = load_settings(given | {"also": ["a=x,base=y,max_num_seqs=5", "b=z,tool_parser=json,confidence=1"]})
    first, a, b = settings.models()
    args = [model.engine_args() for model in (first, a, b)]
    assert [(found.model, found.base) for found in args] == [("m", "the/firsts"), ("x", "y"), ("z", None)]
    assert (first.confidence, first.tool_parser) == (0.4, "mistral")
    assert (a.confidence, a.tool_parser) == (None, "auto")
    assert (b.confidence, b.tool_parser) == (1.0, "json")
    assert [model.served_model_name for model in (first, a, b)] == [None, "a", "b"]
    assert [found.max_num_seqs for found in args] == [3, 5, 3]
    assert {found.kv_cache_memory for found in args} == {2**30}
    assert {found.dtype for found in args} == {"float32"}
    assert not any(model.also for model in (first, a, b))


def test_one_that_does_not_settle_is_not_told_how() -> None:
    given: dict[str, Any] = {"settle": "true", "settle_window": "96"}
    given["also"] = ["a=x", "b=x,settle=false", "c=x,settle=false,settle_keep=.5"]
    first, a, b, c = load_settings(given).models()
    assert [(of.settle, of.settle_window) for of in (first.engine_args(), a.engine_args(), b.engine_args())] == [
        (True, 96),
        (True, 96),
        (False, None),
    ]
    with pytest.raises(ConfigError, match="settle_keep is given, but settle is off"):
        c.engine_args()
    assert NOT_INHERITED <= OWN_SETTINGS < set(ServeSettings.model_fields)


@pytest.mark.parametrize(
    ("devices", "sharing"),
    [
        (["cpu"], [1]),
        (["auto", "auto"], [2, 2]),
        (["cuda:0", "cuda:1"], [1, 1]),
        (["cuda:0", "cuda:1", "cuda:0"], [2, 1, 2]),
        (["cuda:0", "auto", "cpu"], [2, 3, 2]),
    ],
)
def test_engines_that_may_be_on_one_device_divide_its_memory(devices: list[str], sharing: list[int]) -> None:
    first, *others = devices
    also = [f"m{i}=x,device={device}" for i, device in enumerate(others)]
    found = engine_arguments(load_settings({"device": first, "also": also}))
    assert [args.num_engines for _, args in found] == sharing
    assert [args.device for _, args in found] == devices


def test_a_split_model_may_be_on_any_gpu() -> None:
    also = ["a=x,device=cuda:1,tensor_parallel_size=1", "b=x,device=cpu"]
    found = engine_arguments(load_settings({"device": "cuda", "tensor_parallel_size": 2, "also": also}))
    assert [args.num_engines for _, args in found] == [2, 2, 1]


def test_two_models_of_one_name_are_refused() -> None:
    for given in (
        {"model": "builtin", "served_model_name": "base", "also": ["base=builtin"]},
        {"also": [f"{EMBEDDED_NAME}=builtin"]},
    ):
        with pytest.raises(SettingsError, match="two models have the name"):
            find_models(engine_arguments(load_settings(given)))


def test_a_model_that_is_not_there_is_named() -> None:
    with pytest.raises(SettingsError, match=r"^a: no/such/folder/x "):
        find_models(engine_arguments(load_settings({"also": "a=no/such/folder/x"})))


def test_models_are_found_with_their_tokenizers_and_names() -> None:
    found = find_models(engine_arguments(load_settings({"also": "base=builtin;fast=,confidence=0.3"})))
    assert [model.name for model in found] == [EMBEDDED_NAME, "base", "fast"]
    assert [model.args.model for model in found] == [None, "builtin", None]
    assert [model.args.confidence for model in found] == [None, None, 0.3]
    assert len({id(model.tokenizer) for model in found}) == 1  # of one folder, so loaded once
