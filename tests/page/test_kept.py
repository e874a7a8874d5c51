"""What the browser keeps: by several tabs at once, where there is no room, and where nothing may be kept."""

from __future__ import annotations

import json

import pytest
from playwright.async_api import Locator, Page, expect

from browsing import browsing
from fakes import EOS
from gates import StepGate
from serving import ByChoice, serving

pytestmark = pytest.mark.page

KEPT = """Object.entries(localStorage)
    .filter(([key]) => key.startsWith("hamburger.conversation."))
    .map(([, text]) => JSON.parse(text))"""


def listed(page: Page) -> Locator:
    return page.locator("#conversations li button:not(.remove)")


async def asked(page: Page, text: str) -> None:
    """Send a message in any tab, and wait for the end of its answer."""
    await page.locator("#prompt").fill(text)
    await page.locator("#prompt").press("Enter")
    await page.locator("article.answer .stats", has_text="tokens in").last.wait_for()
    await page.locator("#send").wait_for()


async def test_two_tabs_take_nothing_from_each_other() -> None:
    async with serving([[97], [EOS]]) as server, browsing(server.app) as visit:
        first = visit.page
        await asked(first, "first")
        second = await first.context.new_page()
        await second.goto(visit.url)
        await second.locator("#new-conversation").click()
        await asked(second, "second")
        await expect(listed(first)).to_have_text(["second", "first"])  # it heard
        await expect(first.locator("article.user .words")).to_have_text("first")  # and still shows its own
        await first.reload()
        await expect(listed(first)).to_have_text(["second", "first"])
        second.once("dialog", lambda dialog: dialog.accept())
        await second.get_by_label("Delete “first”").click()
        await expect(listed(first)).to_have_text(["second"])
        await first.close(run_before_unload=True)
        await second.reload()
        await expect(listed(second)).to_have_text(["second"])


async def test_an_answer_that_the_page_left_is_kept_as_it_was_and_says_so() -> None:
    gate = StepGate()
    async with serving(runner=ByChoice([[97, 98]] * 100, gate=gate)) as server, browsing(server.app) as visit:
        answer = await visit.send("hello")
        gate.step()
        gate.step()
        await expect(answer.locator(".pass").first).to_have_text("ab")
        await visit.page.reload()
        await expect(visit.answers.locator(".pass").first).to_have_text("ab")
        await expect(visit.answers.locator(".stats")).to_contain_text("cut, as the page was left")
        gate.set()


async def test_a_tab_that_heard_nothing_still_takes_nothing() -> None:
    async with serving([[97], [EOS]]) as server, browsing(server.app) as visit:
        first = visit.page
        await first.add_init_script("addEventListener('storage', (event) => event.stopImmediatePropagation());")
        await first.reload()
        await asked(first, "first")
        second = await first.context.new_page()
        await second.goto(visit.url)
        await second.locator("#new-conversation").click()
        await asked(second, "second")
        await asked(first, "more")
        await first.reload()
        await expect(listed(first)).to_have_text(["second", "first"])


async def test_two_answers_at_once_in_one_conversation_become_two() -> None:
    gate = StepGate()
    async with serving(runner=ByChoice([[97], [EOS]], gate=gate)) as server, browsing(server.app) as visit:
        await visit.send("first")
        gate.step()
        gate.step()
        await visit.answers.locator(".stats", has_text="tokens in").wait_for()
        await visit.ended()
        other = await visit.page.context.new_page()
        await other.goto(visit.url)
        for page, text in ((visit.page, "left"), (other, "right")):
            await page.locator("#prompt").fill(text)
            await page.locator("#prompt").press("Enter")
            await page.locator("#stop").wait_for()
        gate.set()
        for page in (visit.page, other):
            await page.locator("#send").wait_for()
            await expect(listed(page)).to_have_text(["first", "first"])
        kept = await visit.page.evaluate(KEPT)
        texts = sorted([one["content"] for one in each["messages"] if one["role"] == "user"] for each in kept)
        assert texts == [["first", "left"], ["first", "right"]]


async def test_answers_that_end_in_the_same_instant_become_two_as_well() -> None:
    """Processes of a browser read each other's entries a little late: here the second tab writes before it can know."""
    async with serving([[97], [EOS]]) as server, browsing(server.app) as visit:
        await visit.answer("first")
        titles = await visit.page.evaluate(
            """async () => {
                const { Store } = await import("/playground/store.js");
                const [mine, theirs] = [new Store(localStorage), new Store(localStorage)];
                const [entry, text] = Object.entries(localStorage).find(([key]) => key.includes("conversation."));
                mine.conversations[0].title = "left";
                mine.save(mine.conversations[0]);
                localStorage.setItem(entry, text); // as the other one still reads it
                theirs.conversations[0].title = "right";
                theirs.save(theirs.conversations[0]);
                mine.follow(entry, null);
                return new Store(localStorage).conversations.map(({ title }) => title).sort();
            }"""
        )
        assert titles == ["left", "right"]


async def test_what_earlier_versions_kept_in_one_entry_is_taken_over() -> None:
    def conversation(name: str) -> dict[str, object]:
        return {"id": name, "title": name, "system": "", "messages": [{"role": "user", "content": name}]}

    async with serving([[97], [EOS]]) as server, browsing(server.app) as visit:
        before = json.dumps([conversation("newer"), conversation("older")])
        await visit.page.evaluate("text => localStorage.setItem('hamburger.conversations', text)", before)
        for _ in range(2):
            await visit.page.reload()
            await expect(listed(visit.page)).to_have_text(["newer", "older"])
        assert await visit.page.evaluate("localStorage.getItem('hamburger.conversations')") is None


async def test_where_nothing_may_be_kept_the_page_works_until_it_closes() -> None:
    async with serving([[97], [EOS]], settings={"api_key": "secret"}) as server, browsing(server.app) as visit:
        visit.expected.append("Failed to load resource")
        await visit.page.add_init_script(
            """for (const name of ["localStorage", "sessionStorage"]) {
                Object.defineProperty(window, name, { get() { throw new DOMException("blocked", "SecurityError"); } });
            }"""
        )
        await visit.page.reload()
        await visit.id("key").fill("secret")
        await visit.page.keyboard.press("Enter")
        await expect(visit.id("model")).to_have_value("burger")
        await visit.answer("first")
        await visit.id("new-conversation").click()
        await visit.answer("second")
        await expect(listed(visit.page)).to_have_text(["second", "first"])
        await listed(visit.page).nth(1).click()
        await expect(visit.page.locator("article.user .words")).to_have_text("first")


async def test_a_full_storage_takes_no_passes_from_what_is_shown() -> None:
    gate = StepGate()
    async with serving(runner=ByChoice([[97]] * 5 + [[EOS]], gate=gate)) as server, browsing(server.app) as visit:
        await visit.page.evaluate(
            """() => {
                const setItem = Storage.prototype.setItem;
                Storage.prototype.setItem = function (key, text) {
                    if (text.includes('"groups"')) throw new DOMException("full", "QuotaExceededError");
                    setItem.call(this, key, text);
                };
            }"""
        )
        answer = await visit.send("hello")
        gate.step()
        gate.step()
        await expect(answer.locator(".pass").first).to_have_text("a")
        await visit.id("settings").evaluate("details => (details.open = true)")
        await visit.id("system").fill("Be brief.")
        await visit.id("prompt").focus()  # which keeps the system prompt, and with it the answer so far
        gate.set()
        await visit.ended()
        await expect(answer.locator(".stats")).to_contain_text("6 tokens in 6 passes")
        await expect(answer.locator(".pass")).to_have_count(6)
        await expect(answer.get_by_role("alert")).to_be_hidden()
        await visit.page.reload()
        await expect(visit.answers.locator(".markdown")).to_have_text("aaaaa")
        await expect(visit.answers.locator(".pass")).to_have_count(0)


async def test_passes_of_the_oldest_go_first() -> None:
    async with serving([[97], [EOS]]) as server, browsing(server.app) as visit:
        await visit.answer("first")
        await visit.id("new-conversation").click()
        await visit.answer("second")
        await visit.id("new-conversation").click()
        lengths = await visit.page.evaluate("Object.entries(localStorage).map((entry) => entry.join('').length)")
        await visit.page.evaluate(
            """(room) => {
                const setItem = Storage.prototype.setItem;
                Storage.prototype.setItem = function (key, text) {
                    const others = Object.entries(this).filter(([name]) => name !== key).flat().join("").length;
                    if (others + key.length + text.length > room) throw new DOMException("full", "QuotaExceededError");
                    setItem.call(this, key, text);
                };
            }""",
            sum(lengths) + max(lengths) - 50,
        )
        await visit.answer("third")
        kept = await visit.page.evaluate(KEPT)
        with_passes = {each["title"]: any(one.get("groups") for one in each["messages"]) for each in kept}
        assert with_passes == {"first": False, "second": True, "third": True}
        await listed(visit.page).nth(2).click()
        await expect(visit.answers.locator(".passes")).to_have_text("a")  # here they are still known
