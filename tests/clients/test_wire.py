"""Bytes of a stream -> events, and failures -> one line with a remedy."""

from __future__ import annotations

import argparse
import errno
import re
import socket
import threading

import httpx
import pytest

from hamburger.clients.arguments import list_of, positive, server_url, unit_interval, whole, whole_to
from hamburger.clients.connection import check_answer, check_stream, client_options, first_model, transport_error
from hamburger.clients.figures import Answer
from hamburger.clients.wire import RequestError, StreamDecoder, Usage
from scripted_server import ScriptedServer, drafting_stream, hamburger_stream, plain_stream, sse


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10_000])
def test_any_cut_of_the_bytes_gives_the_same_events(size: int) -> None:
    stream = b": ping\n\nevent: x\n" + b"".join(
        hamburger_stream([("Gr\u00fc\u00dfe \U0001f354", 3), ("\u65e5\u672c", 2)])
    )
    decoder = StreamDecoder()
    events = [event for i in range(0, len(stream), size) for event in decoder.feed(stream[i : i + size])]
    events += decoder.close()
    assert "".join(event.text for event in events) == "Gr\u00fc\u00dfe \U0001f354\u65e5\u672c"
    assert [event.token_ids for event in events] == [[0, 1, 2], [0, 1], None]
    assert [event.group_index for event in events] == [0, 1, None]
    assert events[1].finish_reason == "stop"
    assert events[2].usage == Usage(5, 5, 2)


def test_crlf_and_a_last_line_without_its_end() -> None:
    decoder = StreamDecoder()
    events = decoder.feed(
        b'data:{"choices":[{"text":"a"}]}\r\n\r\ndata: {"choices":[{"text":"b","finish_reason":"stop"}]}'
    )
    events += decoder.close()
    assert [event.text for event in events] == ["a", "b"]


def test_roles_and_usage_are_no_output_but_a_finish_is() -> None:
    decoder = StreamDecoder()
    events = decoder.feed(b"".join(plain_stream(["a"])) + sse({"choices": [{"delta": {"content": "after the end"}}]}))
    assert [event.carries_output for event in events] == [False, True, True]


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (sse({"choices": [{"delta": {"content": "a"}}]}), "the stream ended before the answer did"),
        (b"", "the stream ended before the answer did"),
        (sse({"error": {"message": "the engine died", "code": 500}}), "error in the stream: the engine died"),
        (b'event: error\ndata: {"message": "too long", "type": "x"}\n', "error in the stream: too long"),
        (b'event: error\r\ndata: {"error": {"message": "busy"}}\r\n', "error in the stream: busy"),
        (b'event: error\ndata: "odd"\n', "error in the stream: odd"),
        (sse({"object": "error", "message": "filtered", "code": 400}), "error in the stream: filtered"),
        (sse({"choices": []}) + b"data: [DONE]\n", "the answer has no tokens"),
        (b"data: <html>\n", "an event that makes no sense: <html>"),
        (sse({"choices": ["odd"]}), "makes no sense"),
        (sse({"choices": [{"delta": {"content": [{"type": "text", "text": "a"}]}}]}), "makes no sense"),
        (sse({"choices": [{"delta": {"content": 7}}]}), "makes no sense"),
        (sse({"choices": [{"delta": {"reasoning_content": {}}}]}), "makes no sense"),
        (sse({"choices": [{"text": True}]}), "makes no sense"),
        (sse({"choices": [{"text": "a", "finish_reason": 1}]}), "makes no sense"),
        (sse({"choices": [{"text": "a", "group": {"token_ids": 3}}]}), "makes no sense"),
        (sse({"choices": [{"text": "a", "group": {"drafted": "abc"}}]}), "makes no sense"),
        (sse({"choices": [{"text": "a", "group": {"accepted": "1"}}]}), "makes no sense"),
        (sse({"choices": [], "usage": {"completion_tokens": "6"}}), "makes no sense"),
        (sse({"choices": [], "usage": {"kv_slots": -1}}), "makes no sense"),
        (sse({"choices": [], "usage": {"prompt_tokens": 10**400}}), "makes no sense"),
        (sse({"choices": [], "usage": {"prompt_tokens": 1.5}}), "makes no sense"),
        (b"data: " + b"[" * 100_000 + b"\n", "makes no sense"),
    ],
)
def test_a_bad_stream_is_a_request_error(stream: bytes, reason: str) -> None:
    def read() -> None:
        decoder = StreamDecoder()
        decoder.feed(stream)
        decoder.close()

    with pytest.raises(RequestError, match=reason):
        read()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"error": {"message": "too\\nlong", "param": "messages"}}', "HTTP 400: too long"),
        (b'{"error": "plain text"}', "HTTP 400: plain text"),
        (b'{"detail": "Not Found"}', "HTTP 400: {'detail': 'Not Found'}"),
        (b"[1]", "HTTP 400: [1]"),
        (b"gateway", "HTTP 400: gateway"),
        (b"", "HTTP 400: Bad Request"),
    ],
)
def test_an_error_of_any_shape_gives_its_message_in_one_line(content: bytes, reason: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_answer(httpx.Response(400, content=content))
    assert caught.value.reason == reason


def test_a_redirect_names_where_to() -> None:
    request = httpx.Request("POST", "http://s/v1/chat/completions")
    moved = httpx.Response(301, headers={"location": "https://s/v1/chat/completions"}, request=request)
    with pytest.raises(RequestError, match=r"has moved to https://s/v1/chat/completions\. .*--url"):
        check_stream(moved)


def test_what_a_server_says_moves_no_cursor() -> None:
    said = "\x1b]0;title\x07\x1b[2Jred \x9b31malert\u202e \ud83d end"
    assert RequestError(f"HTTP 500: {said}", "Wait.").args == ("HTTP 500: ]0;title[2Jred 31malert end. Wait.",)


def test_a_model_whose_name_cannot_be_shown_is_none(server: ScriptedServer) -> None:
    server.models = {"data": [{"id": "\x1b[2Jtiny"}]}
    with httpx.Client(base_url=server.url) as client, pytest.raises(RequestError, match="lists no model"):
        first_model(client)


@pytest.mark.parametrize("several", [False, True])
def test_too_many_open_files_are_not_the_server_s_fault(several: bool) -> None:
    cause: Exception = OSError(errno.EMFILE, "Too many open files")
    if several:  # addresses that were tried
        cause = ExceptionGroup("all failed", [OSError(errno.ECONNREFUSED, "refused"), cause])
    error = httpx.ConnectError("All connection attempts failed")
    error.__context__ = OSError("All connection attempts failed")
    error.__context__.__cause__ = cause
    told = transport_error(error, httpx.URL("http://s:1"))
    assert told.reason == "too many open files: lower --concurrency or raise `ulimit -n`"


def test_the_remedy_is_for_people_and_not_part_of_the_reason() -> None:
    with pytest.raises(RequestError) as caught:
        check_answer(httpx.Response(401, json={"error": {"message": "Wrong key."}}))
    assert caught.value.reason == "HTTP 401: Wrong key."
    assert str(caught.value) == "HTTP 401: Wrong key. Give the server's key with --api-key or HAMBURGER_API_KEY."


@pytest.mark.parametrize("text", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_a_url_is_taken_with_and_without_its_version(text: str) -> None:
    assert server_url(text) == "http://h:1"


@pytest.mark.parametrize("text", ["localhost:8000", "8000", "", "ftp://h", "http://", "http://h:port"])
def test_what_is_no_url_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        server_url(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http://h:99999", "has a port that none can be: write one from 1 to 65535"),
        ("http://h:0", "has a port"),
        ("http://h:-1", "has a port"),
        ("http://name:word@h", "a user's name, a password"),
        ("http://h?key=1", "a ?query and a #fragment are refused"),
        ("http://h/v1#top", "a ?query and a #fragment are refused"),
        ("http://h ", "holds a space"),
        ("http://h/a b", "holds a space"),
        ("http://h\n", "holds a space or another character"),
        ("http://a..b", "is not a URL: "),
        (f"http://{'a' * 64}.org", "is not a URL: "),
        ("http://xn--a", "is not a URL: "),
        ("http://\u2603.com", "is not a URL: "),
    ],
)
def test_a_url_that_no_request_could_use_is_named_with_a_remedy(text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=re.escape(message)) as told:
        server_url(text)
    assert "write" in str(told.value)


@pytest.mark.parametrize(
    "text", ["http://h:65535", "https://b\u00fccher.example/proxy", "http://[::1]:8000", "http://my_host"]
)
def test_odd_urls_of_servers_are_taken(text: str) -> None:
    assert server_url(text) == text


def test_numbers_out_of_range_are_refused() -> None:
    assert list_of(unit_interval)("0, 0.5,1") == [0, 0.5, 1]
    assert whole("0") == 0
    assert whole_to(3)("3") == whole_to(3, least=0)("3") == 3
    for text in ("4", "0", "9" * 5000):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number from 1 to 3"):
            whole_to(3)(text)
    for parse, text in ((unit_interval, "1.1"), (unit_interval, "nan"), (unit_interval, "x"), (positive, "0")):
        with pytest.raises(argparse.ArgumentTypeError):
            parse(text)
    for text in ("-1", "1.5", ""):
        with pytest.raises(argparse.ArgumentTypeError):
            whole(text)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "[::1]", "localhost", "a.localhost", "0.0.0.0", "[::]"])
def test_an_address_of_this_machine_goes_around_the_proxies(host: str) -> None:
    assert client_options(f"http://{host}:8000", None, 1)["trust_env"] is False


@pytest.mark.parametrize(
    ("bypassed", "through"), [("", " through the proxy of the environment, 127.0.0.1:9"), ("*", "")]
)
def test_a_proxy_that_does_not_answer_is_named(bypassed: str, through: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://user:secret@127.0.0.1:9")
    monkeypatch.setenv("no_proxy", bypassed)
    told = transport_error(httpx.ConnectError("refused"), httpx.URL("http://far.example:1"))
    assert told.reason == f"cannot connect to http://far.example:1{through}"


def test_others_go_through_them_and_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAMBURGER_API_KEY", "from-env,another")
    remote = client_options("https://example.org", None, 1)
    assert remote["trust_env"] is True
    assert remote["headers"]["Authorization"] == "Bearer from-env"
    assert client_options("https://example.org", "given", 1)["headers"]["Authorization"] == "Bearer given"


def test_https_with_a_server_that_speaks_http_says_so(server: ScriptedServer) -> None:
    url = server.url.replace("http://", "https://")
    told = pytest.raises(RequestError, match=r"no HTTPS with https://.*begins with http://")
    with httpx.Client(**client_options(url, None, 10)) as client, told:
        first_model(client)


@pytest.mark.parametrize("said", [b"", b"\x15\x03\x01\x00\x02\x02\x46"])  # an alert of TLS
def test_http_with_a_server_that_speaks_https_says_so(said: bytes) -> None:
    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(9999)
            connection.sendall(said)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=[listener])
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        message = rf"{url} ended the connection without an answer in HTTP\. .*begins with https://"
        told = pytest.raises(RequestError, match=message)
        with httpx.Client(**client_options(url, None, 10)) as client, told:
            first_model(client)
        thread.join()


def test_drafts_of_a_group_and_macro_steps_are_read() -> None:
    decoder = StreamDecoder()
    events = [event for chunk in drafting_stream() for event in decoder.feed(chunk)] + decoder.close()
    assert [(event.num_drafted, event.num_accepted) for event in events] == [(None, 0), (3, 2), (2, 1), (None, 0)]
    assert events[-1].usage == Usage(5, 6, 6, 3)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_have_two_names(name: str) -> None:
    [event] = StreamDecoder().feed(sse({"choices": [{"delta": {name: "Hm."}}]}))
    assert (event.thought, event.text, event.carries_output) == ("Hm.", "", True)


def test_only_the_event_behind_its_name_is_an_error() -> None:
    [event] = StreamDecoder().feed(b"event: error\nevent: message\n" + sse({"choices": [{"text": "a"}]}))
    assert event.text == "a"


def test_tokens_of_the_prefix_cache_are_read() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}
    [event] = StreamDecoder().feed(sse({"choices": [], "usage": usage}))
    assert event.usage == Usage(9, 2, None, cached_tokens=8)


def test_counts_may_be_written_as_floats_and_of_zero_the_events_count() -> None:
    usage = {"prompt_tokens": 9.0, "completion_tokens": 0}
    answer = Answer(0.0)
    for event in StreamDecoder().feed(sse({"choices": [{"text": "a"}]}) + sse({"choices": [], "usage": usage})):
        answer.add(event, 1.0)
    assert answer.usage == Usage(9, 0, None)
    assert (answer.completion_tokens, answer.counted_by) == (1, "events")


def test_a_media_type_has_no_case() -> None:
    request = httpx.Request("POST", "http://s/v1/chat/completions")
    check_stream(httpx.Response(200, headers={"content-type": "Text/Event-Stream"}, request=request))


def test_json_that_is_nested_deeply_is_no_list_of_models() -> None:
    deep = httpx.Response(200, content=b"[" * 100_000, request=httpx.Request("GET", "http://s/v1/models"))
    transport = httpx.MockTransport(lambda request: deep)
    with (
        httpx.Client(transport=transport, base_url="http://s") as client,
        pytest.raises(RequestError, match="no model"),
    ):
        first_model(client)
    with pytest.raises(RequestError, match="HTTP 500"):
        check_answer(httpx.Response(500, content=b"[" * 100_000))
