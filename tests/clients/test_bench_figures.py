"""Figures of the load generator, from scripted times."""

from __future__ import annotations

import pytest

from hamburger.clients.figures import Answer, Distribution, percentile, summarise
from hamburger.clients.wire import StreamEvent, Usage


def grouped_answer() -> Answer:
    """Sent at 10; 2 tokens at 11, 4 at 12, 1 at 12.5; usage at 12.6; done at 12.7."""
    answer = Answer(10.0)
    for now, tokens in ((11.0, 2), (12.0, 4), (12.5, 1)):
        answer.add(StreamEvent("x", list(range(tokens)), 0), now)
    answer.add(StreamEvent(usage=Usage(20, 7, 3)), 12.6)
    answer.ended = 12.7
    return answer


def test_the_latencies_of_an_answer_in_groups() -> None:
    answer = grouped_answer()
    assert answer.ttft == 1.0
    assert answer.tpot == pytest.approx(1.5 / 6)
    assert answer.inter_token_latencies == [0.25] * 4 + [0.5]
    assert answer.e2e == pytest.approx(2.7)
    assert (answer.completion_tokens, answer.kv_slots, answer.counted_by) == (7, 3, "usage")


def test_a_role_and_a_usage_have_no_time_and_an_end_token_has() -> None:
    answer = Answer(0.0)
    answer.add(StreamEvent(), 1.0)
    answer.add(StreamEvent("a"), 2.0)
    answer.add(StreamEvent("b"), 3.0)
    answer.add(StreamEvent(finish_reason="stop"), 4.0)
    answer.add(StreamEvent(usage=Usage(1, 3, None)), 9.0)
    assert (answer.first, answer.last, answer.tpot) == (2.0, 4.0, 1.0)
    assert answer.inter_token_latencies == [1.0]
    assert answer.kv_slots is None


def test_without_usage_tokens_are_counted_by_groups_or_by_events() -> None:
    grouped, plain = Answer(0.0), Answer(0.0)
    grouped.add(StreamEvent("ab", [1, 2], 0), 1.0)
    grouped.add(StreamEvent("flushed text"), 1.0)
    plain.add(StreamEvent("ab"), 1.0)
    assert (grouped.completion_tokens, grouped.kv_slots, grouped.counted_by) == (2, 1, "groups")
    assert (plain.completion_tokens, plain.kv_slots, plain.counted_by) == (1, None, "events")
    assert plain.tpot is None


def test_percentiles_interpolate_between_closest_ranks() -> None:
    assert [percentile([1.0, 2.0, 3.0, 4.0], p) for p in (0, 50, 90, 100)] == pytest.approx([1, 2.5, 3.7, 4])
    assert percentile([7.0], 99) == 7.0
    spread = Distribution.of([3.0, None, 1.0])
    assert spread is not None
    assert (spread.mean, spread.p50, spread.p90, spread.p99) == pytest.approx((2.0, 2.0, 2.8, 2.98))
    assert Distribution.of([None]) is None


def test_a_level_counts_only_what_succeeded() -> None:
    broken = Answer(9.0, ended=14.0, error="HTTP 429: full")
    broken.add(StreamEvent("x", [1, 2], 0), 13.0)
    summary = summarise([grouped_answer(), broken, Answer(10.0, ended=11.0, error="HTTP 429: full"), grouped_answer()])
    assert (summary.ok, summary.failures) == (2, {"HTTP 429: full": 2})
    assert summary.seconds == 5.0
    assert (summary.output_tokens, summary.prompt_tokens, summary.kv_slots) == (14, 40, 6)
    assert summary.output_tokens_per_second == pytest.approx(14 / 5)
    assert summary.total_tokens_per_second == pytest.approx(54 / 5)
    assert summary.requests_per_second == pytest.approx(2 / 5)
    assert summary.tokens_per_kv == pytest.approx(14 / 6)
    assert summary.ttft == Distribution(1.0, 1.0, 1.0, 1.0)


def test_figures_that_one_server_does_not_give_are_unknown_not_zero() -> None:
    plain = Answer(0.0, ended=2.0)
    plain.add(StreamEvent("a"), 1.0)
    summary = summarise([grouped_answer(), plain])
    assert (summary.prompt_tokens, summary.total_tokens_per_second, summary.tokens_per_kv) == (None, None, None)
    assert summary.counted_by == "events"
    nothing = summarise([Answer(0.0, ended=0.0, error="x")])
    assert (nothing.ok, nothing.output_tokens_per_second, nothing.ttft, nothing.tokens_per_kv) == (0, 0.0, None, None)


def test_a_server_that_tells_of_no_drafts_leaves_them_unknown() -> None:
    summary = summarise([grouped_answer()])
    assert (summary.macro_steps, summary.drafted_tokens, summary.acceptance) == (3, None, None)
    plain = Answer(0.0, ended=2.0)
    plain.add(StreamEvent("a"), 1.0)
    assert (summarise([plain]).macro_steps, summarise([plain]).tokens_per_step) == (None, None)
