"""What a web page may send: JSON that is called JSON, and from an origin that is this server's or allowed."""

from __future__ import annotations

from typing import Any

import pytest

from serving import COMPLETIONS, error_of, serving

BODY = b'{"prompt": "a", "max_tokens": 1}'
JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "application/json; charset=utf-8", "APPLICATION/JSON ;a=b", "application/merge-patch+json"],
)
async def test_json_may_be_called_so_in_several_ways(content_type: str) -> None:
    async with serving([[97]]) as server:
        response = await server.client.post(COMPLETIONS, content=BODY, headers={"Content-Type": content_type})
    assert response.status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "headers",
    [{}, *({"Content-Type": name} for name in ("text/plain", "application/x-www-form-urlencoded", "text/x+json"))],
)
async def test_what_a_page_may_send_unasked_is_a_415(path: str, headers: dict[str, str]) -> None:
    async with serving() as server:
        response = await server.client.post(path, content=BODY, headers=headers)
        assert (response.status_code, error_of(response)["param"]) == (415, "Content-Type")
        assert "application/json" in error_of(response)["message"]
        assert server.runner.num_steps == 0


@pytest.mark.parametrize(
    ("allowed", "headers", "status"),
    [
        ([], {}, 200),
        ([], {"Origin": "http://server"}, 200),  # its own page
        ([], {"Origin": "http://evil.example"}, 403),
        ([], {"Origin": "http://server:81"}, 403),
        ([], {"Origin": "null"}, 403),
        ([], {"Origin": "http://["}, 403),
        # Behind a proxy the host is another; the browser knows better.
        ([], {"Origin": "https://chat.example", "Sec-Fetch-Site": "same-origin"}, 200),
        ([], {"Origin": "http://server", "Sec-Fetch-Site": "cross-site"}, 403),
        ([], {"Sec-Fetch-Site": "same-site"}, 403),
        ([], {"Sec-Fetch-Site": "none"}, 200),
        (["https://chat.example"], {"Origin": "https://chat.example", "Sec-Fetch-Site": "cross-site"}, 200),
        (["https://chat.example"], {"Origin": "https://other.example"}, 403),
        (["*"], {"Origin": "https://other.example", "Sec-Fetch-Site": "cross-site"}, 200),
    ],
)
async def test_pages_of_other_origins_are_refused(allowed: list[str], headers: dict[str, str], status: int) -> None:
    settings: dict[str, Any] = {"cors_origin": ",".join(allowed)} if allowed else {}
    async with serving([[97]], settings=settings) as server:
        for path, body in ((COMPLETIONS, BODY), ("/tokenize", b'{"prompt": "a"}')):
            response = await server.client.post(path, content=body, headers={**JSON, **headers})
            assert response.status_code == status
            if status == 403:
                assert error_of(response)["code"] == "origin_not_allowed"
                assert "cors_origin" in error_of(response)["message"]
        assert (await server.client.get("/v1/models", headers=headers)).status_code == 200  # a page cannot read it
