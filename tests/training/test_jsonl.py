"""JSON Lines: what is read, and a file that survives its writer."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hamburger.training.corpus.jsonl import GrowingFile, Row, check_own, ids_of, read_rows, text_of
from hamburger.training.errors import TrainingError


def test_rows_of_plain_and_gzipped_files(tmp_path: Path) -> None:
    text = '{"a": 1}\n\n{"a": "ü"}\n'
    plain, zipped = tmp_path / "x.jsonl", tmp_path / "x.jsonl.gz"
    plain.write_text(text, encoding="utf-8")
    zipped.write_bytes(gzip.compress(text.encode()))
    for path in (plain, zipped):
        assert list(read_rows(path)) == [Row(f"{path}, line 1", 1, {"a": 1}), Row(f"{path}, line 3", 3, {"a": "ü"})]


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path, suffix: str) -> None:
    path, data = tmp_path / f"x.{suffix}", b'\xef\xbb\xbf{"a": 1}\r\n{"a": 2}\r\n'
    path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    assert [row.values for row in read_rows(path)] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": 1}\n{"a": ', "line 2 is not valid JSON"),
        (b"[1]\n", "line 1 is not a JSON object"),
        (b'{"a": "\xff"}\n', "line 1 is not valid JSON"),
        (b'{"a": 1}\n{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "line 2 is nested too deeply to be read"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(data)
    with pytest.raises(TrainingError, match=message):
        list(read_rows(path))


@pytest.mark.parametrize(
    "data", [b"no gzip", gzip.compress(b'{"a": 1}\n' * 99)[:-12]], ids=["not gzip", "cut off"]
)  # named: a gzip header holds the time, and each process collects the tests by itself
def test_a_broken_gzip_file_is_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(data)
    with pytest.raises(TrainingError, match=r"x\.jsonl\.gz is not a whole gzip file"):
        list(read_rows(path))


def test_fields_are_checked() -> None:
    row = Row("f, line 1", 1, {"text": "a", "ids": [1, 2], "bad": [1, True], "negative": [-1]})
    assert text_of(row, "text") == "a"
    assert ids_of(row, "ids") == [1, 2]
    assert ids_of(row, "none") is None
    with pytest.raises(TrainingError, match='f, line 1: "none" must be a text, not missing'):
        text_of(row, "none")
    for key in ("text", "bad", "negative"):
        with pytest.raises(TrainingError, match=f'"{key}" must be a list of token ids'):
            ids_of(row, key)


def test_half_of_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(r'{"a": "\ud83c\udf54", "b": "no \ud800", "c": "\udc00"}')
    [row] = read_rows(path)  # what nobody asks for may be anything
    assert text_of(row, "a") == "🍔"
    with pytest.raises(
        TrainingError, match=r'line 1: "b" has half of a surrogate pair \(\\ud800\) at character 3: rem'
    ):
        text_of(row, "b")
    with pytest.raises(TrainingError, match=r'line 1: "c" has half of a surrogate pair \(\\udc00\) at character 0'):
        text_of(row, "c")


@given(st.lists(st.text(), max_size=5), st.data())
def test_whatever_a_kill_leaves_whole_lines_stay(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("grow") / "x.jsonl"
    rows = [{"text": text} for text in texts]
    with GrowingFile(path) as file:
        for row in rows:
            file.append(row)
    written = path.read_bytes()
    cut = data.draw(st.integers(0, len(written)))
    path.write_bytes(written[:cut])
    with GrowingFile(path) as file:
        file.append({"text": "new"})
    whole = written[:cut].count(b"\n")
    assert [row.values for row in read_rows(path)] == [*rows[:whole], {"text": "new"}]


def test_a_torn_line_longer_than_one_read_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}\n' + b"x" * 200_000)
    GrowingFile(path).__exit__(None, None, None)
    assert path.read_bytes() == b'{"a": 1}\n'


def test_a_row_is_there_as_soon_as_it_is_appended(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.jsonl"
    with GrowingFile(path) as file:
        file.append({"a": 1})
        assert json.loads(path.read_text()) == {"a": 1}


def test_whose_file_it_is_tells_its_first_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    check_own(path, ("a", "b"), "it")
    for fine in (b"", b'{"a": 1, "b": 2, "c": 3}\n{}\n', b'{"a": 1, "b"'):  # the last was cut off
        path.write_bytes(fine)
        check_own(path, ("a", "b"), "it")
    for other in (b'{"a": 1}\n', b'{"a": 1}', b"[]\n", b"a text\n"):
        path.write_bytes(other)
        with pytest.raises(TrainingError, match=r"x\.jsonl was not written by it: move it away, or name"):
            check_own(path, ("a", "b"), "it")


def test_two_writers_are_told_apart(tmp_path: Path) -> None:
    with GrowingFile(tmp_path / "x.jsonl"), pytest.raises(TrainingError, match="another process"):
        GrowingFile(tmp_path / "x.jsonl")
    GrowingFile(tmp_path / "x.jsonl").__exit__(None, None, None)


def test_gzip_cannot_grow(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"leave \.gz out"):
        GrowingFile(tmp_path / "x.jsonl.gz")
