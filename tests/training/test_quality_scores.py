"""What an answer is worth, on answers whose figures are known by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hamburger.training.corpus.jsonl import GrowingFile
from hamburger.training.quality.answers import Answer
from hamburger.training.quality.prompts import Prompt
from hamburger.training.quality.scores import Accepted, Score, base_logprobs, kept_tokens, ratios, score_answer

PROMPT = Prompt("p", "maths", [1, 2, 3])


def near(value: float) -> Any:
    return pytest.approx(value)


def answer(groups: list[list[int]], stop_probs: list[float] | None = None, ended: bool = True) -> Answer:
    number = sum(map(len, groups))
    return Answer(PROMPT, 0.5, groups, stop_probs or [0.25] * number, ended)


def test_a_short_answer_by_hand() -> None:
    found = score_answer(answer([[5], [6, 7], [2]], [0.9, 0.125, 0.8, 0.9]), [-1.0, -0.5, math.log(0.5), 0.0])
    assert (found.tokens, found.groups, found.ended, found.was_cut) == (4, 3, True, False)
    assert found.nll == pytest.approx(1.5 + math.log(2))
    assert (found.ngrams, found.repeated) == (1, 0)
    # The dial spoke after token 6 (0.125 to stop), and the base gives 7 one half.
    assert found.accepted == [Accepted(1, 0.875, near(0.5))]


def test_a_loop_is_cut_before_anything_counts() -> None:
    block = list(range(10, 20))
    ids = [*block, *block, *block, 2]
    groups = [ids[i : i + 4] for i in range(0, 31, 4)]
    cut = answer(groups)
    assert kept_tokens(cut.token_ids) == 10
    found = score_answer(cut, [-1.0] * 10)
    # The third group begins at token 8 and is divided by the cut: it counts, and only its first two tokens.
    assert (found.tokens, found.groups, found.nll) == (10, 3, 10)
    assert (found.ngrams, found.repeated) == (7, 0)
    assert (found.was_cut, found.ended, found.whole_ended) == (True, False, True)
    assert (found.whole_tokens, found.whole_groups) == (31, 8)
    assert [a.position for a in found.accepted] == [1, 2, 3, 1, 2, 3, 1]


def test_repetition_counts_4_grams_that_were_there_before() -> None:
    ids = [1, 2, 3, 4, 9, 1, 2, 3, 4]
    found = score_answer(answer([[i] for i in ids], ended=False), [0.0] * 9)
    assert (found.ngrams, found.repeated, found.ended) == (6, 1, False)


def test_as_many_logprobs_as_kept_tokens() -> None:
    with pytest.raises(ValueError, match="2 log-probabilities for 1 tokens"):
        score_answer(answer([[5]]), [0.0, 0.0])


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=40))
def test_what_holds_for_any_answer(groups: list[list[int]]) -> None:
    whole = answer(groups)
    kept = kept_tokens(whole.token_ids)
    found = score_answer(whole, [-0.5] * kept)
    assert 1 <= found.tokens <= found.whole_tokens
    assert 1 <= found.groups <= min(found.tokens, found.whole_groups)
    assert 0 <= found.repeated <= max(0, found.ngrams - 1)
    # Every kept token is the first of its group or was accepted.
    assert found.groups + len(found.accepted) == found.tokens
    assert found.was_cut == (found.tokens < found.whole_tokens)
    positions = [0, *(a.position for a in found.accepted)]
    assert all(b == 1 or b == a + 1 for a, b in pairwise(positions))


def test_ratios_pool_over_prompts() -> None:
    one = score_answer(answer([[5, 6]]), [-1.0, -1.0])
    two = score_answer(answer([[5], [6], [7], [8]], ended=False), [-4.0] * 4)
    found = {name: figure.value for name, figure in ratios([one, two]).items()}
    assert found["tokens_per_kv"] == 6 / 5
    assert found["nll"] == 18 / 6
    assert found["eos"] == 0.5
    assert found["tokens"] == 3


class Scorer:
    """Gives each token minus its own id, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.loads = 0

    def load(self) -> Score:
        self.loads += 1
        return self

    def __call__(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> list[list[float]]:
        self.asked += [list(ids) for ids in sequences]
        return [[-float(i) for i in ids[start:]] for ids, start in zip(sequences, starts, strict=True)]


def test_each_text_is_scored_once_and_never_again(tmp_path: Path) -> None:
    scorer, path = Scorer(), tmp_path / "scores.jsonl"
    same = [answer([[5], [6, 7]]), answer([[5, 6], [7]])]
    loop = answer([[*range(10, 20), *range(10, 20)]])
    with GrowingFile(path) as cache:
        found = base_logprobs([*same, loop], scorer.load, cache, "base")
    assert found == [[-5, -6, -7], [-5, -6, -7], [-float(i) for i in range(10, 20)]]
    assert sorted(scorer.asked) == [[1, 2, 3, 5, 6, 7], [1, 2, 3, *range(10, 20)]]  # cut, after the prompt
    with GrowingFile(path) as cache:
        assert base_logprobs([loop, *same], scorer.load, cache, "base") == [found[2], *found[:2]]
        assert scorer.loads == 1
        base_logprobs(same, scorer.load, cache, "another base")
    assert scorer.loads == 2


def test_a_text_is_not_another_one_with_the_prompt_s_end_moved(tmp_path: Path) -> None:
    scorer = Scorer()
    other = Answer(Prompt("p", "maths", [1, 2]), 0.5, [[3, 5]], [0.1, 0.1], True)
    with GrowingFile(tmp_path / "scores.jsonl") as cache:
        assert base_logprobs([answer([[5]]), other], scorer.load, cache, "base") == [[-5], [-3, -5]]
