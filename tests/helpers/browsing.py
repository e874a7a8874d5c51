"""The playground in a real headless Chromium, and everything that goes wrong in it while a test looks.

async with browsing(server.app) as visit:   a page of its own, without cookies or storage, open at the server's /
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from fastapi import FastAPI
from playwright.async_api import ConsoleMessage, Locator, Page, async_playwright, expect

from host.browser import OPTIONS, chromium
from serving import on_port

# It knows the models, or asks for a key.
_READY = '#model option:not([value=""]), #key-dialog[open]'


@dataclass
class Visit:
    """One open page. `expected`: what a test wants the console to tell of; anything else fails it."""

    page: Page
    url: str
    expected: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def id(self, name: str) -> Locator:
        return self.page.locator(f"#{name}")

    @property
    def answers(self) -> Locator:
        return self.page.locator("article.answer")

    async def send(self, text: str) -> Locator:
        """Type a message and send it; returns its answer, which may still grow."""
        count = await self.answers.count()
        await self.id("prompt").fill(text)
        await self.id("prompt").press("Enter")
        return self.answers.nth(count)

    async def answer(self, text: str) -> Locator:
        """Send a message, and wait for the end of its answer."""
        answer = await self.send(text)
        await self.page.wait_for_selector("article.answer")
        await self.ended()
        return answer

    async def ended(self) -> None:
        """No answer grows any more."""
        await self.id("send").wait_for(state="visible")

    async def view(self, name: str) -> None:
        await self.page.locator(f'nav a[href="#{name}"]').click()
        await self.id(f"view-{name}").wait_for(state="visible")

    def unexpected(self) -> list[str]:
        return [told for told in self.problems if not any(re.search(pattern, told) for pattern in self.expected)]


@asynccontextmanager
async def browsing(
    app: FastAPI, *, path: str = "/", width: int = 1280, height: int = 800, dark: bool = False
) -> AsyncIterator[Visit]:
    """The app on a port, and its page. Fails at the end if the console told of anything, or another host was asked."""
    async with (
        on_port(app) as number,
        visiting(f"http://127.0.0.1:{number}", path, width, height, dark) as visit,
    ):
        yield visit


@asynccontextmanager
async def visiting(
    url: str, path: str = "/", width: int = 1280, height: int = 800, dark: bool = False
) -> AsyncIterator[Visit]:
    """The page of a server that runs."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium(), args=list(OPTIONS))
        context = await browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            accept_downloads=True,
            permissions=["clipboard-read", "clipboard-write"],
        )
        page = await context.new_page()
        page.set_default_timeout(20_000)
        expect.set_options(timeout=20_000)
        visit = Visit(page, url)

        def hear(told: ConsoleMessage) -> None:
            if told.type in ("error", "warning"):
                visit.problems.append(told.text)

        page.on("console", hear)
        page.on("pageerror", lambda error: visit.problems.append(f"page error: {error}"))

        def note(address: str) -> None:
            parts = urlsplit(address)
            if parts.scheme not in ("blob", "data") and f"{parts.scheme}://{parts.netloc}" != url:
                visit.problems.append(f"another host was asked: {address}")

        page.on("request", lambda request: note(request.url))
        await page.goto(url + path)
        await page.wait_for_selector(_READY, state="attached")
        yield visit
        assert not visit.unexpected(), visit.unexpected()
        await browser.close()
