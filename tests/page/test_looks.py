"""Every view at three widths in both themes: axe-core finds nothing, nothing is cut off, and pictures to look at.

The pictures lie in build/page/ afterwards.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page

from browsing import browsing
from drafting import drafting

pytestmark = pytest.mark.page

PICTURES = Path(__file__).parents[2] / "build" / "page"
WIDTHS = {"phone": (390, 844), "tablet": (820, 1180), "desktop": (1440, 900)}
TEXT = "Prime numbers have two divisors: `1` and themselves.\n\n- 2\n- 3\n- 5\n"
MICRO = {5: " nuXXXX", 8: "mbers", 14: "have two", 25: "visors: "}


async def seen(page: Page, name: str) -> None:
    """No finding of axe-core, no part beyond the edge; keeps a picture."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    await page.screenshot(path=PICTURES / f"{name}.png")
    results = await Axe().run(page)
    assert results.violations_count == 0, results.generate_report()
    assert await page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("device", WIDTHS)
async def test_all_views(device: str, dark: bool) -> None:
    width, height = WIDTHS[device]
    name = f"{device}-{'dark' if dark else 'light'}"
    async with (
        drafting(TEXT, MICRO) as server,
        browsing(server.app, width=width, height=height, dark=dark) as visit,
    ):
        await seen(visit.page, f"{name}-welcome")
        answer = await visit.answer("What is a prime number?")
        await answer.locator(".pass").nth(5).hover()
        await seen(visit.page, f"{name}-chat")
        await visit.page.get_by_label("text", exact=True).check()
        await seen(visit.page, f"{name}-text")
        await visit.view("race")
        await visit.id("race-start").click()
        await visit.id("race-verdict").get_by_text("identical").wait_for()
        await visit.id("race-start").wait_for()
        await seen(visit.page, f"{name}-race")
        await visit.view("gauges")
        await visit.page.locator("#gauges .value").first.filter(has_not_text="–").wait_for()
        await seen(visit.page, f"{name}-gauges")
        await visit.id("open-key").click()
        await seen(visit.page, f"{name}-key")


async def test_who_wants_no_motion_gets_none() -> None:
    async with drafting(TEXT) as server, browsing(server.app) as visit:
        await visit.page.emulate_media(reduced_motion="reduce")
        answer = await visit.send("hello")
        await answer.locator(".pass").first.wait_for()
        moving = "[...document.querySelectorAll('*')].filter(e => getComputedStyle(e).animationName !== 'none').length"
        assert await visit.page.evaluate(moving) == 0


async def test_a_theme_is_chosen_and_kept() -> None:
    back = "getComputedStyle(document.body).backgroundColor"
    async with drafting(TEXT) as server, browsing(server.app) as visit:
        light = await visit.page.evaluate(back)
        await visit.id("theme").select_option("dark")
        dark = await visit.page.evaluate(back)
        assert dark != light
        await visit.page.reload()
        assert await visit.page.evaluate(back) == dark


async def test_forced_colours_hide_no_slot_no_draft_and_no_view() -> None:
    async with drafting(TEXT, MICRO) as server, browsing(server.app) as visit:
        await visit.page.emulate_media(forced_colors="active")
        answer = await visit.answer("What is a prime number?")
        style = "(one, name) => getComputedStyle(one)[name]"
        back = await visit.page.locator("body").evaluate(style, "backgroundColor")
        odd, stroke = answer.locator(".memory i.odd").first, answer.locator(".misses i").first
        assert await answer.locator(".memory i.even").first.evaluate(style, "borderTopStyle") == "solid"
        assert await odd.evaluate(style, "backgroundColor") != back
        assert await stroke.evaluate(style, "backgroundColor") != back
        links = visit.page.locator("nav a")
        borders = [await link.evaluate(style, "borderTopWidth") for link in await links.all()]
        assert borders == ["3px", "0px", "0px"]
        await seen(visit.page, "desktop-forced")
