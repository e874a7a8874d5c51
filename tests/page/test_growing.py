"""An answer while it grows: measured once a frame, Stop is heard, its end stays in sight, text keeps its nodes."""

from __future__ import annotations

import pytest
from playwright.async_api import expect

from browsing import Visit, browsing
from fakes import EOS
from gates import StepGate
from serving import ByChoice, serving, split

pytestmark = pytest.mark.page

# From now on every chat is answered with `count` passes that arrive all at once, as after a hang of the network.
AT_ONCE = """(count) => {
    const ask = window.fetch;
    const chunk = (index) => ({
        choices: [{ index: 0, delta: { content: `w${index} ` }, group: { token_ids: [index] }, logprobs: null }],
        usage: { completion_tokens: index + 1, macro_steps: index + 1, kv_slots: index + 1 },
    });
    const events = Array.from({ length: count }, (_, index) => `data: ${JSON.stringify(chunk(index))}\\n\\n`);
    const bytes = new TextEncoder().encode(events.join("") + "data: [DONE]\\n\\n");
    window.fetch = async (path, init) => {
        if (!String(path).endsWith("chat/completions")) return ask(path, init);
        return new Response(new ReadableStream({ start(stream) { stream.enqueue(bytes); stream.close(); } }));
    };
}"""
# Counts how often scrollHeight is read, inside and outside of animation frames, and the frames.
COUNT = """() => {
    window.counted = { frames: 0, inside: 0, outside: 0 };
    let isInside = false;
    const frame = window.requestAnimationFrame;
    window.requestAnimationFrame = (then) => frame((time) => {
        counted.frames += 1;
        isInside = true;
        then(time);
        isInside = false;
    });
    const height = Object.getOwnPropertyDescriptor(Element.prototype, "scrollHeight");
    Object.defineProperty(Element.prototype, "scrollHeight", {
        configurable: true,
        get() {
            counted[isInside ? "inside" : "outside"] += 1;
            return height.get.call(this);
        },
    });
}"""
PASSES = 500
# Pixels to the end, of whichever of the two scrolls.
REST = """[thread, document.scrollingElement].reduce(
    (rest, box) => Math.max(rest, box.scrollHeight - box.scrollTop - box.clientHeight), 0)"""


async def test_many_passes_are_measured_once_a_frame() -> None:
    async with serving([[EOS]]) as server, browsing(server.app) as visit:
        await visit.page.evaluate(AT_ONCE, PASSES)
        await visit.page.evaluate(COUNT)
        answer = await visit.answer("hello")
        await expect(answer.locator(".pass")).to_have_count(PASSES)
        counted = await visit.page.evaluate("counted")
        assert counted["inside"] <= 4 * counted["frames"]  # of the thread and of the page, before and after
        assert counted["outside"] <= 8  # when it is asked, and at its end
        assert await visit.page.evaluate("thread.scrollHeight - thread.scrollTop - thread.clientHeight") < 1


async def test_lanes_of_a_race_are_measured_once_a_frame() -> None:
    async with serving([[EOS]]) as server, browsing(server.app, path="/#race") as visit:
        await visit.page.evaluate(AT_ONCE, PASSES)
        await visit.page.evaluate(COUNT)
        await visit.id("race-start").click()
        await expect(visit.id("race-verdict")).to_contain_text("identical")
        await visit.id("race-start").wait_for()
        await expect(visit.page.locator(".lane").nth(1).locator(".pass")).to_have_count(PASSES)
        counted = await visit.page.evaluate("counted")
        assert counted["inside"] <= 2 * counted["frames"]
        assert counted["outside"] == 0


async def test_stop_is_heard_between_passes_that_came_at_once() -> None:
    async with serving([[EOS]]) as server, browsing(server.app) as visit:
        await visit.page.evaluate(AT_ONCE, 20_000)
        await visit.page.evaluate(
            """() => {
                const parse = JSON.parse;
                JSON.parse = (text, ...rest) => {
                    if (text.includes('"choices"')) {
                        JSON.parse = parse;
                        setTimeout(() => document.getElementById("stop").click());
                    }
                    return parse(text, ...rest);
                };
            }"""
        )
        answer = await visit.answer("hello")
        await expect(answer.locator(".stats")).to_contain_text("stopped by you")
        assert 0 < await answer.locator(".pass").count() < 20_000


@pytest.mark.parametrize(("width", "box"), [(390, "document.scrollingElement"), (1280, "thread")])
async def test_the_end_stays_in_sight_unless_one_scrolls_away(width: int, box: str) -> None:
    gate = StepGate()
    lines = 120
    async with (
        serving(runner=ByChoice([[97, 10]] * lines + [[EOS]], gate=gate), max_model_len=1024, num_blocks=256) as server,
        browsing(server.app, width=width, height=700) as visit,
    ):
        rest = f"{box}.scrollHeight - {box}.scrollTop - {box}.clientHeight"
        await visit.send("hello")
        await _more(visit, gate, 60)
        assert await visit.page.evaluate(f"{box}.scrollTop") > 300
        assert await visit.page.evaluate(rest) < 60
        await visit.page.evaluate(f"{box}.scrollTop = 0")
        await _more(visit, gate, 20)
        assert await visit.page.evaluate(f"{box}.scrollTop") == 0
        await visit.view("gauges")
        gate.set()
        await visit.id("announce").get_by_text("The answer has ended").wait_for(state="attached")
        assert await visit.page.evaluate("document.scrollingElement.scrollTop") == 0


@pytest.mark.parametrize(
    ("before", "after"),
    [((390, 844), (844, 390)), ((1280, 800), (700, 800)), ((1280, 800), (1280, 500))],
    ids=["a phone is turned", "the page scrolls now", "less high"],
)
async def test_another_window_does_not_end_the_following(before: tuple[int, int], after: tuple[int, int]) -> None:
    gate = StepGate()
    runner = ByChoice([[97, 98, 99, 32]] * 200 + [[EOS]], gate=gate)
    async with (
        serving(runner=runner, max_model_len=1024, num_blocks=256) as server,
        browsing(server.app, width=before[0], height=before[1]) as visit,
    ):
        await visit.send("hello")
        await _more(visit, gate, 140)
        await visit.page.set_viewport_size({"width": after[0], "height": after[1]})
        await _more(visit, gate, 20)
        assert await visit.page.evaluate(REST) < 60
        gate.set()
        await visit.ended()


async def test_pointing_at_a_pass_does_not_end_the_following() -> None:
    gate = StepGate()
    runner = ByChoice([[97, 98, 99, 10]] * 120 + [[EOS]], gate=gate)
    async with (
        serving(runner=runner, max_model_len=1024, num_blocks=256) as server,
        browsing(server.app, width=320, height=700) as visit,
    ):
        answer = await visit.send("hello")
        await _more(visit, gate, 60)
        await answer.locator(".pass").last.hover()
        inspector = answer.locator(".inspector")
        await expect(inspector).to_contain_text("Pass 60")
        assert await inspector.evaluate("one => one.offsetHeight") > 60  # more than one is looked for near the end
        await _more(visit, gate, 20)
        gate.set()
        await visit.ended()
        assert await visit.page.evaluate(REST) < 60


async def _more(visit: Visit, gate: StepGate, count: int) -> None:
    """So many more passes are shown, in an animation frame of their own or in one with others."""
    before = await visit.page.locator(".pass").count()
    for _ in range(count):
        gate.step()
    await expect(visit.page.locator(".pass")).to_have_count(before + count)


async def test_growing_text_keeps_buttons_focus_and_selections() -> None:
    written = ["```python\none\n", "two\n", "```\n\n", "# Title\n\n", "- item"]
    gate = StepGate()
    pieces = split("".join(written), *map(len, written))
    async with serving(runner=ByChoice([*pieces, [EOS]], gate=gate)) as server, browsing(server.app) as visit:
        await visit.page.get_by_label("text", exact=True).check()
        answer = await visit.send("hello")
        shown = answer.locator(".markdown")
        gate.step()
        await expect(shown.locator("pre code")).to_have_text("one\n")
        await shown.get_by_role("button", name="Copy").focus()
        await visit.page.evaluate(
            """() => {
                window.held = document.activeElement;
                getSelection().selectAllChildren(document.querySelector(".markdown code"));
            }"""
        )
        for sign, steps in (("two", 1), ("Title", 2)):
            for _ in range(steps):
                gate.step()
            await expect(shown).to_contain_text(sign)
            assert await visit.page.evaluate("document.activeElement === window.held && window.held.isConnected")
            assert (await visit.page.evaluate("getSelection().toString()")).startswith("one")
        await visit.page.keyboard.press("Enter")
        await expect(visit.id("announce")).to_have_text("Copied")
        assert await visit.page.evaluate("navigator.clipboard.readText()") == "one\ntwo\n"
        gate.set()
        await visit.ended()
        await expect(shown.locator("li")).to_have_text("item")


async def test_text_that_is_redrawn_is_what_it_would_be_at_once() -> None:
    """Of Markdown whose meaning changes as it goes on: headings, lists, tables, links, quotes."""
    written = "a\n===\n\n- x\n- y\n\n  z\n\n|a|b|\n|-|-|\n|1|2|\n\n> q *r* **s**\n\n[l][1] `c`\n\n```py\n1\n```\n\n[1]: https://e.org\n"
    async with serving([[EOS]]) as server, browsing(server.app) as visit:
        wrong = await visit.page.evaluate(
            """async (text) => {
                const { show } = await import("/playground/markdown.js");
                const grown = document.createElement("div");
                for (let end = 1; end <= text.length; end++) {
                    const fresh = document.createElement("div");
                    show(text.slice(0, end), fresh);
                    show(text.slice(0, end), grown);
                    if (!grown.isEqualNode(fresh)) return text.slice(0, end);
                }
                return null;
            }""",
            written,
        )
        assert wrong is None


async def test_text_is_not_parsed_while_passes_are_shown() -> None:
    async with serving([[97], [EOS]]) as server, browsing(server.app) as visit:
        answer = await visit.answer("hello")
        assert await answer.locator(".markdown").evaluate("one => one.childNodes.length") == 0
        await visit.page.get_by_label("text", exact=True).check()
        await expect(answer.locator(".markdown p")).to_have_text("a")
