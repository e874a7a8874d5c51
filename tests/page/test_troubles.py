"""What goes wrong, as sentences that say what to do: keys, limits, a server that fails, ends, and comes back."""

from __future__ import annotations

import asyncio
import re
import socket

import pytest
from playwright.async_api import Route, expect

from browsing import browsing, visiting
from fakes import EOS
from gates import StepGate
from serving import ByChoice, on_port, serving

pytestmark = pytest.mark.page

FAILED = "Failed to load resource"  # the console's line about any answer with an error


async def test_a_key_is_asked_for_kept_for_the_tab_and_sent() -> None:
    async with serving([[97], [EOS]], settings={"api_key": "secret"}) as server, browsing(server.app) as visit:
        visit.expected.append(FAILED)
        dialog = visit.id("key-dialog")
        await expect(dialog).to_be_visible()
        await expect(visit.id("key-reason")).to_have_text("This server wants a key. Its operator has one.")
        await expect(visit.id("key")).to_be_focused()
        await visit.id("key").fill("wrong")
        await visit.page.get_by_role("button", name="Use it").click()
        await expect(dialog).to_be_visible()
        await visit.id("key").fill("secret")
        await visit.page.keyboard.press("Enter")
        await expect(dialog).to_be_hidden()
        await expect(visit.id("model").locator("option").first).to_have_text("burger")
        answer = await visit.answer("hello")
        await expect(answer.locator(".passes")).to_have_text("a")
        await visit.page.reload()
        await expect(visit.id("model").locator("option").first).to_have_text("burger")
        assert "secret" not in await visit.page.evaluate("JSON.stringify(localStorage)")


@pytest.mark.parametrize(
    ("options", "message", "sentence"),
    [
        ({"max_model_len": 16}, "x" * 40, r"maximum context length is 16 tokens.*Begin a new conversation"),
        ({"settings": {"max_body_size": "1KiB"}}, "x" * 2000, "shorten the message or begin a new conversation"),
    ],
)
async def test_a_refusal_says_what_to_do(options: dict[str, object], message: str, sentence: str) -> None:
    async with serving([[EOS]], **options) as server, browsing(server.app) as visit:  # type: ignore[arg-type]
        visit.expected.append(FAILED)
        answer = await visit.answer(message)
        error = answer.get_by_role("alert")
        assert await error.is_visible()
        assert re.search(sentence, await error.inner_text())


async def test_a_full_queue_says_when_to_try_again() -> None:
    gate = StepGate()
    runner = ByChoice([[97]] * 100, gate=gate)
    async with (
        serving(runner=runner, max_num_seqs=1, max_queue=1) as server,
        browsing(server.app) as visit,
    ):
        visit.expected.append(FAILED)
        waiting = [await visit.page.context.new_page() for _ in range(2)]
        for page in waiting:
            await page.goto(visit.url)
            await page.locator("#prompt").fill("wait")
            await page.locator("#prompt").press("Enter")
            await page.locator("#stop").wait_for()
        answer = await visit.answer("hello")
        await expect(answer.get_by_role("alert")).to_contain_text("The server is busy:")
        await expect(answer.get_by_role("alert")).to_contain_text("Try again in")
        gate.set()


async def test_an_engine_that_dies_inside_an_answer_is_told() -> None:
    async with (
        serving(runner=ByChoice([[97]] * 9, fail_at_step=3)) as server,
        browsing(server.app) as visit,
    ):
        visit.expected.append(FAILED)
        answer = await visit.answer("hello")
        await expect(answer.get_by_role("alert")).to_contain_text("The server ended this answer:")
        await expect(answer.locator(".passes")).to_have_text("aa")
        await expect(visit.id("connection")).to_contain_text("not well")


async def test_the_page_survives_a_restart_of_the_server() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    gate = StepGate()
    async with serving(runner=ByChoice([[97]] * 100, gate=gate)) as server:
        first = on_port(server.app, on=port)
        await first.__aenter__()
        async with visiting(f"http://127.0.0.1:{port}") as visit:
            visit.expected += [FAILED, "ERR_"]
            answer = await visit.send("hello")
            gate.step()
            gate.step()
            await expect(answer.locator(".pass").first).to_have_text("a")
            await first.__aexit__(None, None, None)
            await visit.ended()
            await expect(answer.get_by_role("alert")).to_contain_text("The connection broke off")
            await expect(visit.id("connection")).to_contain_text("The server cannot be reached.")
            again = await visit.answer("again")
            await expect(again.get_by_role("alert")).to_contain_text("The server cannot be reached.")
            async with on_port(server.app, on=port):
                await expect(visit.id("connection")).to_be_empty(timeout=15_000)
                gate.set()
                await visit.page.get_by_role("button", name="Regenerate").last.click()
                await visit.ended()
                await expect(visit.answers.last.locator(".stats")).to_contain_text("tokens in")


async def test_a_browser_that_keeps_nothing_still_chats() -> None:
    async with serving([[97], [EOS]]) as server, browsing(server.app) as visit:
        await visit.page.add_init_script("Storage.prototype.setItem = () => { throw new DOMException('full'); };")
        await visit.page.reload()
        answer = await visit.answer("hello")
        await expect(answer.locator(".passes")).to_have_text("a")
        await expect(visit.id("announce")).to_contain_text("no room to keep the conversations")
        assert await visit.answers.count() == 1
        await visit.answer("again")
        assert await visit.answers.count() == 2


@pytest.mark.parametrize(
    "stored",
    [
        "[1, null, {}]",
        "{",
        '"x"',
        '[{"id": "a", "messages": [{"role": "assistant"}]}]',
        '{"id": "a", "messages": [1, null, {}]}',
    ],
)
async def test_what_others_stored_under_its_names_breaks_nothing(stored: str) -> None:
    async with serving([[97], [EOS]]) as server, browsing(server.app) as visit:
        for name in ("conversations", "conversation.a", "settings"):
            await visit.page.evaluate(f"text => localStorage.setItem('hamburger.{name}', text)", stored)
        await visit.page.reload()
        await visit.id("new-conversation").click()
        answer = await visit.answer("hello")
        await expect(answer.locator(".passes")).to_have_text("a")


async def test_the_models_are_told_to_be_on_their_way_or_missing() -> None:
    """Loading, failed, and there after the page looked again; a message that is sent before goes to the first model."""
    gate, arrived = asyncio.Event(), asyncio.Event()
    fails = iter([True])

    async def held(route: Route) -> None:
        arrived.set()
        await gate.wait()
        await (route.fulfill(status=500) if next(fails, False) else route.continue_())

    async with serving([[97], [EOS]]) as server, browsing(server.app) as visit:
        visit.expected.append(FAILED)
        model = visit.id("model")
        await expect(model).to_have_attribute("aria-busy", "false")
        await visit.page.route("**/v1/models", held)
        await visit.page.reload()
        await arrived.wait()
        await expect(model).to_have_attribute("aria-busy", "true")
        await expect(model).to_have_value("")
        assert await model.locator("option").all_inner_texts() == ["loading…"]
        answer = await visit.answer("hello")
        await expect(answer.locator(".passes")).to_have_text("a")
        gate.set()
        await expect(model).to_have_attribute("aria-busy", "false")
        assert await model.locator("option").all_inner_texts() == ["not known yet"]
        await expect(model).to_have_value("burger")  # the page asks again by itself
        assert await model.locator("option").all_inner_texts() == ["burger"]


async def test_the_models_are_told_to_need_a_key() -> None:
    async with serving([[EOS]], settings={"api_key": "secret"}) as server, browsing(server.app) as visit:
        visit.expected.append(FAILED)
        assert await visit.id("model").locator("option").all_inner_texts() == ["needs a key"]
        await expect(visit.id("model")).to_have_attribute("aria-busy", "false")


async def test_a_model_that_is_gone_leaves_the_list() -> None:
    async def with_another(route: Route) -> None:
        answer = await route.fetch()
        listed = await answer.json()
        listed["data"].append({**listed["data"][0], "id": "gone", "root": "gone"})
        await route.fulfill(response=answer, json=listed)

    async with serving([[97], [EOS]]) as server, browsing(server.app) as visit:
        visit.expected.append(FAILED)
        await visit.page.route("**/v1/models", with_another, times=1)
        await visit.page.reload()
        await visit.id("model").select_option("gone")
        answer = await visit.answer("hello")
        await expect(answer.get_by_role("alert")).to_contain_text("The model 'gone' does not exist")
        await expect(visit.id("model").locator("option")).to_have_text(["burger"])
        await answer.get_by_role("button", name="Regenerate").click()
        await expect(visit.answers.locator(".passes")).to_have_text("a")


async def test_gauges_that_are_not_found_ask_for_no_models() -> None:
    """As a proxy answers that keeps /metrics to itself: each look at them would load the list anew."""
    asked: list[str] = []
    async with serving([[EOS]]) as server, browsing(server.app) as visit:
        visit.expected.append(FAILED)
        await expect(visit.id("model").locator("option")).to_have_text(["burger"])
        await visit.page.route("**/metrics", lambda route: route.fulfill(status=404, json={}))
        visit.page.on("request", lambda request: asked.append(request.url.rsplit("/", 1)[-1]))
        await visit.view("gauges")
        await visit.page.wait_for_event("request", lambda request: asked.count("metrics") == 2)
        await expect(visit.id("gauges-error")).to_be_visible()
        assert "models" not in asked
