"""The chat in a real browser: an answer's passes, drafts and memory; stop, edit, regenerate; what is kept."""

from __future__ import annotations

import re

import pytest
from playwright.async_api import expect

from browsing import browsing
from drafting import drafting
from fakes import EOS
from gates import StepGate
from serving import ByChoice, serving, until

pytestmark = pytest.mark.page

TEXT = "one two\nthree"
MICRO = {1: "ne tXo"}  # after "o": "ne t" is confirmed, "X" is not


async def test_an_answer_shows_its_passes_drafts_and_memory() -> None:
    async with drafting(TEXT, MICRO) as server, browsing(server.app) as visit:
        answer = await visit.answer("hello")
        passes = answer.locator(".pass")
        assert "".join(await passes.all_inner_texts()).rstrip("\n") == TEXT
        assert await passes.count() == len(TEXT) + 1 - 4  # four drafts were confirmed; the last pass is the end
        second = passes.nth(1)
        assert await second.inner_text() == "ne tw"
        assert await second.locator(".token.kept").count() == 4
        assert await second.locator(".misses i").count() == 2
        classes = [await passes.nth(i).get_attribute("class") for i in range(3)]
        assert classes == ["pass even", "pass odd", "pass even"]
        memory = answer.locator(".memory")
        slots = len(TEXT) + 1
        assert await memory.locator("i").count() == slots
        assert await memory.get_attribute("aria-label") == f"KV memory: {slots} tokens in {slots} slots"
        stats = await answer.locator(".stats").inner_text()
        assert stats.startswith(f"{slots} tokens in {slots - 4} passes (1.40 a pass) · {slots} slots · ")
        await second.hover()
        told = await answer.locator(".inspector").inner_text()
        assert told.startswith(f'Pass 2: "n" #{ord("n")} ')
        assert f"Drafted by the micro decoder: #{ord('n')} 75% ✓" in told
        assert f"#{ord('X')} 75% ✗" in told
        assert told.endswith("Confidence: automatic.")


async def test_text_is_markdown_and_passes_stay_what_was_written() -> None:
    written = "# Title\n\n- **bold** `code`\n\n```python\nx = 1 < 2\n```\n\n[a](https://example.org)"
    async with serving([[ord(c)] for c in written] + [[EOS]]) as server, browsing(server.app) as visit:
        answer = await visit.answer("hello")
        assert "".join(await answer.locator(".pass").all_inner_texts()) == written
        await visit.page.get_by_label("text", exact=True).check()
        shown = answer.locator(".markdown")
        await expect(shown.locator("h3")).to_have_text("Title")
        await expect(shown.locator("li strong")).to_have_text("bold")
        await expect(shown.locator("pre code")).to_have_text("x = 1 < 2\n")
        link = shown.locator("a")
        assert await link.get_attribute("href") == "https://example.org"
        assert await link.get_attribute("rel") == "noopener noreferrer nofollow"
        await shown.get_by_role("button", name="Copy").click()
        assert await visit.page.evaluate("navigator.clipboard.readText()") == "x = 1 < 2\n"
        await visit.page.reload()
        await expect(visit.id("thread")).to_have_attribute("data-shown", "text")


async def test_stop_ends_the_answer_here_and_on_the_server() -> None:
    gate = StepGate()
    async with serving(runner=ByChoice([[97, 98]] * 100, gate=gate)) as server, browsing(server.app) as visit:
        answer = await visit.send("hello")
        gate.step()
        gate.step()
        await expect(answer.locator(".pass").first).to_have_text("ab")
        await expect(visit.id("send")).to_be_hidden()
        await visit.id("stop").click()
        await visit.ended()
        await expect(answer.locator(".stats")).to_contain_text("stopped by you")
        await until(lambda: server.engine.load_of("").num_open == 0)
        gate.set()
        await visit.answer("again")
        assert await visit.answers.count() == 2


async def test_the_name_of_the_open_conversation_stops_nothing() -> None:
    gate = StepGate()
    async with serving(runner=ByChoice([[97], [98], [EOS]], gate=gate)) as server, browsing(server.app) as visit:
        answer = await visit.send("hello")
        gate.step()
        await expect(answer.locator(".passes")).to_have_text("a")
        await visit.id("conversations").get_by_role("button", name="hello", exact=True).click()
        gate.set()
        await visit.ended()
        await expect(answer.locator(".passes")).to_have_text("ab")
        await expect(answer.locator(".stats")).not_to_contain_text("stopped")


async def test_settings_and_the_system_prompt_reach_the_server_and_stay() -> None:
    async with serving([[97], [EOS]]) as server, browsing(server.app) as visit:
        await visit.id("system").fill("Be brief.")
        for name, value in (("temperature", "0.5"), ("confidence", "0.35"), ("seed", "7"), ("max_tokens", "9")):
            await visit.id(name).fill(value)
        await visit.answer("hello")
        assert (server.runner.confidences, server.runner.seeds) == ([0.35], [7])
        assert bytes(server.runner.prompts[0]).startswith(b"system: Be brief.\nuser: hello\n")
        await visit.page.reload()
        await expect(visit.id("confidence")).to_have_value("0.35")
        await expect(visit.id("system")).to_have_value("Be brief.")
        await expect(visit.answers.first.locator(".passes")).to_have_text("a")


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [("confidence", "7", "0.7"), ("seed", "9007199254740993", "7")],  # JavaScript would send ...992
)
async def test_a_setting_out_of_range_is_pointed_at_and_nothing_is_sent(name: str, wrong: str, right: str) -> None:
    async with serving([[97], [EOS]]) as server, browsing(server.app) as visit:
        await visit.id(name).fill(wrong)
        await visit.send("hello")
        await expect(visit.id(name)).to_be_focused()
        await expect(visit.id("prompt")).to_have_value("hello")
        assert await visit.answers.count() == 0
        await visit.id(name).fill(right)
        await visit.id("prompt").press("Enter")
        await visit.answers.locator(".stats").get_by_text("2 tokens").wait_for()
        assert {"confidence": server.runner.confidences, "seed": server.runner.seeds}[name] == [float(right)]


async def test_conversations_are_kept_edited_and_deleted() -> None:
    async with serving([[97], [EOS]]) as server, browsing(server.app) as visit:
        await visit.answer("first question")
        await visit.answer("second")
        assert bytes(server.runner.prompts[1]).count(b"user: ") == 2
        await visit.id("new-conversation").click()
        await visit.answer("another")
        assert bytes(server.runner.prompts[2]).count(b"user: ") == 1
        listed = visit.id("conversations").locator("li button:not(.remove)")
        assert await listed.all_inner_texts() == ["another", "first question"]
        await visit.page.reload()
        await listed.nth(1).click()
        assert await visit.page.locator("article.user .words").all_inner_texts() == ["first question", "second"]
        await visit.page.get_by_role("button", name="Edit").first.click()
        await visit.page.get_by_label("Edit your message").fill("better question")
        await visit.page.get_by_role("button", name="Send again").click()
        await visit.ended()
        assert await visit.page.locator("article.user .words").all_inner_texts() == ["better question"]
        await visit.page.get_by_role("button", name="Regenerate").click()
        await visit.ended()
        assert await visit.answers.count() == 1
        assert bytes(server.runner.prompts[-1]) == bytes(server.runner.prompts[-2])
        visit.page.once("dialog", lambda dialog: dialog.accept())
        await visit.page.get_by_label("Delete “another”").click()
        await expect(listed).to_have_count(1)


async def test_all_of_it_by_keyboard() -> None:
    gate = StepGate()
    async with serving(runner=ByChoice([[97, 98]] * 100, gate=gate)) as server, browsing(server.app) as visit:
        press = visit.page.keyboard.press
        await press("Tab")
        await expect(visit.page.locator(".skip")).to_be_focused()
        await press("Enter")
        for _ in range(30):
            if await visit.page.evaluate("document.activeElement.id") == "prompt":
                break
            await press("Tab")
        await visit.page.keyboard.type("one")
        await press("Shift+Enter")
        await visit.page.keyboard.type("two")
        await press("Enter")
        gate.step()
        gate.step()
        gate.step()
        await expect(visit.answers.locator(".pass").nth(1)).to_have_text("ab")
        await press("Escape")
        await visit.ended()
        assert b"user: one\ntwo\n" in bytes(server.runner.prompts[0])
        await visit.answers.locator(".passes").focus()
        for key, told in (("ArrowRight", "Pass 1:"), ("ArrowRight", "Pass 2:"), ("ArrowLeft", "Pass 1:")):
            await press(key)
            await expect(visit.answers.get_by_role("status")).to_contain_text(re.compile(f"^{told}"))


async def test_an_end_is_announced_to_who_cannot_see_it() -> None:
    async with serving([[97], [EOS]]) as server, browsing(server.app) as visit:
        await visit.answer("hello")
        await expect(visit.id("announce")).to_have_text("The answer has ended: 2 tokens in 2 passes")


async def test_the_link_to_the_content_stays_in_its_view() -> None:
    async with serving([[EOS]]) as server, browsing(server.app) as visit:
        for view in ("race", "gauges", "chat"):
            await visit.view(view)
            await visit.page.locator(".skip").focus()
            await visit.page.keyboard.press("Enter")
            await expect(visit.id("main")).to_be_focused()
            await expect(visit.id(f"view-{view}")).to_be_visible()
            await expect(visit.page.locator("nav [aria-current]")).to_have_attribute("href", f"#{view}")


async def test_settings_take_any_number_in_their_range() -> None:
    async with serving([[97], [EOS]]) as server, browsing(server.app) as visit:
        asked: list[dict[str, object]] = []
        visit.page.on("request", lambda request: asked.append(request.post_data_json or {}))
        given = {"temperature": 0.75, "top_p": 0.999, "confidence": 0.33}
        for name, value in given.items():
            await visit.id(name).fill(str(value))
        await visit.answer("hello")
        assert given.items() <= asked[-1].items()


async def test_a_question_that_got_nothing_is_not_sent_again() -> None:
    """It stays to be seen. One that failed, one that was stopped before anything came, and one with an empty answer."""
    gate = StepGate()
    async with serving(runner=ByChoice([[97], [EOS]], gate=gate)) as server, browsing(server.app) as visit:
        visit.expected.append("Failed to load resource")
        await visit.page.route("**/v1/chat/completions", lambda route: route.fulfill(status=503, json={}))
        await visit.answer("failed")
        await visit.page.unroute("**/v1/chat/completions")
        await visit.send("stopped")
        await visit.id("stop").click()
        await visit.ended()
        gate.set()
        script, server.runner.by_choice = server.runner.by_choice, ([[EOS]],)
        await visit.answer("empty")
        server.runner.by_choice = script
        await visit.answer("hello")
        await visit.answer("again")
        words = await visit.page.locator("article.user .words").all_inner_texts()
        assert words == ["failed", "stopped", "empty", "hello", "again"]
        sent = [line for line in bytes(server.runner.prompts[-1]).decode().splitlines() if ": " in line]
        assert sent[:3] == ["user: hello", "assistant: a", "user: again"]


async def test_the_focus_goes_to_what_takes_a_buttons_place() -> None:
    gate = StepGate()
    async with serving(runner=ByChoice([[97, 98]] * 100, gate=gate)) as server, browsing(server.app) as visit:
        press = visit.page.keyboard.press
        await visit.id("prompt").fill("hello")
        await visit.id("send").focus()
        await press("Enter")
        await expect(visit.id("stop")).to_be_focused()
        await press("Enter")
        await expect(visit.id("send")).to_be_focused()
        await visit.page.get_by_role("button", name="Regenerate").focus()
        await press("Enter")
        await expect(visit.id("stop")).to_be_focused()
        await press("Enter")
        edit = visit.page.get_by_role("button", name="Edit")
        await edit.focus()
        await press("Enter")
        await visit.page.get_by_role("button", name="Cancel").focus()
        await press("Enter")
        await expect(edit).to_be_focused()
        await visit.id("new-conversation").click()
        await visit.page.get_by_role("button", name="hello", exact=True).focus()
        await press("Enter")
        await expect(visit.page.get_by_role("button", name="hello", exact=True)).to_be_focused()
        await expect(visit.page.locator("article.user .words")).to_have_text("hello")
        await visit.view("race")
        await visit.id("race-start").focus()
        await press("Enter")
        await expect(visit.id("race-stop")).to_be_focused()
        await press("Enter")
        await expect(visit.id("race-start")).to_be_focused()
        gate.set()


async def test_copying_without_a_clipboard_keeps_the_focus() -> None:
    """Over plain HTTP from another machine pages have none."""
    async with serving([[97], [EOS]]) as server, browsing(server.app) as visit:
        answer = await visit.answer("hello")
        await visit.page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
        copy = answer.get_by_role("button", name="Copy")
        await copy.focus()
        await visit.page.keyboard.press("Enter")
        await expect(visit.id("announce")).to_have_text("Copied")
        await expect(copy).to_be_focused()
        await visit.id("prompt").press("Control+v")
        await expect(visit.id("prompt")).to_have_value("a")
