"""What groups a data set has, and what other ways to segment it would give. It prints nothing itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hamburger.training.corpus.dataset import Example, SegmentedDataset
from hamburger.training.corpus.segmentation import Strategy, segment

_BAR_WIDTH = 40
_SAMPLE_TOKENS = 100_000  # enough for two digits, and a second a row
_OTHERS: tuple[tuple[Strategy, float, float], ...] = (
    ("decreasing_v2", 0.3, 0.05),
    ("decreasing_v2", 0.5, 0.05),
    ("decreasing_v2", 0.7, 0.05),
    ("decreasing_v2", 0.5, 0.6),
    ("decreasing", 0.3, 0.0),
    ("small_group", 0.0, 0.0),
    ("sliding", 0.0, 0.0),
)


class Allowed(NamedTuple):
    """One way to segment, and the tokens per KV that the data allow with it."""

    strategy: Strategy
    ratio: float
    floor: float
    tokens_per_kv: float


def group_report(dataset: SegmentedDataset) -> RenderableType:
    """For a console: a histogram of group sizes, the tokens per KV, and the same for other strategies."""
    counts = size_counts(dataset.examples())
    if not counts:
        return Text("The data set has no example.")
    num_tokens, num_groups = sum(size * number for size, number in counts.items()), counts.total()
    meta = dataset.meta
    histogram = Table(box=SIMPLE, pad_edge=False, title="Groups by their number of tokens", title_justify="left")
    for column in ("tokens", "groups", "share"):
        histogram.add_column(column, justify="right")
    histogram.add_column("")
    for size in range(1, max(counts) + 1):
        share = counts[size] / num_groups
        histogram.add_row(str(size), f"{counts[size]:,}", f"{share:.1%}", "█" * round(share * _BAR_WIDTH))
    entropies = answer_entropies(dataset.examples(), _SAMPLE_TOKENS)
    others = Table(box=SIMPLE, pad_edge=False, title="What the data allow", title_justify="left")
    for column in ("strategy", "ratio", "floor", "tokens per KV"):
        others.add_column(column, justify="left" if column == "strategy" else "right")
    for row in allowed(entropies, meta.max_group, meta.vocab_size):
        uses_ratio, uses_floor = row.strategy.startswith("decreasing"), row.strategy == "decreasing_v2"
        ratio, floor = f"{row.ratio:g}" if uses_ratio else "", f"{row.floor:g}" if uses_floor else ""
        others.add_row(row.strategy, ratio, floor, f"{row.tokens_per_kv:.2f}")
    values = sorted(value for answer in entropies for value in answer)
    return Group(
        histogram,
        Text(
            f"{len(dataset):,} examples, {num_tokens:,} response tokens in {num_groups:,} groups: "
            f"{num_tokens / num_groups:.3f} tokens per KV by {meta.strategy}."
        ),
        Text(f"Entropy in nats: mean {sum(values) / len(values):.2f}, median {values[len(values) // 2]:.2f}."),
        others,
    )


def size_counts(examples: Iterable[Example]) -> Counter[int]:
    """Group size -> number of trained groups."""
    counts: Counter[int] = Counter()
    for example in examples:
        sizes = example.group_sizes[example.response]
        counts.update(sizes[sizes > 0].tolist())
    return counts


def answer_entropies(examples: Iterable[Example], num_tokens: int) -> list[list[float]]:
    """The entropies of each answer, of about the first num_tokens trained tokens."""
    answers: list[list[float]] = []
    found = 0
    for example in examples:
        if found >= num_tokens:
            break
        pairs = zip(example.response.tolist(), example.entropy.tolist(), strict=True)
        for is_trained, run in groupby(pairs, key=lambda pair: pair[0]):
            if is_trained:
                answers.append([entropy for _, entropy in run])
                found += len(answers[-1])
    return answers


def allowed(
    answers: Sequence[Sequence[float]],
    max_group: int,
    vocab_size: int,
    ways: Sequence[tuple[Strategy, float, float]] = _OTHERS,
) -> list[Allowed]:
    """The tokens per KV of `answers` (their entropies) by each way: strategy, ratio, floor."""
    num_tokens = sum(map(len, answers))
    rows = []
    for strategy, ratio, floor in ways:
        groups = sum(len(segment(a, strategy, max_group, ratio, floor, vocab_size)) for a in answers)
        rows.append(Allowed(strategy, ratio, floor, num_tokens / max(groups, 1)))
    return rows
