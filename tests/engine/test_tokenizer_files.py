"""A tokenizer from a folder's files. What is missing, broken or of an unknown kind is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from hamburger.engine.text.tokenizer import Tokenizer, TokenizerError
from hamburger.engine.types.errors import HamburgerError
from tokenizer_folders import BUILTIN, added, copy_builtin


def test_special_tokens_written_as_objects_and_named_templates(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "D{{ bos_token }}"}, {"name": "tool_use", "template": "T"}]
    copy_builtin(tmp_path, bos_token={"content": "<|endoftext|>", "special": True}, chat_template=templates)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.bos_token_id == 0
    assert tokenizer.chat_template == "D{{ bos_token }}"
    assert tokenizer.apply_chat_template([]) == "D<|endoftext|>"
    assert tokenizer.apply_chat_template([], tools=[{"type": "function"}]) == "T"


def test_further_special_tokens_that_have_names_are_variables_of_templates(tmp_path: Path) -> None:
    names = {"image_token": "<repo_name>", "audio_token": {"content": "<reponame>"}, "odd": 3, "eos_token": "<x>"}
    template = "{{ image_token }}{{ audio_token }}{{ eos_token }}"
    copy_builtin(tmp_path, extra_special_tokens=names, chat_template=template)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.apply_chat_template([]) == "<repo_name><reponame><|im_end|>"
    assert tokenizer.decode(tokenizer.encode("<repo_name>a")) == "a"


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
def test_a_link_to_nothing_is_no_file_that_is_not_there(tmp_path: Path, name: str) -> None:
    copy_builtin(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to(tmp_path / "blobs" / "0")  # as a hub's cache has them where fetching was interrupted
    with pytest.raises(TokenizerError, match=rf"{name} is a link to a file that is not there"):
        Tokenizer.load(tmp_path)


def test_chat_template_file_wins(tmp_path: Path) -> None:
    (copy_builtin(tmp_path) / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.load(tmp_path).apply_chat_template([]) == "from the file"


def test_special_tokens_from_the_map_or_the_ids(tmp_path: Path) -> None:
    copy_builtin(tmp_path, bos_token=..., eos_token=..., pad_token="not in the vocabulary", chat_template=None)
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<repo_name>"}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (3, 2, None)
    assert tokenizer.chat_template is None
    with pytest.raises(TokenizerError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])


def test_an_id_of_an_ordinary_token_makes_it_none_of_the_special_ones(tmp_path: Path) -> None:
    """Classes of transformers write `bos_token_id: 1` by default: an ordinary character in many vocabularies."""
    copy_builtin(tmp_path, bos_token=..., pad_token=...)
    ordinary = Tokenizer.load(tmp_path).encode("!")
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": ordinary[0], "pad_token_id": 10**9}))
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.bos_token, tokenizer.pad_token) == (None, None)
    assert tokenizer.decode(ordinary) == "!"


@pytest.mark.parametrize(
    ("config", "others"),
    [
        ({"added_tokens_decoder": {"49152": added("<|new|>", True), "49153": added("<tool>", False)}}, {}),
        ({"additional_special_tokens": ["<|new|>", "<|im_end|>"]}, {}),
        ({"extra_special_tokens": ["<|new|>"]}, {}),
        ({}, {"added_tokens.json": {"<|new|>": 49152}}),
        ({}, {"special_tokens_map.json": {"additional_special_tokens": ["<|new|>"]}}),
    ],
)
def test_tokens_that_only_other_files_name_are_tokens(
    tmp_path: Path, config: dict[str, Any], others: dict[str, Any]
) -> None:
    copy_builtin(tmp_path, **{"additional_special_tokens": ..., "added_tokens_decoder": ..., **config})
    for name, content in others.items():
        (tmp_path / name).write_text(json.dumps(content))
    ours, theirs = Tokenizer.load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("<|new|>a <tool> <|new|> b", " <|im_end|>x<|new|>"):
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.encode("<|new|>") == [49152]


def test_fields_of_other_shapes_name_no_tokens(tmp_path: Path) -> None:
    copy_builtin(tmp_path, odd_token=["a"], even_token={"content": ["b"]}, added_tokens_decoder=...)
    (tmp_path / "added_tokens.json").write_text('{"<|new|>": 49152}')
    assert Tokenizer.load(tmp_path).encode("<|new|>") == [49152]


def test_a_token_that_the_configuration_calls_special_is_left_out_of_text(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(BUILTIN / "tokenizer.json"))
    backend.add_tokens([tokenizers.AddedToken("<plain>", special=False)])
    copy_builtin(tmp_path, added_tokens_decoder={"49152": added("<plain>", True)})
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode("a<plain>b")) == "ab"


def test_a_token_of_another_id_than_stated_gets_the_next_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    copy_builtin(tmp_path, added_tokens_decoder={"50000": added("<|new|>", True), "50001": added("", True)})
    ours, theirs = Tokenizer.load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.encode("a<|new|>") == theirs("a<|new|>")["input_ids"]
    assert "The token '<|new|>' has the id 49152, though the files beside tokenizer.json say 50000" in caplog.text


@pytest.mark.parametrize("lists", [True, False])
def test_what_two_files_say_of_a_token_counts_together(tmp_path: Path, lists: bool) -> None:
    listed = {"additional_special_tokens": ["<|new|>"]} if lists else {}
    copy_builtin(tmp_path, **{"additional_special_tokens": ..., "added_tokens_decoder": ..., **listed})
    (tmp_path / "added_tokens.json").write_text('{"<|new|>": 49152}')
    ours, theirs = Tokenizer.load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = ours.encode("a<|new|>b")
    assert ids == theirs("a<|new|>b")["input_ids"]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == ("ab" if lists else "a<|new|>b")


def test_beside_a_decoder_the_older_files_count_for_nothing(tmp_path: Path) -> None:
    copy_builtin(tmp_path, additional_special_tokens=..., added_tokens_decoder={"1": added("<|im_start|>", True)})
    (tmp_path / "added_tokens.json").write_text('{"<|new|>": 49000}')
    (tmp_path / "special_tokens_map.json").write_text('{"additional_special_tokens": ["<|new|>"]}')
    ours, theirs = Tokenizer.load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.encode("a<|new|>b") == theirs("a<|new|>b")["input_ids"]
    assert len(ours.encode("<|new|>")) > 1


def test_templates_beside_the_file_are_read_by_their_names(tmp_path: Path) -> None:
    (copy_builtin(tmp_path) / "chat_template.jinja").write_text("from the file")
    others = tmp_path / "additional_chat_templates"
    others.mkdir()
    (others / "tool_use.jinja").write_text("with tools")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.apply_chat_template([]) == "from the file"
    assert tokenizer.apply_chat_template([], tools=[{"type": "function"}]) == "with tools"


def test_a_template_that_is_no_text_is_named(tmp_path: Path) -> None:
    (copy_builtin(tmp_path) / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja cannot be read as UTF-8"):
        Tokenizer.load(tmp_path)


def test_templates_by_name_in_an_object(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(copy_builtin(tmp_path, chat_template={"default": "D", "tool_use": "T"}))
    assert (tokenizer.chat_template, tokenizer.tool_template) == ("D", "T")


@pytest.mark.parametrize(
    "template", [[{"template": "x"}], [{"name": "default", "template": None}], ["x"], 5, {"default": 1}]
)
def test_templates_of_another_shape_are_refused(tmp_path: Path, template: Any) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: chat_template must be a text, or a list"):
        Tokenizer.load(copy_builtin(tmp_path, chat_template=template))


def test_special_token_that_the_file_does_not_flag_is_special(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(copy_builtin(tmp_path, eos_token="Hello"))
    (eos,) = tokenizer.encode("Hello")
    assert tokenizer.is_special(eos)
    assert tokenizer.decode([eos]) == ""


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(BUILTIN / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.load(tmp_path).encode("a b c d e f")) == 6


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("", r"no tokenizer\.json.*save_pretrained\) to get one\.$"),
        ("folder", r"no tokenizer\.json"),
        ("model.gguf", "not a readable GGUF file"),
    ],
)
def test_missing_files(tmp_path: Path, name: str, match: str) -> None:
    with pytest.raises(TokenizerError, match=match):
        Tokenizer.load(tmp_path / name)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_broken_files(tmp_path: Path, file: str) -> None:
    (copy_builtin(tmp_path) / file).write_text("{")
    with pytest.raises(TokenizerError, match=file) as caught:
        Tokenizer.load(tmp_path)
    assert isinstance(caught.value, HamburgerError)


def test_a_tokenizer_whose_parts_do_not_fit_is_refused_before_anybody_is_served(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy_builtin(tmp_path)
    file = tmp_path / "tokenizer.json"
    begins = [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    template = {"type": "TemplateProcessing", "single": begins, "pair": begins, "special_tokens": {}}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": template}))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is not a tokenizer that"):
        Tokenizer.load(tmp_path)
    capfd.readouterr()  # the library's own words
