"""The tokenizer: files, specials, bytes, and equality with transformers on the embedded model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

import hamburger.model
from hamburger.engine.text.tokenizer import Tokenizer, TokenizerError

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
        "import sys, pathlib; from hamburger.engine.text.tokenizer import Tokenizer; "
        "import hamburger.engine.text.detokenizer; "
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
