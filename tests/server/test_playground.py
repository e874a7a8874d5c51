"""The page at /: its files, what it tells browsers, and that it can be left out."""

from __future__ import annotations

import re

from hamburger.server.cli import build_parser
from hamburger.server.load_settings import load_settings
from hamburger.server.playground import STATIC
from serving import serving


async def test_the_page_and_every_file_that_it_names_are_served_without_a_key() -> None:
    async with serving(settings={"api_key": "k"}) as server:
        page = await server.client.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        named = set(re.findall(r'(?:href|src)="(playground/[^"]+)"', page.text))
        scripts = {f"playground/{path.relative_to(STATIC).as_posix()}" for path in STATIC.rglob("*.*js")}
        for path in named | scripts:
            answer = await server.client.get(f"/{path}")
            assert answer.status_code == 200
            assert answer.headers["x-content-type-options"] == "nosniff"
            kind = {"js": "text/javascript", "mjs": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
            assert answer.headers["content-type"].startswith(kind[path.rpartition(".")[2]])
        assert len(named) > 5
        assert (await server.client.get("/v1/models")).status_code == 401


async def test_its_policy_allows_no_inline_code_and_no_other_server() -> None:
    async with serving() as server:
        answers = [await server.client.get(path) for path in ("/", "/playground/app.js", "/playground/page.css")]
    for answer in answers:
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert policy["script-src"] == policy["connect-src"] == policy["style-src"] == "'self'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["x-frame-options"] == "DENY"


def test_the_page_names_nothing_of_other_servers_and_has_no_inline_code() -> None:
    page = (STATIC / "index.html").read_text()
    assert not re.findall(r"""(?:href|src)=["'](?:https?:)?//""", page)
    assert not re.findall(r"<style|\bstyle=|\bon\w+=|<script(?![^>]*\bsrc=)", page)
    for script in STATIC.glob("*.js"):
        text = script.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            script
        )
        assert not re.search(r"https?://(?!www\.w3\.org/)", text), script


async def test_unchanged_files_are_not_sent_twice() -> None:
    async with serving() as server:
        first = await server.client.get("/playground/app.js")
        again = await server.client.get("/playground/app.js", headers={"If-None-Match": first.headers["etag"]})
        head = await server.client.head("/")
        other = await server.client.get("/", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert (head.status_code, head.content) == (200, b"")
    assert other.status_code == 200


async def test_only_its_files_are_served() -> None:
    async with serving() as server:
        for path in (
            "../app.py",
            "%2e%2e/app.py",
            "vendor/../../app.py",
            "vendor/README.md",
            "",
            "vendor",
            "/etc/passwd",
        ):
            assert (await server.client.get(f"/playground/{path}")).status_code == 404
        assert (await server.client.post("/")).status_code == 405


async def test_it_can_be_left_out() -> None:
    async with serving(settings={"playground": False}) as server:
        for path in ("/", "/playground/app.js"):
            assert (await server.client.get(path)).status_code == 404
        assert (await server.client.get("/health")).status_code == 200
    given = vars(build_parser().parse_args(["serve", "--no-playground"]))
    assert not load_settings({"playground": given["playground"]}).playground


async def test_it_is_no_part_of_the_api() -> None:
    async with serving() as server:
        paths = (await server.client.get("/openapi.json")).json()["paths"]
    assert not [path for path in paths if path == "/" or path.startswith("/playground")]
