"""What compare.py reckons: the figures of one measurement, medians over rounds, and ratios round by round. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields

from comparison.limits import WeightBytes
from hamburger.clients.figures import Answer, Distribution, ratio


@dataclass(frozen=True, slots=True)
class Figures:
    """One contestant at one number of streams in one round. Times are seconds.

    tokens_per_second: all output tokens over the whole time, prefill included.
    decode_tokens_per_second: the tokens after each answer's first arrival, over the time in which at least one answer
        was past it.
    tpot: time per output token of an answer, after its first arrival; the percentiles are over answers.
    gap_p99: 99th percentile of the gaps before tokens; a group's tokens share theirs.
    slots_mean, slots_peak: KV slots that the answers in flight had taken, over time.
    peak_memory_mib: resident memory of the contestant's processes together, at its highest.
    weight_bytes_per_second: of what the answers' macro-steps read, once each, over the time that they took.
    """

    answers: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    tokens_per_second: float
    decode_tokens_per_second: float | None
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float | None
    tpot_p99: float | None
    gap_p99: float | None
    tokens_per_kv: float
    slots_mean: float
    slots_peak: int
    peak_memory_mib: float | None = None
    weight_bytes_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement's place in a run, and what came of it: figures, or why there are none."""

    streams: int
    round: int
    name: str
    figures: Figures | None
    error: str | None = None

    @property
    def key(self) -> tuple[int, int, str]:
        return self.streams, self.round, self.name

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, object]) -> Cell:
        figures = value["figures"]
        made = Figures(**figures) if isinstance(figures, dict) else None
        return cls(
            int(str(value["streams"])), int(str(value["round"])), str(value["name"]), made, _text(value["error"])
        )


def _text(value: object) -> str | None:
    return None if value is None else str(value)


@dataclass(frozen=True, slots=True)
class Ratio:
    """One contestant over another, of the same figure: the median over the rounds in which both were measured."""

    streams: int
    name: str
    other: str
    figure: str
    median: float
    low: float
    high: float
    rounds: int


def figures_of(answers: Sequence[Answer], prompt_tokens: Sequence[int], peak_memory_mib: float | None) -> Figures:
    """The figures of answers that all came; prompt_tokens[i] are the i-th answer's. Of weights it says nothing."""
    seconds = max(answer.ended or 0.0 for answer in answers) - min(answer.started for answer in answers)
    tokens = sum(answer.completion_tokens for answer in answers)
    slots = sum(_kv_slots(answer) for answer in answers)
    ttft = Distribution.of(answer.ttft for answer in answers)
    tpot = Distribution.of(_tpot(answer) for answer in answers)
    gaps = Distribution.of(gap for answer in answers for gap in answer.inter_token_latencies)
    if ttft is None or seconds <= 0:
        raise ValueError("answers without tokens have no figures")
    mean, peak = slots_over_time(answers, prompt_tokens)
    later = sum(count for answer in answers for _, count in answer.arrivals[1:])
    return Figures(
        answers=len(answers),
        prompt_tokens=sum(prompt_tokens),
        output_tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        decode_tokens_per_second=ratio(later, _covered((a.arrivals[0][0], a.arrivals[-1][0]) for a in answers)),
        ttft_p50=ttft.p50,
        ttft_p99=ttft.p99,
        tpot_p50=tpot.p50 if tpot else None,
        tpot_p99=tpot.p99 if tpot else None,
        gap_p99=gaps.p99 if gaps else None,
        tokens_per_kv=tokens / slots,
        slots_mean=mean,
        slots_peak=peak,
        peak_memory_mib=peak_memory_mib,
    )


def weight_bytes_per_second(answers: Sequence[Answer], weights: WeightBytes) -> float | None:
    """Of a stream's macro-steps, whose groups arrive one by one."""
    read = sum(weights.of_answer([count for _, count in answer.arrivals]) for answer in answers)
    return ratio(read, sum(answer.arrivals[-1][0] - answer.arrivals[0][0] for answer in answers))


def slots_over_time(answers: Sequence[Answer], prompt_tokens: Sequence[int]) -> tuple[float, int]:
    """Mean and highest number of KV slots of the answers in flight.

    An answer has its prompt's, and one for each arrival but the last, whose slot is never written.
    """
    changes: list[tuple[float, int]] = []
    for answer, prompt in zip(answers, prompt_tokens, strict=True):
        taken = [(answer.started, prompt), *((moment, 1) for moment, _ in answer.arrivals[:-1])]
        changes += [*taken, (answer.arrivals[-1][0], -sum(slots for _, slots in taken))]
    changes.sort()
    held = peak = 0
    area = 0.0
    for (moment, change), (until, _) in zip(changes, [*changes[1:], changes[-1]], strict=True):
        held += change
        peak = max(peak, held)
        area += held * (until - moment)
    return ratio(area, changes[-1][0] - changes[0][0]) or 0.0, peak


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds that lie in at least one of the spans (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _tpot(answer: Answer) -> float | None:
    return ratio(
        answer.arrivals[-1][0] - answer.arrivals[0][0] if len(answer.arrivals) > 1 else None,
        sum(count for _, count in answer.arrivals[1:]),
    )


def _kv_slots(answer: Answer) -> int:
    """A server that speaks of no slots takes one a token."""
    return answer.kv_slots or answer.completion_tokens


def medians(cells: Sequence[Cell], bandwidth: float | None) -> dict[str, float | None]:
    """Each figure's median over cells of several rounds; None where no cell has it.

    limit_fraction is added: 1 would be macro-steps as fast as their weights are read at `bandwidth` bytes/s.
    """
    found: dict[str, float | None] = {}
    for field in fields(Figures):
        values = [getattr(cell.figures, field.name) for cell in cells if cell.figures is not None]
        known = [value for value in values if value is not None]
        found[field.name] = float(statistics.median(known)) if known else None
    rate = found["weight_bytes_per_second"]
    return {**found, "limit_fraction": rate / bandwidth if rate is not None and bandwidth else None}


def ratios(cells: Sequence[Cell], names: Sequence[str], others: Sequence[str], figure: str) -> list[Ratio]:
    """`figure` of each of `names` over that of each of `others`, by streams, from the rounds that have both."""
    values = {
        cell.key: value for cell in cells if cell.figures and (value := getattr(cell.figures, figure)) is not None
    }
    found = []
    for streams in dict.fromkeys(cell.streams for cell in cells):
        rounds = sorted({cell.round for cell in cells if cell.streams == streams})
        for name in names:
            for other in others:
                both = [
                    values[streams, r, name] / values[streams, r, other]
                    for r in rounds
                    if (streams, r, name) in values and (streams, r, other) in values and name != other
                ]
                if both:
                    middle = statistics.median(both)
                    found.append(Ratio(streams, name, other, figure, middle, min(both), max(both), len(both)))
    return found
