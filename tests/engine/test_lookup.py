"""engine/drafting/lookup.py: what is foreseen without a model, from the texts alone."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hamburger.engine.drafting.lookup import Lookup, Prediction


def looked_up(text: list[int], most: int) -> list[int]:
    """What followed the longest of the newest 4 to 2 tokens that came before, where they came last; again and again,
    where the text ends before."""
    for n in (4, 3, 2):
        for end in range(len(text) - 1, n - 1, -1):
            if len(text) >= n and text[end - n : end] == text[-n:]:
                return list(itertools.islice(itertools.cycle(text[end:]), most))
    return []


@given(st.lists(st.integers(0, 5), max_size=40), st.integers(0, 40), st.integers(1, 7))
@settings(max_examples=300)
def test_a_lookup_finds_what_followed_last(text: list[int], num_prompt: int, most: int) -> None:
    lookup = Lookup(text[:num_prompt])
    lookup.after(most)
    for token_id in text[num_prompt:]:
        lookup.extend([token_id])
        lookup.after(most)
    assert lookup.after(most) == looked_up(text, most)


def test_what_repeats_itself_is_expected_to_go_on() -> None:
    assert Lookup([1] * 50).after(7) == [1] * 7
    assert Lookup([8, 1, 2, 1, 2, 1, 2]).after(5) == [1, 2, 1, 2, 1]


def test_a_lookup_over_a_long_prompt_finds_all_of_it_in_the_end() -> None:
    draw = random.Random(1)
    text = [draw.randrange(5000) for _ in range(9000)]
    lookup = Lookup([*text, *text[700:704]])
    for _ in range(30):
        found = lookup.after(7)
    assert found == text[704:711]
    for place in (3, 4000, 8000):
        lookup.extend(text[place : place + 4])
        assert lookup.after(3) == text[place + 4 : place + 7]


@pytest.mark.parametrize("alphabet", [1, 3, 40_000])
@pytest.mark.parametrize("drafter", [Lookup, Prediction])
def test_no_text_holds_up_a_step(drafter: type[Lookup | Prediction], alphabet: int) -> None:
    """Not even a long one of few different tokens: each call takes about a millisecond at most."""
    draw = random.Random(1)
    text = [draw.randrange(alphabet) for _ in range(32_000)]
    begun = time.thread_time()
    found = drafter(text)
    longest = [time.thread_time() - begun]
    for i in range(400):
        begun = time.thread_time()
        found.extend([draw.randrange(alphabet) if i % 3 else 50_000])
        found.after(7)
        longest.append(time.thread_time() - begun)
    assert sorted(longest)[-5] < 0.01  # ten times what they take, and some calls may be held up by others


def test_a_prediction_is_followed_from_its_beginning() -> None:
    prediction = Prediction([1, 2, 3, 4, 5])
    assert prediction.after(3) == [1, 2, 3]
    prediction.extend([1, 2])
    assert prediction.after(9) == [3, 4, 5]
    prediction.extend([3, 4, 5])
    assert prediction.after(9) == []
    prediction.extend([6, 7])
    assert prediction.after(9) == []
    assert Prediction([]).after(3) == []


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ([10, 11, 99], None),  # a new token: nothing is known until two tokens are found again
        ([10, 11, 99, 13], None),
        ([10, 11, 99, 13, 14], [15, 16]),  # one token was replaced
        ([10, 11, 98, 99, 12, 13], [14, 15]),  # two were inserted
        ([10, 11, 15, 16], [17, 18]),  # some were left out
        ([10, 11, 12, 13, 50, 10, 11], [12, 13]),  # all begins anew
    ],
)
def test_a_prediction_finds_its_way_back(answer: list[int], wanted: list[int] | None) -> None:
    prediction = Prediction(range(10, 30))
    prediction.extend(answer)
    assert prediction.after(2) == (wanted or [])


def test_a_prediction_goes_on_where_it_was_left_and_not_where_the_same_came_before() -> None:
    line = [1, 2, 3, 4]
    prediction = Prediction([*line, 5, *line, 6, *line, 7, *line, 8])
    prediction.extend([*line, 5, *line, 6, 1, 2])
    assert prediction.after(3) == [3, 4, 7]
    prediction.extend([90, 91, 92])  # lost
    assert prediction.after(3) == []
    prediction.extend([3, 4])
    assert prediction.after(3) == [7, 1, 2]


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), max_size=30), st.integers(1, 7))
@settings(max_examples=200)
def test_drafters_take_any_text_and_groups_make_no_difference(text: list[int], answer: list[int], most: int) -> None:
    for drafter in (Lookup, Prediction):
        one, other = drafter(text), drafter(text)
        one.extend(answer)
        for token_id in answer:
            other.extend([token_id])
        assert one.after(most) == other.after(most)
        assert len(one.after(most)) <= most
    assert Prediction(answer).after(most) == answer[:most]
