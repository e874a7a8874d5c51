"""Further names of a model: what they mean, where they are listed, and that no name means two."""

from __future__ import annotations

from typing import Any

import pytest

from fakes import EOS
from hamburger.server.config import SettingsError
from hamburger.server.launch import engine_arguments, find_models
from hamburger.server.load_settings import load_settings
from serving import CHAT, HELLO, MODEL, ByChoice, serving

SETTINGS = {"model_alias": ["gpt-4o", "default"]}


async def test_each_name_means_the_model() -> None:
    runner = ByChoice([[EOS]])
    async with serving(runner=runner, settings=SETTINGS) as server:
        for name in (MODEL, "gpt-4o", "default", "gpt-4o@0.25"):
            answer = await server.ok(CHAT, {"model": name, "messages": HELLO})
            assert answer["model"] == name
        status, error = await server.refused(CHAT, {"model": "gpt-4", "messages": HELLO})
        listed = (await server.client.get("/v1/models")).json()["data"]
        one = (await server.client.get("/v1/models/default")).json()
        metrics = (await server.client.get("/metrics")).text
    assert runner.confidences[-1] == 0.25
    assert (status, error["code"]) == (404, "model_not_found")
    assert f"Served: {MODEL}, gpt-4o, default (and NAME@c of each" in error["message"]
    assert [card["id"] for card in listed] == [MODEL, "gpt-4o", "default"]
    assert listed[0]["aliases"][:2] == ["gpt-4o", "default"]
    assert (one["parent"], one["root"]) == (MODEL, listed[0]["root"])
    assert "gpt-4o" not in metrics


def found(**given: Any) -> list[str]:
    return [model.name for model in find_models(engine_arguments(load_settings(given)))]


def test_aliases_belong_to_one_model() -> None:
    assert found(served_model_name="m", model_alias="a, b", also="base=builtin,model_alias=c,max_num_seqs=4") == [
        "m",
        "base",
    ]


@pytest.mark.parametrize(
    "given",
    [
        {"model_alias": "a,a"},
        {"served_model_name": "a", "model_alias": "a"},
        {"model_alias": "base", "also": "base=builtin"},
        {"model_alias": "a", "also": "base=builtin,model_alias=a"},
    ],
)
def test_no_name_means_two_models(given: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match=r"have the name .*: rename it in model_alias"):
        found(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"served_model_name": "m", "model_alias": "m@0.5"},
        {"model_alias": "x, x@0.5"},
        {"model_alias": "x", "also": "base=builtin,model_alias=x@1"},
    ],
)
def test_no_alias_is_another_name_with_a_confidence(given: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match=r"which is .* with a confidence \(NAME@c\): rename it in model_alias"):
        found(**given)
    assert found(served_model_name="m", model_alias="x@0.5") == ["m"]


def test_no_adapter_has_an_aliass_name() -> None:
    with pytest.raises(SettingsError, match="have the name a: rename it in lora"):
        found(model_alias="a", lora="a=/x")
    with pytest.raises(SettingsError, match=r"a@1, which is a with a confidence"):
        found(model_alias="a", lora="a@1=/x")
    with pytest.raises(SettingsError, match=r"a@1, which is a with a confidence .* rename it in model_alias"):
        found(model_alias="a@1", lora="a=/x")
    with pytest.raises(SettingsError, match=r"a@1, which is a with a confidence .* in served_model_name or also"):
        found(served_model_name="a@1", lora="a=/x")
