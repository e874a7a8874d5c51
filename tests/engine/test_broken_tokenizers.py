"""Files of tokenizers that are cut, damaged or hostile: each is read, or refused with a message that names the file."""

from __future__ import annotations

import contextlib
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from hamburger.engine.sampling_defaults import recommended_defaults
from hamburger.engine.text.gguf_tokenizer import read_gguf_chat, read_gguf_tokenizer
from hamburger.engine.text.tokenizer import Tokenizer
from hamburger.engine.text.tokenizer_files import with_own_end
from hamburger.engine.types.errors import TokenizerError
from hamburger.model.checkpoints.gguf_weights import read_gguf_config
from hamburger.model.checkpoints.sources import CheckpointError, ModelSource
from hamburger.model.config import ConfigError
from tokenizer_folders import copy_builtin

NESTED = "[" * 100_000


def small_gguf(path: Path, change: Callable[[gguf.GGUFWriter], None] = lambda writer: None, **tokens: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    given = {"list": ["a", "b", "ab", "<s>"], "types": [1, 1, 1, 3], "merges": ["a b"]} | tokens
    for name, value in given.items():
        getattr(writer, f"add_token_{name}")(value)
    writer.add_bos_token_id(3)
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_chat_template("{{ messages }}")
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    "tokens",
    [{"merges": ["a z"]}, {"merges": ["a"]}, {"list": ["a", "a"]}, {"list": [1, 2]}, {"merges": [1]}, {"types": ["x"]}],
)
def test_a_gguf_tokenizer_that_cannot_be_built_is_refused(tmp_path: Path, tokens: dict[str, Any]) -> None:
    with pytest.raises(TokenizerError, match=r"bad\.gguf"):
        read_gguf_tokenizer(small_gguf(tmp_path / "bad.gguf", **tokens))


@pytest.mark.parametrize("size", [0, 3, 30, 100, 300])
def test_a_gguf_file_that_is_cut_is_refused(tmp_path: Path, size: int) -> None:
    """A download that broke off."""
    file = small_gguf(tmp_path / "cut.gguf")
    assert read_gguf_tokenizer(file).backend.encode("ab").ids == [2]
    file.write_bytes(file.read_bytes()[:size])
    for read in (read_gguf_tokenizer, read_gguf_chat):
        with pytest.raises(TokenizerError, match=r"cut\.gguf"):
            read(file)


def test_a_list_without_an_end_is_refused(tmp_path: Path) -> None:
    file = small_gguf(tmp_path / "long.gguf", lambda writer: writer.add_array("x.y", [1, 2, 3]))
    head = b"x.y" + struct.pack("<II", gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32)
    before, found, after = file.read_bytes().partition(head)
    assert found
    file.write_bytes(before + found + struct.pack("<Q", 2**40) + after[8:])
    with pytest.raises(TokenizerError, match="a list of"):
        read_gguf_tokenizer(file)


def test_whatever_is_changed_in_a_gguf_file_it_is_read_or_refused(tmp_path: Path) -> None:
    whole, draw = small_gguf(tmp_path / "some.gguf").read_bytes(), random.Random(1)
    refused, file = 0, tmp_path / "some.gguf"
    source = ModelSource("gguf", "some", file, None, file)
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(data))
            new = draw.choice([draw.randbytes(1), b"", bytes(8), b"\xff" * 8, struct.pack("<Q", 2**40)])
            data[at : at + draw.randint(0, 8)] = new
        file.write_bytes(data)
        with contextlib.suppress(CheckpointError):
            recommended_defaults(source)
        with contextlib.suppress(CheckpointError, ConfigError):
            read_gguf_config(file)
        try:
            read_gguf_tokenizer(file)
        except TokenizerError as error:
            refused += "some.gguf" in str(error)
    assert 100 < refused < 300


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json"])
def test_json_that_is_nested_without_end_is_refused(tmp_path: Path, name: str) -> None:
    copy_builtin(tmp_path)
    (tmp_path / name).write_text(NESTED)
    with pytest.raises(TokenizerError, match=name):
        Tokenizer.load(tmp_path)


def test_half_a_surrogate_pair_is_no_token(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        Tokenizer.load(copy_builtin(tmp_path, unk_token="\ud800"))
    Tokenizer.load(copy_builtin(tmp_path, unk_token="\U0001f600"))  # json.dumps writes a pair


def test_odd_names_and_ids_of_tokens_are_passed_over(tmp_path: Path) -> None:
    decoder = {"9" * 5000: {"content": "<a>"}, "x": {"content": "<b>"}, "٣": {"content": "<c>"}}
    copy_builtin(tmp_path, added_tokens_decoder=decoder, eos_token="<a>", unk_token=[1], extra_special_tokens=[{}, []])
    Tokenizer.load(tmp_path)
    assert with_own_end((1,), 10, tmp_path) == (1,)
    copy_builtin(tmp_path, added_tokens_decoder=..., unk_token=[1], cls_token={"content": [1]})
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<new>": 49152}))
    Tokenizer.load(tmp_path)
