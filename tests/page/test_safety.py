"""Nothing that a model or a user writes runs or is loaded, and the page's policy would not let it."""

from __future__ import annotations

import pytest
from playwright.async_api import expect

from browsing import Visit, browsing
from fakes import EOS
from serving import ByChoice, serving

pytestmark = pytest.mark.page

ATTACKS = [
    "<script>window.pwned = 1</script>",
    '<img src="x" onerror="window.pwned = 1">',
    "[a](javascript:window.pwned=1)",
    "[a](JaVaScRiPt:window.pwned=1)",
    "[a](data:text/html,<script>window.pwned=1</script>)",
    '<svg onload="window.pwned = 1"></svg>',
    "![x](http://evil.example/pixel.png)",
    '![x](x"onerror="window.pwned=1)',
    "<iframe srcdoc='<script>parent.pwned = 1</script>'></iframe>",
    "```html\n<script>window.pwned = 1</script>\n```",
    "<a href='javascript:window.pwned=1'>click</a>",
    "<style>@import url(http://evil.example/x.css);</style>",
    "[x]: javascript:window.pwned=1\n[click][x]",
    "<javascript:window.pwned=1>",
]


async def unharmed(visit: Visit) -> None:
    """Click whatever looks like a link, then look for what must not be there."""
    for link in await visit.page.locator("article a").all():
        assert (await link.get_attribute("href") or "").startswith(("http:", "https:", "mailto:"))
    assert await visit.page.evaluate("window.pwned") is None
    found = await visit.page.evaluate(
        "[...document.querySelectorAll('article *')].filter(e => ['SCRIPT', 'IMG', 'IFRAME', 'STYLE', 'OBJECT', 'LINK']"
        ".includes(e.tagName) || [...e.attributes].some(a => a.name.startsWith('on'))).map(e => e.outerHTML)"
    )
    assert found == []


@pytest.mark.parametrize("attack", ATTACKS)
async def test_a_models_text_is_only_text(attack: str) -> None:
    groups = [list(attack.encode())[i : i + 4] for i in range(0, len(attack.encode()), 4)]
    async with serving(runner=ByChoice([*groups, [EOS]])) as server, browsing(server.app) as visit:
        answer = await visit.answer("hello")
        assert "".join(await answer.locator(".pass").all_inner_texts()) == attack
        await visit.page.get_by_label("text", exact=True).check()
        await unharmed(visit)
        await visit.page.reload()
        await expect(visit.answers).to_have_count(1)
        await unharmed(visit)


async def test_a_users_text_is_only_text() -> None:
    async with (
        serving([[97], [EOS]], max_model_len=4096, num_blocks=1024) as server,
        browsing(server.app) as visit,
    ):
        for attack in ATTACKS[:6]:
            await visit.answer(attack)
        written = await visit.page.locator("article.user .words").all_inner_texts()
        assert written == ATTACKS[:6]
        await unharmed(visit)
        titles = await visit.id("conversations").locator("li button:not(.remove)").all_inner_texts()
        assert titles == [ATTACKS[0]]


async def test_an_errors_text_is_only_text() -> None:
    async with serving([[97], [EOS]]) as server, browsing(server.app) as visit:
        visit.expected.append("Failed to load resource")
        await visit.page.evaluate(
            "name => { const s = document.querySelector('#model'); s.append(new Option(name)); s.value = name; }",
            "<img src=x onerror=window.pwned=1>",
        )
        answer = await visit.answer("hello")
        await expect(answer.get_by_role("alert")).to_contain_text("<img src=x onerror=window.pwned=1>")
        await unharmed(visit)


async def test_the_policy_stops_what_would_get_in() -> None:
    """Were there a hole, inline code, code of others, markup from text and addresses of others are refused."""
    async with serving([[EOS]]) as server, browsing(server.app) as visit:
        visit.expected += [
            "Content Security Policy",
            "Trusted(HTML|Script)",
            "another host was asked",
            "Failed to fetch",
        ]
        policy = (await server.client.get("/")).headers["content-security-policy"]
        assert "unsafe-inline" not in policy
        assert "unsafe-eval" not in policy
        run = visit.page.evaluate
        await run(
            "() => { const s = document.createElement('script'); try { s.textContent = 'window.pwned = 1';"
            " document.body.append(s); } catch {} }"
        )
        assert (
            await run("() => { try { document.body.innerHTML = 'x'; return true; } catch { return false; } }") is False
        )
        assert await run("fetch('http://evil.example/').then(() => true, () => false)") is False
        assert await run("window.pwned") is None
        await expect(visit.id("prompt")).to_be_visible()
