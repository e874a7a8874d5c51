"""Scores one answer, cut where it first repeats itself: under the base model, and how honest the dial was.

Works on token ids and numbers alone; models are behind `score`.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from rich.console import Console
from rich.progress import Progress

from hamburger.training.corpus.jsonl import GrowingFile, read_rows
from hamburger.training.corpus.repetition import first_repeated_ngram
from hamburger.training.quality.answers import Answer
from hamburger.training.statistics import Ratio

CUT_NGRAM, REPETITION_NGRAM = 8, 4
_ANSWERS_A_CHUNK = 64
_DIGITS = 4

# (sequences, starts) -> log-probabilities (nats) of the tokens from each start on
Score = Callable[[Sequence[Sequence[int]], Sequence[int]], list[list[float]]]


@dataclass(frozen=True, slots=True)
class Accepted:
    """A token that the dial let a group go on with.

    position: 1 for the group's second token, and so on. predicted: the continue-probability before it, that was at
    least the confidence. probability: the base model's, of that token in that text.
    """

    position: int
    predicted: float
    probability: float


@dataclass(frozen=True, slots=True)
class AnswerScore:
    """One answer, cut. Lengths in tokens; groups as served (a group that the cut divides counts); nll in nats.

    ngrams: 4-grams, and repeated: those of them that were there before. ended: the cut answer ends with an end token.
    whole_*: before the cut.
    """

    prompt_id: str
    kind: str
    confidence: float
    tokens: int
    groups: int
    nll: float
    ngrams: int
    repeated: int
    ended: bool
    was_cut: bool
    whole_tokens: int
    whole_groups: int
    whole_ended: bool
    accepted: list[Accepted]


def kept_tokens(token_ids: Sequence[int]) -> int:
    """Tokens before an answer's first repeated 8-gram begins again; all of them where none does."""
    cut = first_repeated_ngram(list(token_ids), CUT_NGRAM)
    return len(token_ids) if cut is None else cut


def score_answer(answer: Answer, logprobs: Sequence[float]) -> AnswerScore:
    """logprobs: the base model's, of the kept tokens. Raises ValueError when there are not as many."""
    token_ids = answer.token_ids
    kept = kept_tokens(token_ids)
    if len(logprobs) != kept:
        raise ValueError(f"{answer.prompt.id}: {len(logprobs)} log-probabilities for {kept} tokens.")
    grams = [tuple(token_ids[i : i + REPETITION_NGRAM]) for i in range(kept - REPETITION_NGRAM + 1)]
    begins = list(accumulate(map(len, answer.groups), initial=0))[:-1]
    return AnswerScore(
        prompt_id=answer.prompt.id,
        kind=answer.prompt.kind,
        confidence=answer.confidence,
        tokens=kept,
        groups=sum(begin < kept for begin in begins),
        nll=-sum(logprobs),
        ngrams=len(grams),
        repeated=len(grams) - len(set(grams)),
        ended=answer.ended and kept == len(token_ids),
        was_cut=kept < len(token_ids),
        whole_tokens=len(token_ids),
        whole_groups=len(answer.groups),
        whole_ended=answer.ended,
        accepted=list(_accepted(answer, begins, logprobs)),
    )


def ratios(scores: Sequence[AnswerScore]) -> dict[str, Ratio]:
    """The figures of one confidence, as ratios of sums over prompts."""

    def over(numerators: Iterable[float], denominators: Iterable[float]) -> Ratio:
        return Ratio(list(numerators), list(denominators))

    ones = [1] * len(scores)
    return {
        "tokens_per_kv": over((s.tokens for s in scores), (s.groups for s in scores)),
        "nll": over((s.nll for s in scores), (s.tokens for s in scores)),
        "repetition": over((s.repeated for s in scores), (s.ngrams for s in scores)),
        "eos": over((s.ended for s in scores), ones),
        "cut": over((s.was_cut for s in scores), ones),
        "uncut_tokens_per_kv": over((s.whole_tokens for s in scores), (s.whole_groups for s in scores)),
        "uncut_eos": over((s.whole_ended for s in scores), ones),
        "tokens": over((s.tokens for s in scores), ones),
    }


def base_logprobs(
    answers: Sequence[Answer], score: Callable[[], Score], cache: GrowingFile, scorer: str
) -> list[list[float]]:
    """The base model's log-probability of every kept token of each answer.

    score: loads the scorer, and is only called for texts that are missing. scorer: its fingerprint. Texts that several
    confidences share are scored once.
    """
    texts = {_text_key(a): (a.prompt.prompt_ids, a.token_ids[: kept_tokens(a.token_ids)]) for a in answers}
    rows = (row.values for row in read_rows(cache.path))
    known = {row["text"]: row["logprobs"] for row in rows if row["scorer"] == scorer and row["text"] in texts}
    # By length, so that a chunk's sequences pack well.
    missing = sorted((key for key in texts if key not in known), key=lambda key: -sum(map(len, texts[key])))
    if missing:
        compute = score()
        with Progress(console=Console(stderr=True), refresh_per_second=2) as bar:
            for chunk in bar.track(list(_chunks(missing)), description="Scoring"):
                found = compute([[*texts[k][0], *texts[k][1]] for k in chunk], [len(texts[k][0]) for k in chunk])
                rounded = [[round(p, _DIGITS) for p in values] for values in found]
                known |= dict(zip(chunk, rounded, strict=True))
                for key in chunk:
                    cache.append({"scorer": scorer, "text": key, "logprobs": known[key]})
    return [known[_text_key(answer)] for answer in answers]


def _accepted(answer: Answer, begins: Sequence[int], logprobs: Sequence[float]) -> Iterator[Accepted]:
    """The kept tokens that are not the first of their group."""
    for begin, group in zip(begins, answer.groups, strict=True):
        for index in range(begin + 1, min(begin + len(group), len(logprobs))):
            yield Accepted(index - begin, 1 - answer.stop_probs[index - 1], math.exp(logprobs[index]))


def _text_key(answer: Answer) -> str:
    kept = kept_tokens(answer.token_ids)
    ids = array("q", [len(answer.prompt.prompt_ids), *answer.prompt.prompt_ids, *answer.token_ids[:kept]])
    return hashlib.sha256(ids.tobytes()).hexdigest()[:32]


def _chunks(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(keys), _ANSWERS_A_CHUNK):
        yield keys[start : start + _ANSWERS_A_CHUNK]
