"""The detokenizer against a brute-force reference: text, stops and counts are exact at every split into groups."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

import hamburger.model
from fakes import ByteTokenizer
from hamburger.engine.text.detokenizer import DetokenizedGroup, Detokenizer, TextDecoder
from hamburger.engine.text.stop_strings import StopStrings
from hamburger.engine.text.tokenizer import Tokenizer

BUILTIN = Path(str(hamburger.model.__file__)).parent / "builtin"
SPECIAL = b"<special>"


class Pieces:
    """A tokenizer whose token i is any bytes we like, so that tokens split characters anywhere."""

    streams_bytes = True

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        shown = (i for i in ids if not (skip_special_tokens and self.is_special(i)))
        return b"".join(map(self.token_bytes, shown)).decode(errors="replace")

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        return self.pieces[token_id]

    def is_special(self, token_id: int) -> bool:
        return self.pieces[token_id] == SPECIAL


@dataclass
class OnlyDecodes:
    """The same tokenizer without its bytes."""

    inner: TextDecoder

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.inner.decode(ids, skip_special_tokens=skip_special_tokens)


@dataclass
class Reference:
    """What must come out: the text, how many tokens count, the stop, and the settled text after each counted token."""

    text: str
    num_tokens: int
    stop: str | None
    settled: list[str]


# Whatever bytes may follow: what is the same before all of them can no longer change.
TAILS = [b"", b"A", *(bytes(t) for n in (1, 2, 3) for t in itertools.product((0x80, 0x90, 0xA0), repeat=n))]


def settled_text(data: bytes) -> str:
    futures = [(data + tail).decode(errors="replace") for tail in TAILS]
    same = itertools.takewhile(lambda chars: len(set(chars)) == 1, zip(*futures, strict=False))
    text = "".join(chars[0] for chars in same)
    # Two of a surrogate's three bytes are invalid by themselves, but Python's decoder waits for the third.
    return text[:-2] if data[-2:-1] == b"\xed" and 0xA0 <= data[-1] <= 0xBF else text


def reference(pieces: Sequence[bytes], stop: Sequence[str], min_tokens: int, skip: bool = True) -> Reference:
    """By definition, with no state: decode every prefix anew and look for every stop string everywhere."""
    data = [b"" if skip and piece == SPECIAL else piece for piece in pieces]
    settled = [settled_text(b"".join(data[:n])) for n in range(len(data) + 1)]
    whole = b"".join(data).decode(errors="replace")
    # The last token's text is everything that is left.
    for n, (before, after) in enumerate(itertools.pairwise([*settled, whole])):
        index = min(n, len(data) - 1)
        ends = [
            (start + len(s), start, s)
            for s in stop
            for start in range(len(after))
            if after.startswith(s, start) and start + len(s) > len(before)
        ]
        if ends and index >= min_tokens:
            _, start, found = min(ends)
            return Reference(after[:start], index + 1, found, settled[1 : index + 2])
    return Reference(whole, len(data), None, settled[1:])


def held(text: str, stop: Sequence[str]) -> int:
    """The longest end of the text that is a true beginning of a stop string."""
    return max((n for s in stop for n in range(len(s)) if text.endswith(s[:n])), default=0)


def groups_of(count: int, cuts: Sequence[int]) -> list[range]:
    edges = [0, *sorted({c for c in cuts if 0 < c < count}), count]
    return [range(a, b) for a, b in itertools.pairwise(edges)]


def stream(
    tokenizer: TextDecoder, groups: Sequence[Sequence[int]], stop: Sequence[str], min_tokens: int = 0, skip: bool = True
) -> list[DetokenizedGroup]:
    detokenizer = Detokenizer(
        tokenizer, stop=StopStrings(stop) if stop else None, min_tokens=min_tokens, skip_special_tokens=skip
    )
    return [detokenizer.push(group, last=i == len(groups) - 1) for i, group in enumerate(groups)]


def check(
    pieces: Sequence[bytes], cuts: Sequence[int], stop: Sequence[str], min_tokens: int, skip: bool = True
) -> None:
    expected = reference(pieces, stop, min_tokens, skip)
    groups = groups_of(len(pieces), cuts)
    results = stream(Pieces(pieces), groups, stop, min_tokens, skip)
    shown, counted = "", 0
    for group, result in zip(groups, results, strict=True):
        shown += result.text
        counted += result.num_tokens
        assert expected.text.startswith(shown)  # nothing at or behind a stop, nothing that changes later
        if result.stop is None and group[-1] != len(pieces) - 1:
            settled = expected.settled[group[-1]]
            assert shown == settled[: len(settled) - held(settled, stop)]  # held back: no more and no less
    assert (shown, counted) == (expected.text, expected.num_tokens)
    assert results[-1].stop == expected.stop


CHARS = st.sampled_from(["a", "b", "ab", "\n", " ", "é", "€", "😀", "e\u0301", "👩‍👧", "\ufffd", "漢"])
TEXT = st.lists(CHARS, max_size=8).map("".join)


@st.composite
def splits(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """Tokens of `data`, cut anywhere, with empty and special ones among them."""
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12)))
    pieces = [data[a:b] for a, b in itertools.pairwise([0, *cuts, len(data)])]
    for at in draw(st.lists(st.integers(0, len(pieces)), max_size=2)):
        pieces.insert(at, SPECIAL)
    return pieces


@st.composite
def stops(draw: st.DrawFn, text: str) -> list[str]:
    """Parts of the text, and strings that only begin like one."""
    found = []
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(text)))
        found.append(text[start : draw(st.integers(start, len(text)))] + draw(st.sampled_from(["", "", "a", "Z"])))
    return [s for s in found if s]


@given(data=st.data(), skip=st.booleans())
def test_any_text_stops_and_groups(data: st.DataObject, skip: bool) -> None:
    text = data.draw(TEXT)
    pieces = data.draw(splits(text.encode()))
    stop = data.draw(stops(text if skip else text + SPECIAL.decode()))
    cuts = data.draw(st.lists(st.integers(1, len(pieces)), max_size=6))
    check(pieces, cuts, stop, data.draw(st.sampled_from([0, 0, 1, 3])), skip)


@given(data=st.data())
def test_any_bytes(data: st.DataObject) -> None:
    """Invalid UTF-8, cut anywhere, also with stops that hold the replacement character."""
    some = st.sampled_from(
        [b"a", b"\x80", b"\xbf", b"\xc3", b"\xe0", b"\xe2", b"\xed", b"\xf0", b"\xf4", b"\x9f", b"\xff"]
    )
    raw = b"".join(data.draw(st.lists(some, max_size=10)))
    pieces = data.draw(splits(raw))
    stop = data.draw(stops(raw.decode(errors="replace")))
    check(pieces, data.draw(st.lists(st.integers(1, len(pieces)), max_size=6)), stop, data.draw(st.integers(0, 2)))


@pytest.mark.parametrize(
    ("pieces", "stop"),
    [
        ([b"a", b"b", b"c", b"d", b"e", b"f"], ["cd"]),
        ([b"x\n", b"\n", b"User", b":", b" a", b"b"], ["\n\nUser:", "\n\n\n"]),
        ([b"\xf0\x9f", b"\x98\x80\xe2", b"\x82", b"\xac", b"!", b"?"], ["😀€"]),
        ([b"aab", b"aab", b"aaab", b"b", SPECIAL, b"c"], ["aabaaab", "aabb"]),
    ],
)
def test_every_split_into_groups(pieces: list[bytes], stop: list[str]) -> None:
    for cuts in itertools.chain.from_iterable(itertools.combinations(range(1, 6), n) for n in range(6)):
        check(pieces, cuts, stop, 0)


@pytest.mark.parametrize(
    ("pieces", "stop", "min_tokens", "expected"),
    [
        ([b"abc", b"def"], ["cd"], 0, ("ab", 2, "cd")),
        ([b"abcd", b"ef"], ["cd", "bcd"], 0, ("a", 1, "bcd")),  # both end together: the longest
        ([b"abcd", b"ef"], ["abcd", "bc"], 0, ("a", 1, "bc")),  # the one that ends first
        ([b"ab", b"cd"], ["bcd", "b"], 0, ("a", 1, "b")),  # the earliest token
        ([b"aa", b"a", b"b"], ["aa"], 1, ("a", 2, "aa")),  # may begin before min_tokens
        ([b"x", b"x", b"x"], ["x"], 2, ("xx", 3, "x")),
        ([b"x", b"x"], ["x"], 2, ("xx", 2, None)),
        ([b"<", b"<", b"stop"], ["<stop"], 0, ("<", 3, "<stop")),
        ([b"a", b"\xe2\x82"], ["\ufffd"], 0, ("a", 2, "\ufffd")),  # made by the final flush
        ([b"a", b"\xe2\x82"], ["\ufffd"], 2, ("a\ufffd", 2, None)),
        ([b"ab"], ["abc"], 0, ("ab", 1, None)),  # held back, then shown at the end
    ],
)
def test_rules(pieces: list[bytes], stop: list[str], min_tokens: int, expected: tuple[str, int, str | None]) -> None:
    for tokenizer in (Pieces(pieces), OnlyDecodes(Pieces(pieces))):
        for cuts in (range(0), range(9)):
            results = stream(tokenizer, groups_of(len(pieces), cuts), stop, min_tokens)
            assert "".join(r.text for r in results) == expected[0]
            assert (sum(r.num_tokens for r in results), results[-1].stop) == expected[1:]


def test_last_may_come_without_tokens() -> None:
    detokenizer = Detokenizer(Pieces([b"a\xe2", b"<"]), stop=StopStrings(["<|", "\ufffd<|"]))
    assert detokenizer.push([0]) == DetokenizedGroup("a", 1, None)
    assert detokenizer.push([1]) == DetokenizedGroup("", 1, None)
    assert detokenizer.push([], last=True) == DetokenizedGroup("\ufffd<", 0, None)


def test_nothing_is_taken_after_a_stop() -> None:
    detokenizer = Detokenizer(Pieces([b"a", b"b"]), stop=StopStrings(["b"]))
    assert detokenizer.push([0, 1, 0]) == DetokenizedGroup("a", 2, "b")
    assert detokenizer.push([0], last=True) == DetokenizedGroup("", 0, "b")


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


# --- real tokenizers: all texts together are decode() ---


def unigram() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=60, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(["hello world, here is a small text", "the world is small é 漢"] * 4, trainer)
    return Tokenizer(backend)


def byte_fallback_bpe() -> Tokenizer:
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *"▁abc", "▁a", "▁▁", "bc"]
    merges = [("▁", "a"), ("▁", "▁"), ("b", "c")]
    model = models.BPE(vocab={t: i for i, t in enumerate(vocab)}, merges=merges, unk_token="<unk>", byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend)


def no_decoder() -> Tokenizer:
    """The library joins the tokens of such a one with spaces."""
    return Tokenizer(tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate("abcd")}, unk_token="a")))


@pytest.fixture(scope="module")
def real() -> dict[str, Tokenizer | ByteTokenizer]:
    return {
        "builtin": Tokenizer.load(BUILTIN),
        "unigram": unigram(),
        "byte_fallback": byte_fallback_bpe(),
        "no_decoder": no_decoder(),
        "fake": ByteTokenizer(),
    }


NAMES = ["builtin", "unigram", "byte_fallback", "no_decoder", "fake"]


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data(), skip=st.booleans())
def test_any_ids_stream_as_decode(
    real: dict[str, Tokenizer | ByteTokenizer], name: str, data: st.DataObject, skip: bool
) -> None:
    tokenizer = real[name]
    top = tokenizer.vocab_size - (name == "fake")
    # Ids next to each other are often all bytes, or all specials; the highest has no token.
    ids = data.draw(st.lists(st.integers(0, top) | st.integers(0, min(top, 300)), min_size=1, max_size=12))
    cuts = data.draw(st.lists(st.integers(1, len(ids)), max_size=6))
    groups = [[ids[i] for i in group] for group in groups_of(len(ids), cuts)]
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    # With a stop string that cannot occur the text goes through the other path.
    for stop in ([], ["\x00 never \x00"]):
        results = stream(tokenizer, groups, stop, skip=skip)
        assert "".join(r.text for r in results) == expected
        assert [r.num_tokens for r in results] == [len(group) for group in groups]


@pytest.mark.parametrize("name", ["builtin", "unigram", "byte_fallback", "fake"])
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), min_size=1, max_size=12))
def test_decoding_by_window_equals_decode(real: dict[str, Tokenizer | ByteTokenizer], name: str, text: str) -> None:
    tokenizer = real[name]
    ids = tokenizer.encode(text)
    if not ids:
        return
    results = stream(OnlyDecodes(tokenizer), [[i] for i in ids], [])
    assert "".join(r.text for r in results) == tokenizer.decode(ids)
    assert not any("\ufffd" in r.text for r in results) or "\ufffd" in tokenizer.decode(ids)


def test_first_space_is_dropped_once(real: dict[str, Tokenizer | ByteTokenizer]) -> None:
    tokenizer = real["byte_fallback"]
    for text in ("a a", " a", "  a ", "a  a"):
        ids = tokenizer.encode(text)
        for decoder in (tokenizer, OnlyDecodes(tokenizer)):
            assert "".join(r.text for r in stream(decoder, [[1], *([i] for i in ids)], [])) == text


def test_no_space_is_dropped_where_a_text_goes_on(real: dict[str, Tokenizer | ByteTokenizer]) -> None:
    tokenizer = real["byte_fallback"]
    for text in ("a a", "a\n    a", "a"):
        ids = tokenizer.encode(text)
        for cut in range(1, len(ids)):
            answer = Detokenizer(tokenizer, goes_on=True).push(ids[cut:], last=True)
            assert tokenizer.decode(ids[:cut]) + answer.text == text


def test_stop_in_real_tokens(real: dict[str, Tokenizer | ByteTokenizer]) -> None:
    tokenizer = real["builtin"]
    text = "Question: 1+1?\nAnswer: 2 😀\n\nQuestion: next"
    ids = tokenizer.encode(text)
    for size in (1, 2, 3, 4, len(ids)):
        groups = [ids[i : i + size] for i in range(0, len(ids), size)]
        results = stream(tokenizer, groups, ["😀\n\nQues", "next"])
        assert "".join(r.text for r in results) == "Question: 1+1?\nAnswer: 2 "
        kept = ids[: sum(r.num_tokens for r in results)]
        assert "😀\n\nQues" in tokenizer.decode(kept)
        assert "😀\n\nQues" not in tokenizer.decode(kept[:-1])


@pytest.mark.parametrize("shows", [False, True])
@pytest.mark.parametrize("stop", [(), ("x",), ("bc",)])
@pytest.mark.parametrize("split", [0, 1, 2])
def test_the_token_that_ends_an_answer_is_counted_and_none_of_its_text(
    shows: bool, stop: tuple[str, ...], split: int
) -> None:
    ids = [*b"abc"]
    detokenizer = Detokenizer(ByteTokenizer(), stop=StopStrings(stop) if stop else None, shows_stop=shows)
    groups = [detokenizer.push(ids[:split]), detokenizer.push(ids[split:], last=True, by_token=True)]
    assert "".join(group.text for group in groups) == ("abc" if shows else "ab")
    assert sum(group.num_tokens for group in groups) == 3
    assert groups[-1].stop == ("bc" if shows and stop == ("bc",) else None)
