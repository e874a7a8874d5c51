"""Log lines: their two formats, what nobody can forge in them, secrets, and readers that do not read."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from async_engine import collect
from fakes import ByteTokenizer
from hamburger.engine.async_engine import AsyncEngine
from hamburger.engine.logs import BackgroundHandler, JsonFormatter, TextFormatter, configure_logging, escaped
from hamburger.engine.request import GenerationRequest
from hamburger.engine.types.errors import EngineDead
from hamburger.engine.types.sampling_params import SamplingParams
from processes import host_of, let_workers_find_builders

FORGED = 'x\n2026-01-01T00:00:00.000Z ERROR hamburger: forged\r\x1b[2J\u2028\u202e"} {"level": "error'


def record(message: str = "told", level: int = logging.INFO, error: BaseException | None = None, **fields: Any) -> Any:
    info = None if error is None else (type(error), error, error.__traceback__)
    made = logging.LogRecord("hamburger.x", level, "file.py", 1, message, (), info)
    made.fields = fields
    return made


def failure(message: str) -> ValueError:
    try:
        raise ValueError(message)
    except ValueError as error:
        return error


def test_a_line_for_people() -> None:
    line = TextFormatter().format(record(tokens=3, seconds=0.5, stream=True, model="a b", param=None, empty=""))
    time, rest = line.split(" ", 1)
    assert time.endswith("Z")
    assert rest == 'INFO hamburger.x: told tokens=3 seconds=0.5 stream=true model="a b" empty=""'


def test_a_line_of_json_has_typed_values() -> None:
    told = json.loads(JsonFormatter().format(record(tokens=3, seconds=0.5, stream=True, param=None)))
    assert told.pop("time").endswith("Z")
    assert told == {
        "level": "info", "logger": "hamburger.x", "message": "told", "tokens": 3, "seconds": 0.5, "stream": True,
        "param": None,
    }  # fmt: skip


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_nobody_forges_a_line(formatter: logging.Formatter) -> None:
    text = formatter.format(record(FORGED, model=FORGED))
    assert text.isprintable()
    traceback = formatter.format(record("failed", error=failure(FORGED)))
    first, *further = traceback.splitlines()
    assert "failed" in first
    assert all(line.startswith("    ") and line.isprintable() for line in further)
    if isinstance(formatter, JsonFormatter):
        assert json.loads(text)["model"] == FORGED
        assert FORGED in json.loads(traceback)["traceback"]
        assert not further
    else:
        assert "ERROR hamburger: forged" not in [line[:20] for line in further]
        assert 'model="x\\n2026' in text  # quoted, so that its words are no fields


def test_a_field_cannot_pretend_to_be_two() -> None:
    line = TextFormatter().format(record(model="m status=200", path="a=b", user='q"'))
    assert line.endswith('model="m status=200" path="a=b" user="q\\""')


def test_only_what_cannot_be_seen_is_escaped() -> None:
    assert escaped("añ→ 7") == "añ→ 7"
    assert escaped("a\tb\x00\u202e") == "a\\tb\\x00\\u202e"


@pytest.mark.parametrize("formatter", [TextFormatter(["sk-öffentlich", "ab"]), JsonFormatter(["sk-öffentlich", "ab"])])
def test_secrets_are_masked_wherever_they_stand(formatter: logging.Formatter) -> None:
    text = formatter.format(
        record("key sk-öffentlich", header="Bearer sk-öffentlich", error=failure("about sk-öffentlich"))
    )
    assert "ffentlich" not in text
    assert text.count("***") == 3
    assert "about" in text  # too short a secret would spoil words


@pytest.fixture
def untouched_logging() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("hamburger")
    handlers, levels = list(root.handlers), (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


@pytest.mark.usefixtures("untouched_logging")
def test_levels_are_ours_and_others_never_debug() -> None:
    lines = io.StringIO()
    configure_logging("debug", "text", logging.StreamHandler(lines))
    for name in ("hamburger.server.x", "httpcore.http11"):
        logging.getLogger(name).debug("quiet %s", name)
        logging.getLogger(name).info("normal %s", name)
    assert [line.split(" ", 1)[1] for line in lines.getvalue().splitlines()] == [
        "DEBUG hamburger.server.x: quiet hamburger.server.x",
        "INFO hamburger.server.x: normal hamburger.server.x",
        "INFO httpcore.http11: normal httpcore.http11",
    ]
    configure_logging("error", "text", logging.StreamHandler(lines := io.StringIO()))
    logging.getLogger("hamburger.server.x").warning("not told")
    logging.getLogger("httpcore.http11").warning("not told")
    assert lines.getvalue() == ""


class Stuck(io.StringIO):
    """A reader that reads nothing until it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stuck = threading.Event()
        self.let = threading.Event()

    def write(self, text: str) -> int:
        self.is_stuck.set()
        assert self.let.wait(10)
        return super().write(text)


def test_whoever_logs_never_waits_for_a_reader() -> None:
    stream = Stuck()
    handler = BackgroundHandler(stream, max_waiting=3)
    handler.handle(record("0"))
    assert stream.is_stuck.wait(10)
    for i in range(1, 9):  # it would hang here; three wait, five are dropped
        handler.handle(record(str(i)))
    stream.let.set()
    while not handler.is_empty():
        threading.Event().wait(0.01)
    handler.handle(record("last"))
    handler.close()
    words = [line.split("hamburger.", 1)[1] for line in stream.getvalue().splitlines()]
    assert words == [
        "x: 0", "x: 1", "x: 2", "x: 3", "engine.logs: 5 log lines were dropped: nobody read them.", "x: last",
    ]  # fmt: skip


def test_a_reader_that_has_gone_stops_nobody() -> None:
    stream = io.StringIO()
    handler = BackgroundHandler(stream)
    stream.close()
    handler.handle(record("to nobody"))
    handler.close()


async def test_an_engine_whose_log_nobody_reads_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    let_workers_find_builders(monkeypatch)
    (reader, writer), kept = os.pipe(), os.dup(2)
    os.dup2(writer, 2)
    try:
        async with asyncio.timeout(20):
            engine = await AsyncEngine.launch(host_of("talkative"), ByteTokenizer())
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(writer)
    try:
        [stream] = engine.submit([GenerationRequest("a", [1], SamplingParams(max_tokens=3, seed=0, ignore_eos=True))])
        updates = await collect(stream)
        assert sum(len(update.token_ids) for update in updates) == 3
    finally:
        os.close(reader)
        await engine.shutdown(0)


async def test_why_an_engine_ended_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Though whoever hears of it ends the process at once."""
    let_workers_find_builders(monkeypatch)
    engine = await AsyncEngine.launch(host_of("raise"), ByteTokenizer())
    [stream] = engine.submit([GenerationRequest("a", [1], SamplingParams(seed=0, ignore_eos=True))])
    with pytest.raises(EngineDead):
        await collect(stream)
    await engine.shutdown(0)
    assert "ValueError: a broken kernel" in capfd.readouterr().err
