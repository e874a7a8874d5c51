"""The page on the real server with the embedded model: a race of three lanes, and slots that settle."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.async_api import expect

from browsing import visiting
from hamburger.engine.types.settling import Settling
from real_server import RealServer

pytestmark = pytest.mark.page


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    options = ("--settle", "true", "--settle-window", "32", "--max-model-len", "1024", "--kv-cache-memory", "64MiB")
    with RealServer(*options, "--also", "composed=,groups=composed,settle=false,confidence=0.3") as running:
        yield running


async def test_a_race_of_the_embedded_model_has_one_text_and_composed_groups_another(server: RealServer) -> None:
    async with visiting(server.url, "/#race") as visit:
        await visit.id("race-prompt").fill("Count from 1 to 20.")
        await visit.id("race-tokens").fill("64")
        await expect(visit.id("race-third")).to_have_value("composed")
        await visit.id("race-start").click()
        await expect(visit.id("race-verdict")).to_contain_text("Both texts are identical", timeout=60_000)
        await expect(visit.id("race-verdict")).to_contain_text(
            re.compile(r"composed wrote a text of its own, \d+ tokens in \d+ slots")
        )
        await visit.id("race-start").wait_for()  # the replay has ended
        figures = await visit.page.locator(".lane").nth(1).locator(".figure").all_inner_texts()
        assert "passes\n64" in figures
        assert await visit.page.locator(".lane").count() == 3


async def test_slots_that_settle_fold_while_one_watches(server: RealServer) -> None:
    async with visiting(server.url) as visit:
        await visit.id("temperature").fill("0")
        await visit.id("max_tokens").fill("300")
        answer = await visit.answer("Write a long story about a river.")
        cells = answer.locator(".memory i")
        label = await answer.locator(".memory").get_attribute("aria-label")
        assert label is not None
        found = re.match(r"KV memory: (\d+) tokens in (\d+) slots: \d+ need none of their own", label)
        assert found is not None
        tokens, slots = map(int, found.groups())
        assert slots < tokens
        assert await cells.count() == slots
        assert await answer.locator(".memory i.settled").count() > 0


@pytest.mark.parametrize(
    "settling",
    [Settling(192, 1 / 8), Settling(32, 1 / 20, 0.0), Settling(64, 1 / 3, 0.0), Settling(32, 1 / 8, 0.0, limit=208)],
)
async def test_a_cell_is_a_slot_whatever_share_stays(server: RealServer, settling: Settling) -> None:
    """As of an answer of 1,500 tokens: each pass's tokens and slots are shown, and the cells counted."""
    lengths = [*range(1, 1500, 2)]
    slots = [1 + settling.slots(length - 1) for length in lengths]
    settled = settling.kept_slots(settling.chunk * sum(1 for _ in settling.places(lengths[-1] - 1)))
    async with visiting(server.url) as visit:
        shown = await visit.page.evaluate(
            """async (passes) => {
                const { MemoryStrip } = await import("/playground/memory.js");
                const strip = new MemoryStrip(), counts = [];
                for (const [tokens, slots] of passes) {
                    strip.show(tokens, slots, false);
                    counts.push(strip.root.children.length);
                }
                return [counts, strip.root.querySelectorAll(".settled").length];
            }""",
            [*zip(lengths, slots, strict=True)],
        )
    assert shown == [slots, settled]
