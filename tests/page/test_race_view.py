"""Race and gauges in a real browser: lanes, figures, the verdict, a replay that is one file; charts of /metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.async_api import expect

from browsing import browsing
from drafting import drafting
from gates import StepGate
from serving import MODEL, ByChoice, serving, until

pytestmark = pytest.mark.page

TEXT = "one </script><b>two"
MICRO = {1: "ne ", 5: "/scr"}  # all seven are confirmed
TOKENS = len(TEXT) + 1  # with the end token
PASSES = TOKENS - 7


async def test_a_race_shows_the_same_text_in_fewer_passes_and_saves_as_one_file(tmp_path: Path) -> None:
    async with drafting(TEXT, MICRO) as server, browsing(server.app, path="/#race") as visit:
        await visit.id("race-start").click()
        await expect(visit.id("race-verdict")).to_contain_text(f"Both texts are identical, all {len(TEXT)} characters.")
        await expect(visit.id("race-start")).to_be_visible()
        lanes = visit.page.locator(".lane")
        assert await lanes.count() == 2
        figures = [await lane.locator(".figure").all_inner_texts() for lane in await lanes.all()]
        passes = [next(int(f.split("\n")[1]) for f in lane if f.startswith("passes")) for lane in figures]
        assert passes == [PASSES, TOKENS]
        async with visit.page.expect_download() as download:
            await visit.id("race-save").click()
        saved = tmp_path / "race.html"
        await (await download.value).save_as(saved)
        html = saved.read_text()
        assert TEXT not in html  # what a model wrote ends no script
        assert json.loads(html.split('id="race">')[1].split("</script>")[0])["verdict"].startswith("Both texts")
        replay = await visit.page.context.new_page()
        told: list[str] = []
        replay.on("console", lambda message: told.append(message.text))
        replay.on("pageerror", lambda error: told.append(str(error)))
        await replay.goto(saved.as_uri())
        await replay.locator("#speed").select_option("1")
        await replay.locator("#replay").click()
        for index in range(2):
            await expect(replay.locator(".lane-text").nth(index)).to_have_text(TEXT)
        assert told == []


async def test_a_race_can_be_stopped() -> None:
    gate = StepGate()
    async with (
        serving(runner=ByChoice([[97]] * 100, gate=gate)) as server,
        browsing(server.app, path="/#race") as visit,
    ):
        await visit.id("race-start").click()
        gate.step()
        gate.step()
        await expect(visit.page.locator(".lane-text").first).to_have_text(re.compile("a"))
        await visit.id("race-stop").click()
        await expect(visit.id("race-start")).to_be_visible()
        await until(lambda: server.engine.load_of("").num_open == 0)
        await expect(visit.id("announce")).to_have_text("The race was stopped")
        gate.set()


async def test_a_refused_race_says_why() -> None:
    async with drafting(TEXT) as server, browsing(server.app, path="/#race") as visit:
        visit.expected.append("Failed to load resource")
        await visit.id("race-tokens").fill("4000")
        await visit.id("race-start").click()
        await expect(visit.id("race-error")).to_contain_text("maximum context length")
        await expect(visit.id("race-start")).to_be_visible()


async def test_a_race_before_the_models_are_known_goes_to_the_first_one() -> None:
    async with drafting(TEXT) as server, browsing(server.app) as visit:
        await visit.page.route("**/v1/models", lambda route: None)  # on its way for ever
        await visit.page.goto(f"{visit.url}/?again#race")
        await expect(visit.id("model")).to_have_attribute("aria-busy", "true")
        asked: list[dict[str, object]] = []
        visit.page.on("request", lambda request: asked.append(request.post_data_json or {}))
        await visit.id("race-temperature").fill("0.75")
        await visit.id("race-start").click()
        await expect(visit.id("race-verdict")).to_contain_text("identical")
        names = await visit.page.locator(".lane-name").all_inner_texts()
        assert names == ["the first model", "the first model at confidence 1"]
        bodies = [body for body in asked if "messages" in body]
        assert ["model" in body for body in bodies] == [False, False]
        assert [body["temperature"] for body in bodies] == [0.75, 0.75]
        assert len({body["cache_salt"] for body in bodies}) == 2  # no lane reads the prompt for another


async def test_a_further_name_of_a_model_has_its_gauges_and_is_no_opponent_of_it() -> None:
    async with drafting(TEXT, MICRO, settings={"model_alias": ["gpt-4o"]}) as server, browsing(server.app) as visit:
        await visit.id("model").select_option("gpt-4o")
        await visit.answer("hello")
        await visit.view("gauges")
        rate = visit.id("gauges").locator("article").filter(has_text="Tokens a pass")
        await expect(rate.locator(".value")).to_have_text(f"{TOKENS / PASSES:.2f}")
        await visit.view("race")
        await expect(visit.id("race-against").locator("option")).to_have_text(["itself, without drafts"])
        await expect(visit.id("confidence-help")).to_contain_text("How sure a draft must be")


async def test_gauges_of_replicas_are_added_up_or_their_mean_or_the_most() -> None:
    def page(name: str, *values: float) -> str:
        return "".join(f'{name}{{model_name="{MODEL}",engine="{i}"}} {value}\n' for i, value in enumerate(values))

    text = "".join(
        page(f"hamburger_{name}", *values)
        for name, values in {
            "tokens_per_macro_step": (1.5, 2.5, 0.0),  # the third has had nothing to do
            "generation_tokens_per_second": (100, 50, 0),
            "kv_cache_usage_perc": (0.6, 0.25, 0.0),
        }.items()
    )
    async with drafting(TEXT) as server, browsing(server.app) as visit:
        await visit.page.route("**/metrics", lambda route: route.fulfill(body=text))
        await visit.view("gauges")
        charts = visit.id("gauges").locator("article")
        for name, value in (("Tokens a pass", "2.00"), ("Tokens a second", "150"), ("KV pool in use", "60.0")):
            await expect(charts.filter(has_text=name).locator(".value")).to_have_text(value)


async def test_a_composed_model_says_what_its_confidence_means() -> None:
    async with (
        drafting(TEXT, groups="composed", info={"groups": "composed"}) as server,
        browsing(server.app) as visit,
    ):
        await expect(visit.id("confidence-help")).to_contain_text("to join its group")


async def test_gauges_follow_the_metrics_while_they_are_seen() -> None:
    async with drafting(TEXT, MICRO) as server, browsing(server.app) as visit:
        await visit.answer("hello")
        await visit.view("gauges")
        charts = visit.id("gauges").locator("article")
        await expect(charts).to_have_count(6)
        rate = charts.filter(has_text="Tokens a pass")
        await expect(rate.locator(".value")).to_have_text(f"{TOKENS / PASSES:.2f}")
        await expect(rate.locator("svg")).to_have_attribute("aria-label", re.compile(r"Tokens a pass: \d"))
        await expect(charts.filter(has_text="Waiting requests").locator(".value")).to_have_text("0")
        asked: list[str] = []
        visit.page.on("request", lambda request: asked.append(request.url))
        await visit.page.wait_for_timeout(2500)
        assert any(url.endswith("/metrics") for url in asked)
        await visit.view("chat")
        asked.clear()
        await visit.page.wait_for_timeout(2500)
        assert not any(url.endswith("/metrics") for url in asked)
