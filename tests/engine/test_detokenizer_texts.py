"""2,000 random texts of the embedded tokenizer, cut into random groups: what is streamed is the text."""

from __future__ import annotations

import random
from pathlib import Path

import hamburger.model
from hamburger.engine.text.detokenizer import Detokenizer
from hamburger.engine.text.tokenizer import Tokenizer
from texts import random_text

BUILTIN = Path(str(hamburger.model.__file__)).parent / "builtin"


def test_streamed_pieces_are_the_whole_text_and_never_half_a_character() -> None:
    tokenizer = Tokenizer.load(BUILTIN)
    draw = random.Random(0)
    num_groups = num_equal = 0
    for _ in range(2000):
        text = random_text(draw)
        ids = tokenizer.encode(text)
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=draw.random() < 0.5)
        pieces, start = [], 0
        while start < len(ids):
            end = min(len(ids), start + draw.randint(1, 4))
            pieces.append(detokenizer.push(ids[start:end], last=end == len(ids)).text)
            start = end
            num_groups += 1
        whole = tokenizer.decode(ids, skip_special_tokens=False)
        assert "".join(pieces) == whole
        num_equal += whole == text
        if whole == text and "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces)
    assert num_groups > 10_000
    assert num_equal > 1900  # its vocabulary lacks a few bytes
