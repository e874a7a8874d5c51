"""Request ids, headers, CORS, keys from a file, and which doors they close."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fakes import EOS
from hamburger.server.config import ServeSettings, SettingsError
from serving import CHAT, COMPLETIONS, HELLO, serving


async def test_a_request_keeps_its_id_or_gets_one() -> None:
    async with serving([[65], [EOS]]) as server:
        for path, body in (
            (CHAT, {"messages": HELLO}),
            (CHAT, {"messages": HELLO, "stream": True}),
            (CHAT, {}),
            ("/x", {}),
        ):
            own = await server.post(path, body, headers={"X-Request-Id": "mine-7"})
            assert own.headers["x-request-id"] == "mine-7"
            new = [(await server.post(path, body)).headers["x-request-id"] for _ in range(2)]
            assert new[0] != new[1]
        for unusable in ("", "a b", "x" * 129):
            response = await server.client.get("/health", headers={"X-Request-Id": unusable})
            assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])


async def test_an_error_that_nobody_foresaw_has_all_headers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    async with serving(settings={"cors_origin": ["https://a.example"]}) as server:
        monkeypatch.setattr(server.metrics, "render", lambda: 1 / 0)
        monkeypatch.setattr("hamburger.server.api.errors.logger.exception", logged.append)
        response = await server.client.get("/metrics", headers={"X-Request-Id": "mine", "Origin": "https://a.example"})
    assert response.status_code == 500
    assert response.headers["access-control-allow-origin"] == "https://a.example"
    assert len(logged) == 1
    assert response.headers["x-request-id"] == "mine"
    assert "division" not in response.text


async def test_every_answer_says_what_browsers_must_not_do() -> None:
    async with serving([[65], [EOS]], settings={"api_key": "k"}) as server:
        answers = [await server.client.get(path) for path in ("/health", "/v1/models", "/x", "/docs")]
        headers = {"Authorization": "Bearer k"}
        for stream in (False, True):
            answers.append(await server.post(COMPLETIONS, {"prompt": "a", "stream": stream}, headers=headers))
    assert [answer.status_code for answer in answers] == [200, 401, 404, 200, 200, 200]
    for answer in answers:
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["cache-control"] in ("no-store", "no-cache")
        assert "server" not in answer.headers
        assert "access-control-allow-origin" not in answer.headers


async def test_cors_only_for_the_origins_that_are_set() -> None:
    headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    async with serving(settings={"cors_origin": "https://a.example, https://b.example"}) as server:
        allowed = await server.client.options(CHAT, headers=headers)
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        refused = await server.client.options(CHAT, headers={**headers, "Origin": "https://c.example"})
        assert "access-control-allow-origin" not in refused.headers
    async with serving() as server:
        assert "access-control-allow-origin" not in (await server.client.get("/health", headers=headers)).headers


async def test_keys_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("from-file \n# who has which\n\nanother\n", encoding="utf-8-sig")
    async with serving([[65], [EOS]], settings={"api_key_file": file, "api_key": "from-option"}) as server:
        for key, status in (("from-file", 200), ("another", 200), ("from-option", 200), ("# who has which", 401)):
            response = await server.post(COMPLETIONS, {"prompt": "a"}, headers={"Authorization": f"Bearer {key}"})
            assert response.status_code == status


@pytest.mark.parametrize("content", [None, "", "# nothing\n\n"])
def test_a_file_without_keys_opens_no_door(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SettingsError, match="api_key_file"):
        ServeSettings(api_key_file=file).api_keys()


async def test_operation_can_want_a_key_too() -> None:
    async with serving(settings={"api_key": "k", "public_operation": False}) as server:
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert (await server.client.get(path)).status_code == 401
            assert (await server.client.get(path, headers={"Authorization": "Bearer k"})).status_code == 200


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/images/generations", "/v1/audio/speech", "/v1/moderations"])
async def test_what_is_no_work_for_a_text_model_says_so(path: str) -> None:
    async with serving() as server:
        status, error = await server.refused(path, {"input": "a"})
    assert status == 404
    assert "without embeddings, images or audio" in error["message"]
