"""LoRA adapters by name: which requests they answer, how they are listed, loaded, refused and unloaded."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fake_engines import fake_engine
from fakes import ByteTokenizer
from gates import StepGate
from hamburger.engine.core.loras import CoreLoras
from hamburger.engine.core.sequence import Sequence
from hamburger.engine.types.observer import RequestTimings
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.server.api.answering import Answering
from hamburger.server.api.generation import Generation
from hamburger.server.api.model_context import ModelContext
from hamburger.server.app import create_app_of, model_context
from hamburger.server.config import ServeSettings, SettingsError
from hamburger.server.launch import engine_arguments
from hamburger.server.load_settings import load_settings
from hamburger.server.operation.metrics import ServerMetrics
from lora_stores import NamedFolders
from serving import CHAT, COMPLETIONS, HELLO, MODEL, ByChoice, Served, error_of, serving, split, until

ALLOWED = {"allow_lora_loading": True}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class ByAdapter(ByChoice):
    """Remembers which adapter each request passed."""

    def __init__(self, *by_choice: list[list[int]], **options: Any) -> None:
        super().__init__(*by_choice, **options)
        self.loras: list[int] = []

    def script(self, sequence: Sequence) -> list[int]:
        if not sequence.groups:
            self.loras.append(sequence.lora)
        return super().script(sequence)


def with_loras(runner: ByAdapter | None = None, settings: dict[str, Any] | None = None, **fields: Any) -> Any:
    store, given = NamedFolders(), ALLOWED if settings is None else settings
    runner = runner or ByAdapter(split("AAA", 3))
    return serving(runner=runner, settings=given, loras=CoreLoras(store, 2), **fields)


async def load(server: Served, name: str, path: str = "/adapters/x", **fields: Any) -> None:
    response = await server.post(LOAD, {"lora_name": name, "lora_path": path, **fields})
    assert (response.status_code, response.text) == (200, f"Success: LoRA adapter '{name}' added successfully.")


async def test_the_model_of_a_request_names_who_answers() -> None:
    async with with_loras() as server:
        await load(server, "sql")
        await load(server, "law")
        answered = [await server.complete(model=model, max_tokens=3) for model in ("sql", MODEL, "law", "sql@0.5")]
        assert [answer["model"] for answer in answered] == ["sql", MODEL, "law", "sql@0.5"]
        assert (await server.complete(max_tokens=3))["model"] == MODEL
        assert server.runner.loras == [1, 0, 2, 1, 0]
        assert server.runner.confidences[3] == 0.5
        prints = [answer["system_fingerprint"] for answer in answered]
        assert (len({*prints}), prints[0]) == (3, prints[3])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO, "max_tokens": 3, "n": 2, "logprobs": True}),
        (COMPLETIONS, {"prompt": ["ab", "c"], "max_tokens": 3, "echo": True, "logprobs": 1}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 3}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 3}),
    ],
)
async def test_every_form_of_request_takes_them(path: str, body: dict[str, Any]) -> None:
    async with with_loras() as server:
        await load(server, "sql")
        answer = await server.ok(path, {"model": "sql", **body})
        assert answer["model"] == "sql"
        response = await server.post(path, {"model": "sql", "stream": True, **body})
        assert response.status_code == 200
        assert '"sql"' in response.text
        assert {*server.runner.loras} == {1}
        counted = [await server.ok("/tokenize", {"model": model, "prompt": "ab"}) for model in ("sql", MODEL)]
        assert counted[0] == counted[1]


async def test_adapters_are_listed_behind_their_model() -> None:
    async with with_loras() as server:
        await load(server, "sql", "/adapters/sql")
        cards = (await server.client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [(MODEL, None), ("sql", MODEL)]
        assert cards[1]["root"] == "/adapters/sql"
        assert cards[1]["aliases"] == ["sql@c, with a confidence c in [0, 1]"]
        assert (await server.client.get("/v1/models/sql")).json() == cards[1]
        alias = (await server.client.get("/v1/models/sql@0.5")).json()
        assert (alias["id"], alias["parent"], alias["root"]) == ("sql@0.5", "sql", "/adapters/sql")
        error = error_of(await server.post(CHAT, {"model": "other", "messages": HELLO}))
        assert "Served: burger, sql (and NAME@c of each" in error["message"]


async def test_an_unloaded_adapter_finishes_what_it_has_begun() -> None:
    gate = StepGate()
    runner = ByAdapter(split("AAABBB", 3, 3), gate=gate)
    async with with_loras(runner) as server:
        await load(server, "sql")
        running = asyncio.create_task(server.complete(model="sql", max_tokens=6))
        await until(lambda: server.engine.health().seconds_in_step is not None)
        response = await server.post(UNLOAD, {"lora_name": "sql"})
        assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
        status, error = await server.refused(COMPLETIONS, {"model": "sql", "prompt": "ab"})
        assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
        gate.set()
        assert (await running)["choices"][0]["text"] == "AAABBB"
        status, error = await server.refused(UNLOAD, {"lora_name": "sql"})
        assert (status, error["param"]) == (404, "lora_name")
        await load(server, "sql", "/adapters/other")
        await server.complete(model="sql", max_tokens=6)
        assert runner.loras == [1, 2]  # another adapter, whose slots are its own


@pytest.mark.parametrize("stream", [False, True])
async def test_one_that_is_unloaded_while_a_request_is_read_is_not_found(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = Answering.submit

    def too_late(self: Answering, context: ModelContext, *args: Any) -> Generation:
        context.engine.unload_lora("sql")
        return submit(self, context, *args)

    monkeypatch.setattr(Answering, "submit", too_late)
    async with with_loras() as server:
        await load(server, "sql")
        status, error = await server.refused(CHAT, {"model": "sql", "messages": HELLO, "stream": stream})
        assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert error["message"] == "The LoRA adapter 'sql' is not loaded."


async def test_what_cannot_be_loaded_is_told_and_leaves_nothing() -> None:
    async with with_loras() as server:
        await load(server, "sql")
        for fields, param, message in (
            ({"lora_name": "bad", "lora_path": "/bad"}, "lora_path", "/bad is no adapter."),
            ({"lora_name": "a\nb", "lora_path": "/x"}, "lora_name", "printable characters alone"),
            ({"lora_name": " ", "lora_path": "/x"}, "lora_name", "printable characters alone"),
            ({"lora_name": "a" * 257, "lora_path": "/x"}, "lora_name", "at most 256 characters"),
            ({"lora_name": "sql", "lora_path": "/x"}, "lora_name", "'sql' is served already"),
            ({"lora_name": MODEL, "lora_path": "/x"}, "lora_name", "'burger' is served already"),
            ({"lora_name": f"{MODEL}@0.5", "lora_path": "/x"}, "lora_name", "'burger@0.5' is served already"),
            ({"lora_name": "b", "lora_path": "/x", "model": "sql"}, "model", "an adapter itself"),
            ({"lora_name": "b", "lora_path": "/x", "load_inplace": True}, "load_inplace", "unload the adapter first"),
            ({"lora_name": "", "lora_path": "/x"}, "lora_name", "at least 1 character"),
            ({"lora_name": "b"}, "lora_path", "Field required"),
        ):
            status, error = await server.refused(LOAD, fields)
            assert (status, error["param"]) == (400, param)
            assert message in error["message"]
        await load(server, "law", model=MODEL)
        status, error = await server.refused(LOAD, {"lora_name": "c", "lora_path": "/x"})
        assert (status, error["message"]) == (
            400, "2 adapters are loaded, and max_loras is 2: unload one, or raise it.",
        )  # fmt: skip
        assert list(server.engine.loras) == ["sql", "law"]
        status, error = await server.refused(UNLOAD, {"lora_name": "law", "model": "unknown"})
        assert (status, error["param"]) == (404, "model")
        assert (await server.post(UNLOAD, {"lora_name": "law", "model": MODEL})).status_code == 200
        assert list(server.engine.loras) == ["sql"]


async def test_paths_of_the_server_are_named_only_where_that_is_allowed() -> None:
    async with with_loras(settings={}) as server:
        for path in (LOAD, UNLOAD):
            status, error = await server.refused(path, {"lora_name": "a", "lora_path": "/x"})
            assert status == 403
            assert "(allow_lora_loading), or name adapters at its start (lora)" in error["message"]
    async with with_loras(settings={**ALLOWED, "api_key": ["k"]}) as server:
        assert (await server.refused(LOAD, {"lora_name": "a", "lora_path": "/x"}))[0] == 401
    async with with_loras() as server:
        elsewhere = {"Origin": "https://elsewhere.example"}
        assert (await server.refused(LOAD, {"lora_name": "a", "lora_path": "/x"}, headers=elsewhere))[0] == 403
        assert not server.engine.loras


def counted(server: Served) -> dict[str, tuple[float, ...]]:
    """By adapter: requests that are open, requests that have ended, prompt tokens and generated tokens of those."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(server.metrics.render().decode()):
        for sample in family.samples:
            if "lora_name" in sample.labels and not sample.name.endswith("_created"):
                key = f"{sample.name} {sample.labels.get('kind', '')}".removeprefix("hamburger_adapter_")
                found.setdefault(sample.labels["lora_name"], {})[key] = sample.value
    order = "requests_open ", "requests_total ", "tokens_total prompt", "tokens_total generated"
    assert all({*values} == {*order} for values in found.values())
    return {name: tuple(values[key] for key in order) for name, values in found.items()}


async def test_requests_and_tokens_are_counted_by_adapter() -> None:
    gate = StepGate()
    async with with_loras(ByAdapter(split("AAABBB", 3, 3), gate=gate)) as server:
        assert counted(server) == {"": (0, 0, 0, 0)}
        await load(server, "sql")
        await load(server, "law")
        assert counted(server) == {"": (0, 0, 0, 0), "sql": (0, 0, 0, 0), "law": (0, 0, 0, 0)}
        asked = [("sql", "ab"), ("sql@0.5", "abc"), (MODEL, "abcd")]
        running = [
            asyncio.create_task(server.ok(COMPLETIONS, {"model": model, "prompt": prompt, "max_tokens": 6}))
            for model, prompt in asked
        ]
        await until(lambda: sum(server.engine.open_by_lora().values()) == 3)
        assert counted(server) == {"": (1, 0, 0, 0), "sql": (2, 0, 0, 0), "law": (0, 0, 0, 0)}
        await server.post(UNLOAD, {"lora_name": "sql"})
        await server.post(UNLOAD, {"lora_name": "law"})
        assert counted(server)["law"] == (0, 0, 0, 0)  # for the last time
        assert counted(server) == {"": (1, 0, 0, 0), "sql": (2, 0, 0, 0)}  # has answers to finish
        gate.set()
        await asyncio.gather(*running)
        assert counted(server) == {"": (0, 1, 5, 6), "sql": (0, 2, 7, 12)}  # each prompt begins with one more
        assert counted(server) == {"": (0, 1, 5, 6)}
        await load(server, "sql")
        assert counted(server) == {"": (0, 1, 5, 6), "sql": (0, 0, 0, 0)}


async def test_names_do_not_pile_up_where_nobody_scrapes() -> None:
    async with with_loras() as server:
        for i in range(300):
            server.metrics.on_start(1, RequestTimings(0, 0, 0, 0), f"a{i}")
            server.metrics.on_finish("stop", SamplingParams(), 1, 1, RequestTimings(0, 0, 0, 0), f"a{i}")
        names = counted(server)
        assert len(names) <= 257
        assert names["a299"] == (0, 1, 1, 1)
        assert list(counted(server)) == [""]


async def test_of_one_name_only_one_is_loaded_at_once() -> None:
    async with with_loras() as server:
        asked = {"lora_name": "a", "lora_path": "/x"}
        answers = await asyncio.gather(*(server.post(LOAD, asked) for _ in range(3)))
        assert sorted(answer.status_code for answer in answers) == [200, 400, 400]


async def test_of_one_name_only_one_model_has_an_adapter() -> None:
    """Also where both are asked for it before either has read it."""
    settings, first, second = ServeSettings(allow_lora_loading=True), ServerMetrics("one"), ServerMetrics("two")
    stores = NamedFolders(), NamedFolders()
    async with (
        fake_engine(ByAdapter(), loras=CoreLoras(stores[0], 2)) as one,
        fake_engine(ByAdapter(), loras=CoreLoras(stores[1], 2)) as two,
    ):
        contexts = [
            model_context(one, ByteTokenizer(), first, settings, "one"),
            model_context(two, ByteTokenizer(), second, settings, "two"),
        ]
        transport = httpx.ASGITransport(create_app_of(contexts, settings))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            asked = [{"model": name, "lora_name": "a", "lora_path": "/x"} for name in ("one", "two")]
            answers = await asyncio.gather(*(client.post(LOAD, json=body) for body in asked))
            assert sorted(answer.status_code for answer in answers) == [200, 400]
            assert len(stores[0].loaded) + len(stores[1].loaded) == 1
            listed = [model["id"] for model in (await client.get("/v1/models")).json()["data"]]
            assert sorted(listed) == ["a", "one", "two"]
        for context in contexts:
            context.close()


async def test_no_name_is_another_with_a_confidence() -> None:
    """Whichever of them came first: it would answer for the other."""
    async with with_loras() as server:
        await load(server, "a@0.5")
        for name in ("a", "a@0.5@1", f"{MODEL}@0.5"):
            response = await server.post(LOAD, {"lora_name": name, "lora_path": "/x"})
            assert (response.status_code, error_of(response)["param"]) == (400, "lora_name")


def test_settings_say_how_many_there_is_room_for() -> None:
    [(settings, args)] = engine_arguments(load_settings({"lora": ["a=/x", "b=/y;c=z=1"]}))
    assert [(adapter.name, adapter.path) for adapter in settings.lora] == [("a", "/x"), ("b", "/y"), ("c", "z=1")]
    assert args.max_loras == 3
    assert engine_arguments(load_settings({"lora": "a=/x", "max_loras": "5"}))[0][1].max_loras == 5
    assert engine_arguments(load_settings({}))[0][1].max_loras == 0


def test_additional_models_have_their_own() -> None:
    first, second, third = engine_arguments(load_settings({"lora": "a=/x", "also": "m=,lora=b=/y;n="}))
    assert [[adapter.name for adapter in settings.lora] for settings, _ in (first, second, third)] == [["a"], ["b"], []]
    assert [args.max_loras for _, args in (first, second, third)] == [1, 1, 0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lora": "a"}, "--lora is 'a': 'a' must be NAME=PATH, for example sql=adapters/sql."),
        ({"lora": "=x"}, "--lora is '=x': '=x' must be NAME=PATH"),
        ({"lora": ";"}, "it is given, but empty"),
        ({"lora": ["a=x", "a=y"]}, "two adapters have the name a"),
        ({"lora": ["a=x", "b=y"], "max_loras": "1"}, "lora names 2 adapters, but max_loras is 1: raise it"),
        ({"allow_lora_loading": "true"}, "allow_lora_loading is on, but max_loras is 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as found:
        engine_arguments(load_settings(given))
    assert message in str(found.value)
