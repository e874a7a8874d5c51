"""Certificates and API keys that are read anew while the server serves, and what SIGHUP means."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest

from hamburger.engine.logs import BackgroundHandler
from hamburger.server import exits
from hamburger.server.api.auth import ApiKeys
from hamburger.server.config import ServeSettings, SettingsError
from hamburger.server.exits import Hangup, Terminated
from hamburger.server.operation import rotation
from hamburger.server.operation.rotation import Certificate, RotatedFiles, rotate
from hamburger.server.serve import _rotated_files
from serving import on_port, serving

TLS = Path(__file__).parents[1] / "data" / "tls"
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def put(source: Path, target: Path) -> None:
    """As who renews a certificate does it: whole, and at once."""
    beside = target.with_suffix(".new")
    beside.write_bytes(source.read_bytes())
    beside.replace(target)


@pytest.fixture
def settings(tmp_path: Path) -> ServeSettings:
    put(TLS / "cert.pem", tmp_path / "cert.pem")
    put(TLS / "key.pem", tmp_path / "key.pem")
    return ServeSettings(ssl_certfile=tmp_path / "cert.pem", ssl_keyfile=tmp_path / "key.pem")


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    yield reader, writer
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


def certificate_shown(writer: asyncio.StreamWriter) -> str:
    return ssl.DER_cert_to_PEM_cert(writer.get_extra_info("ssl_object").getpeercert(True))


async def test_new_connections_are_shown_the_renewed_certificate_and_old_ones_go_on(
    settings: ServeSettings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate = Certificate(settings)
    files = RotatedFiles("the certificate", certificate.paths, certificate.read)
    async with (
        serving() as served,
        on_port(served.app, certificate=certificate) as port,
        connected(port) as (reader, writer),
    ):
        first = certificate_shown(writer)
        assert first in (TLS / "cert.pem").read_text()
        put(TLS / "renewed.pem", tmp_path / "cert.pem")  # its key is not there yet
        assert not files.read()
        assert "What was read before stays, as the certificate cannot be used" in caplog.text
        async with connected(port) as (_, other):
            assert certificate_shown(other) == first
        put(TLS / "renewed.pem", tmp_path / "key.pem")
        assert files.read()
        async with connected(port) as (_, other):
            assert certificate_shown(other) in (TLS / "renewed.pem").read_text()
        writer.write(HEALTH)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")


def test_files_are_read_when_they_have_changed_and_rest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, found = tmp_path / "keys", list[str]()

    def load() -> None:
        try:
            found.append(file.read_text())
        except OSError as error:
            raise SettingsError("gone") from error

    file.write_text("a")
    files = RotatedFiles("a file", [file], load)
    assert not files.look()
    for text in ("b1", "b12"):  # being written
        file.write_text(text)
        assert not files.look()
    assert found == ["a"]
    assert files.look()
    assert not files.look()
    file.unlink()
    assert [files.look() for _ in range(4)] == [False] * 4
    assert caplog.text.count("What was read before stays, as a file cannot be used: gone") == 1
    file.write_text("c")
    assert [files.look(), files.look()] == [False, True]
    assert found == ["a", "b12", "c"]
    assert files.read()  # whether it has changed or not
    assert found == ["a", "b12", "c", "c"]


async def test_all_are_read_when_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation, "_LOOK_SECONDS", 3600.0)
    asked, said, read = asyncio.Event(), asyncio.Queue[str](), list[str]()
    files = [RotatedFiles(name, [], lambda name=name: read.append(name)) for name in ("one", "two")]  # type: ignore[misc]
    task = asyncio.create_task(rotate(files, asked, said.put_nowait))
    asked.set()
    assert [await said.get(), await said.get()] == ["one was read anew", "two was read anew"]
    assert read == ["one", "two"] * 2
    task.cancel()


async def test_who_asks_while_files_are_read_has_all_of_them_read_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation, "_LOOK_SECONDS", 3600.0)
    asked, said, loop = asyncio.Event(), asyncio.Queue[str](), asyncio.get_running_loop()
    times = list[str]()

    def load() -> None:
        times.append("two")
        if len(times) == 2:  # at the first reading that was asked for
            loop.call_soon_threadsafe(asked.set)

    files = [RotatedFiles("one", [], lambda: None), RotatedFiles("two", [], load)]
    task = asyncio.create_task(rotate(files, asked, said.put_nowait))
    asked.set()
    async with asyncio.timeout(20):
        assert [await said.get() for _ in range(4)] == ["one was read anew", "two was read anew"] * 2
    task.cancel()


def test_keys_are_replaced_and_all_stay_masked(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("first-secret\n")
    settings = ServeSettings(api_key=["of-the-command-line"], api_key_file=file)
    keys, handler = ApiKeys(), BackgroundHandler()
    try:
        [files] = _rotated_files(settings, keys, None, handler)
        assert [key for key, _ in keys.known] == [b"of-the-command-line", b"first-secret"]
        file.write_text("second-secret\n")
        assert files.read()
        assert [key for key, _ in keys.known] == [b"of-the-command-line", b"second-secret"]
        file.write_text("# none\n")
        assert not files.read()
        assert [key for key, _ in keys.known] == [b"of-the-command-line", b"second-secret"]
        record = logging.makeLogRecord({"msg": "first-secret second-secret of-the-command-line"})
        assert handler.format(record).endswith("*** *** ***")
    finally:
        handler.close()


async def test_a_key_that_was_replaced_opens_nothing() -> None:
    keys = ApiKeys(["old"])
    async with serving(keys=keys) as served:

        async def status(key: str) -> int:
            answer: httpx.Response = await served.client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
            return answer.status_code

        assert [await status("old"), await status("new")] == [200, 401]
        keys.replace(["new"])
        assert [await status("old"), await status("new")] == [401, 200]


CHILD = """
import fcntl, os, signal, sys, termios
from hamburger.server.exits import Hangup, Terminated
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that its hangup is told
signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[2] == "outlives" else signal.SIG_DFL)
hangup, told = Hangup(), int(sys.argv[1])

def on_signal(*given):
    hangup.on_signal(*given)
    os.write(told, b"asked\\n")  # a print could be in another

signal.signal(signal.SIGHUP, on_signal)
try:
    os.write(told, b"ready\\n")
    while True:
        signal.pause()
except Terminated:
    sys.exit(7)
"""


@pytest.mark.parametrize("kind", ["ends with it", "outlives"])
def test_a_server_ends_with_its_terminal_unless_it_is_to_outlive_it(kind: str) -> None:
    """And any other SIGHUP ends none."""
    master, slave = os.openpty()
    told, tell = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tell), kind],
        stdin=slave, stdout=slave, stderr=slave, pass_fds=[tell], start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    os.close(tell)
    with os.fdopen(told) as lines:
        try:
            assert lines.readline() == "ready\n"
            child.send_signal(signal.SIGHUP)
            assert lines.readline() == "asked\n"
            os.close(master)
            assert lines.readline() == ("asked\n" if kind == "outlives" else "")
            if kind != "outlives":
                assert child.wait(60) == 7
        finally:
            child.kill()
            child.wait()


def test_a_terminal_ends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell and the kernel both send the signal."""
    terminals = iter([True, True, False, False])
    monkeypatch.setattr(exits, "_has_terminal", lambda: next(terminals))
    hangup = Hangup()
    hangup.on_signal(signal.SIGHUP, None)
    with pytest.raises(Terminated):
        hangup.on_signal(signal.SIGHUP, None)
    hangup.on_signal(signal.SIGHUP, None)


@pytest.mark.parametrize("kind", ["none", "closed"])
def test_without_standard_streams_no_terminal_goes(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    stream = io.StringIO() if kind == "closed" else None
    if stream is not None:
        stream.close()
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream)
    assert not Hangup().is_an_end()
