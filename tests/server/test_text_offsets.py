"""text_offset: the character of the choice's text at which a token starts, behind broken characters too."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import ByteTokenizer
from hamburger.server.completions.echo import Echo
from hamburger.server.completions.logprobs import TextOffsets
from serving import COMPLETIONS, serving

SMILE = "😀".encode()


@pytest.mark.parametrize(
    ("data", "offsets"),
    [
        (SMILE[:2] + b"Hi", [0, 0, 1, 2]),
        (SMILE + b"!", [0, 0, 0, 0, 1]),
        (b"a" + SMILE[:3] + SMILE + b"b", [0, 1, 1, 1, 2, 2, 2, 2, 3]),
        (b"\xe0\x80b", [0, 1, 2]),  # the second byte goes on with no character that begins so
        (b"\xff\xffa", [0, 1, 2]),
    ],
)
def test_what_stands_for_a_broken_character_comes_before_the_next_token(data: bytes, offsets: list[int]) -> None:
    following = TextOffsets(ByteTokenizer(), skip_special_tokens=True)
    assert [following.next(byte) for byte in data] == offsets
    assert Echo(ByteTokenizer(), [*data], None).offsets() == offsets


@given(st.lists(st.sampled_from([*SMILE, *"ä".encode(), *b"ab", 0xFF, 0xC0]), max_size=12))
def test_an_offset_is_where_the_text_of_the_tokens_before_ends(data: list[int]) -> None:
    following = TextOffsets(ByteTokenizer(), skip_special_tokens=True)
    for place, byte in enumerate(data):
        found = following.next(byte)
        # The last character of the text is the one that it begins, or goes on with.
        assert found == len(bytes(data[: place + 1]).decode(errors="replace")) - 1


async def test_echoed_and_sampled_tokens_tell_the_same_places() -> None:
    data = [*SMILE[:2], *b"Hi"]
    async with serving([[byte] for byte in data]) as server:
        answer = await server.ok(
            COMPLETIONS, {"prompt": data, "echo": True, "max_tokens": 4, "logprobs": 0, "add_special_tokens": False}
        )
        [choice] = answer["choices"]
    assert choice["text"] == "\ufffdHi\ufffdHi"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 3, 3, 4, 5]
