"""The API key: who is asked for it and how often, keys that cannot be sent, and what its dialog leaves alone."""

from __future__ import annotations

import pytest
from playwright.async_api import expect

from browsing import browsing
from fakes import EOS
from gates import StepGate
from serving import ByChoice, serving

pytestmark = pytest.mark.page

FAILED = "Failed to load resource"


async def test_gauges_ask_for_a_key_once() -> None:
    """And again with another key."""
    async with serving([[EOS]]) as server, browsing(server.app) as visit:
        visit.expected.append(FAILED)
        await visit.page.clock.install()
        await visit.page.reload()
        await expect(visit.id("model")).to_have_value("burger")
        await visit.page.route("**/metrics", lambda route: route.fulfill(status=401, json={}))
        asked: list[str] = []
        visit.page.on("request", lambda request: asked.append(request.url.rpartition("/")[2]))
        await visit.view("gauges")
        dialog = visit.id("key-dialog")
        await expect(dialog).to_be_visible()
        await visit.page.get_by_role("button", name="Cancel").click()
        await expect(dialog).to_be_hidden()
        for _ in range(5):
            await visit.page.clock.run_for(2000)
        await visit.view("chat")
        await visit.view("gauges")
        await expect(dialog).to_be_hidden()
        await expect(visit.id("gauges-error")).to_contain_text("wants an API key")
        assert asked.count("metrics") == 1
        await visit.page.unroute("**/metrics")
        await visit.id("open-key").click()
        await visit.id("key").fill("any")
        await visit.page.keyboard.press("Enter")
        await expect(visit.id("gauges-error")).to_be_hidden()
        await visit.page.locator("#gauges .value").first.filter(has_not_text="–").wait_for()


async def test_the_reason_is_not_written_again_while_one_reads_it() -> None:
    async with serving([[EOS]], settings={"api_key": "secret"}) as server, browsing(server.app) as visit:
        visit.expected.append(FAILED)
        await visit.page.route("**/metrics", lambda route: route.fulfill(status=401, json={}))
        await visit.page.evaluate(
            """() => {
                window.written = 0;
                const watch = { childList: true, characterData: true, subtree: true };
                new MutationObserver(() => (written += 1)).observe(document.getElementById("key-reason"), watch);
                location.hash = "#gauges";
            }"""
        )
        await expect(visit.id("gauges-error")).to_contain_text("wants an API key")
        await expect(visit.id("key-dialog")).to_be_visible()
        assert await visit.page.evaluate("written") == 0


async def test_a_key_that_cannot_be_sent_is_told_as_a_wrong_one() -> None:
    async with serving([[97], [EOS]], settings={"api_key": "secret"}) as server, browsing(server.app) as visit:
        visit.expected.append(FAILED)
        await visit.id("key").fill("“secret”")
        await visit.page.keyboard.press("Enter")
        await expect(visit.id("key-dialog")).to_be_visible()
        await expect(visit.id("key-reason")).to_contain_text("typographic quote")
        await visit.id("key").fill("secret")
        await visit.page.keyboard.press("Enter")
        await expect(visit.id("key-dialog")).to_be_hidden()
        await expect(visit.id("model")).to_have_value("burger")
        answer = await visit.answer("hello")
        await expect(answer.locator(".passes")).to_have_text("a")


async def test_escape_in_the_dialog_stops_no_answer() -> None:
    gate = StepGate()
    async with serving(runner=ByChoice([[97]] * 100, gate=gate)) as server, browsing(server.app) as visit:
        answer = await visit.send("hello")
        gate.step()
        gate.step()
        await expect(answer.locator(".pass").first).to_have_text("a")
        await visit.id("open-key").click()
        await visit.page.keyboard.press("Escape")
        await expect(visit.id("key-dialog")).to_be_hidden()
        await expect(visit.id("stop")).to_be_visible()
        await expect(answer.locator(".stats")).not_to_contain_text("stopped")
        await visit.page.keyboard.press("Escape")
        await visit.ended()
        await expect(answer.locator(".stats")).to_contain_text("stopped by you")
        gate.set()
