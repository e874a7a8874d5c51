"""What an operator says of texts: the chat template, its variables, and what requests are sampled by."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fakes import EOS
from hamburger.engine.text.tokenizer import Tokenizer
from hamburger.engine.types.errors import TokenizerError
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.model.checkpoints.sources import BUILTIN
from hamburger.server.config import SettingsError
from hamburger.server.launch import FoundModel, engine_arguments, find_models
from hamburger.server.load_settings import load_settings
from serving import ByChoice, serving

HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]


def found(**given: Any) -> list[FoundModel]:
    return find_models(engine_arguments(load_settings(given)))


def written(model: FoundModel, **variables: Any) -> str:
    return model.tokenizer.apply_chat_template(HI, **variables)


# --- sampling ---


async def asked(defaults: dict[str, float], body: dict[str, Any], path: str = "/v1/chat/completions") -> SamplingParams:
    """What the engine was asked for."""
    runner = ByChoice([[EOS]])
    prompt = {"prompt": "Hi"} if path == "/v1/completions" else {"messages": HI}
    async with serving(runner=runner, sampling_defaults=defaults) as server:
        answer = await server.client.post(path, json=prompt | body)
        assert answer.status_code == 200, answer.text
    return runner.params[0]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
async def test_what_a_request_leaves_out_is_the_models(path: str) -> None:
    defaults = {"temperature": 0.25, "top_p": 0.5, "top_k": 7}
    extra = {"max_tokens": 8} if path == "/v1/messages" else {}
    params = await asked(defaults, extra, path)
    assert (params.temperature, params.top_p, params.top_k) == (0.25, 0.5, 7)
    params = await asked(defaults, extra | {"temperature": 0.75, "top_k": 3}, path)
    assert (params.temperature, params.top_p, params.top_k) == (0.75, 0.5, 3)


async def test_a_null_is_no_wish_and_a_zero_is_one() -> None:
    defaults = {"temperature": 0.25, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.5}
    params = await asked(defaults, dict.fromkeys(defaults))
    assert {name: getattr(params, name) for name in defaults} == defaults
    params = await asked(defaults, {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1})
    plain = SamplingParams(temperature=0)
    assert {name: getattr(params, name) for name in defaults} == {name: getattr(plain, name) for name in defaults}


async def test_a_response_says_what_it_was_sampled_by() -> None:
    async with serving([[EOS]], sampling_defaults={"temperature": 0.25, "top_p": 0.5}) as server:
        answer = (await server.client.post("/v1/responses", json={"input": "Hi"})).json()
        other = (await server.client.post("/v1/responses", json={"input": "Hi", "temperature": 0})).json()
    assert (answer["temperature"], answer["top_p"]) == (0.25, 0.5)
    assert (other["temperature"], other["top_p"]) == (0, 0.5)


async def test_the_fingerprint_changes_with_what_texts_depend_on() -> None:
    async def fingerprint(settings: dict[str, Any], defaults: dict[str, float], settling: str = "") -> str:
        info = {"settling": settling}
        async with serving([[EOS]], settings=settings, sampling_defaults=defaults, info=info) as server:
            return str((await server.chat())["system_fingerprint"])

    prints = [
        await fingerprint({}, {}),
        await fingerprint({}, {"temperature": 0.5}),
        await fingerprint({"chat_template_kwargs": {"a": 1}}, {}),
        await fingerprint({}, {}, "window 64, growth 0, keep 0.33"),
        await fingerprint({}, {}, "window 96, growth 0, keep 0.33"),
    ]
    assert len(set(prints)) == 5
    assert await fingerprint({}, {}) == prints[0]


def model_folder(path: Path) -> Path:
    path.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN / name, path)
    (path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    return path


def test_the_operator_chooses_whose_defaults_count(tmp_path: Path) -> None:
    model = str(model_folder(tmp_path / "m"))
    assert found(model=model)[0].sampling_defaults == {"temperature": 0.6, "top_k": 20}
    assert found(model=model, sampling_defaults="openai")[0].sampling_defaults == {}
    own = '{"temperature": 0, "top_k": -1}'
    assert found(model=model, sampling_defaults=own)[0].sampling_defaults == {"temperature": 0, "top_k": 0}
    first, second = found(sampling_defaults=own, also=f"m={model}")
    assert (first.sampling_defaults["temperature"], second.sampling_defaults["temperature"]) == (0, 0.6)
    _, second = found(also=f'm={model},sampling_defaults={{"temperature": 0.1, "top_p": 0.2}},max_num_seqs=3')
    assert second.sampling_defaults == {"temperature": 0.1, "top_p": 0.2}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("hot", r"--sampling-defaults is 'hot': it must be model, openai or a JSON object such as {\"temperature\""),
        ("[1]", "a JSON object"),
        ('{"temperature": "x"}', "temperature is 'x': it must be a number"),
        ('{"top_p": 2}', r"top_p is 2: it must be in \(0, 1\]"),
        ('{"max_tokens": 5}', "it sets 'max_tokens', but can set temperature, top_p, top_k, min_p, repetition_penalty"),
    ],
)
def test_defaults_that_nothing_can_be_sampled_by_are_refused(given: str, told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        load_settings({"sampling_defaults": given})


# --- templates ---


def test_chats_are_written_by_the_operators_template(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ mode }}{{ eos_token }}")
    plain, other = found(chat_template=str(file), chat_template_kwargs='{"mode": "terse"}', also="base=builtin")
    assert written(plain) == "<user>Hiterse<|im_end|>"
    assert written(plain, mode="wordy") == "<user>Hiwordy<|im_end|>"
    assert written(other) == Tokenizer.load(BUILTIN).apply_chat_template(HI)  # the next model has its own
    _, other = found(also=f"base=builtin,chat_template={file}")
    assert written(other) == "<user>Hi<|im_end|>"


def test_settings_of_a_template_may_stand_in_yaml(tmp_path: Path) -> None:
    file = tmp_path / "settings.yml"
    file.write_text("chat_template_kwargs: {enable_thinking: false}\nsampling_defaults: {temperature: 0.5, top_k: 9}\n")
    settings = load_settings({}, str(file))
    assert settings.chat_template_kwargs == {"enable_thinking": False}
    assert settings.sampling_defaults == {"temperature": 0.5, "top_k": 9}
    assert json.dumps(settings.sampling_defaults) == '{"temperature": 0.5, "top_k": 9}'  # 9, and not 9.0


def test_a_models_own_template_that_is_broken_is_told_and_may_be_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "chat_template.jinja").write_text("{% do x %}")
    [model] = found(model=str(folder))
    with pytest.raises(TokenizerError, match="not valid jinja"):
        written(model)
    [record] = caplog.records
    assert "Chats will be refused: give it another by chat_template." in record.getMessage()
    (file := tmp_path / "chat.jinja").write_text("{{ messages[0].content }}")
    [model] = found(model=str(folder), chat_template=str(file))
    assert written(model) == "Hi"
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [(b"{% if %}", "is not valid jinja"), (b"\xff", "cannot be read as UTF-8"), (b" \n", "is empty: write a template")],
)
def test_a_template_that_cannot_be_used_is_named_before_anything_loads(tmp_path: Path, text: bytes, told: str) -> None:
    file = tmp_path / "chat.jinja"
    file.write_bytes(text)
    with pytest.raises((SettingsError, TokenizerError), match=told):
        found(chat_template=str(file))
    with pytest.raises(SettingsError, match=r"chat_template .* cannot be read"):
        found(chat_template=str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("{", "it must be a JSON object"),
        ("5", "it must be a JSON object"),
        ('{"tools": []}', "'tools' is set by each request"),
    ],
)
def test_variables_that_a_template_cannot_be_given_are_refused(given: str, told: str) -> None:
    with pytest.raises(SettingsError, match=rf"--chat-template-kwargs is .*: {told}"):
        load_settings({"chat_template_kwargs": given})
