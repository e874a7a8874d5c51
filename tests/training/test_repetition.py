"""Which answers count as repeating themselves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hamburger.training.corpus.repetition import first_repeated_ngram, is_repetitive

_IDS = st.lists(st.integers(0, 3), max_size=60)


def test_three_times_the_same_sixteen_tokens_loop() -> None:
    phrase = list(range(16))
    assert is_repetitive([*phrase, 90, *phrase, 91, *phrase, 92])
    assert not is_repetitive([*phrase, 90, *phrase, 91, 92])
    assert not is_repetitive([*phrase[:15], 90, *phrase[:15], 91, *phrase[:15], 92])


def test_overlapping_repeats_count_once() -> None:
    assert not is_repetitive([*[7] * 31, 8])
    assert not is_repetitive([*[7] * 47, 8])
    assert is_repetitive([*[7] * 48, 8])


def test_an_answer_that_ends_in_a_circle_loops() -> None:
    block = list(range(40))
    assert is_repetitive([99, *block, *block])
    assert is_repetitive([99, 98, *block, *block, *block[:7]])  # cut off within the third time
    assert not is_repetitive([99, *block, *block[:39]])
    assert is_repetitive([99, *[1, 2] * 16])
    assert not is_repetitive([99, *[1, 2] * 15])


def test_a_text_without_repeats_does_not_loop() -> None:
    assert not is_repetitive([])
    assert not is_repetitive(range(2000))


def test_where_a_text_begins_to_repeat() -> None:
    assert first_repeated_ngram([1, 2, 3, 9, 1, 2, 3], n=3) == 4
    assert first_repeated_ngram([5] * 4, n=3) == 1
    assert first_repeated_ngram([1, 2, 3, 1, 2], n=3) is None
    assert first_repeated_ngram([], n=3) is None
    assert first_repeated_ngram([*range(8), 99, *range(8)]) == 9


@given(_IDS, st.integers(1, 5))
def test_the_first_repeat_is_the_first(ids: list[int], n: int) -> None:
    at = first_repeated_ngram(ids, n)
    ngrams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    assert at == next((i for i, ngram in enumerate(ngrams) if ngram in ngrams[:i]), None)
    if at is not None:  # what is left after the cut repeats nothing that ends before it
        assert first_repeated_ngram(ids[: at + n - 1], n) is None


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.lists(st.integers(0, 9), max_size=40))
def test_every_text_that_goes_on_in_a_circle_is_found(block: list[int], before: list[int]) -> None:
    assert is_repetitive(before + block * 40)
