"""Requests of compare.py: lengths from traces, scaled and drawn, and prompts of exactly these lengths."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comparison.runner import Plan, Workload
from comparison.workload import LEAST_OUTPUT, TRACES, Lengths, PromptWriter, draw, read_lengths, scale
from fakes import ByteTokenizer
from hamburger.clients.figures import percentile
from hamburger.engine.text.tokenizer import Tokenizer
from hamburger.model.checkpoints.sources import BUILTIN


@pytest.fixture(scope="module")
def writer() -> PromptWriter:
    return PromptWriter(Tokenizer.load(BUILTIN))


def test_the_traces_of_the_repository_hold_lengths_of_three_sources() -> None:
    rows = read_lengths(TRACES)
    assert Counter(row.source for row in rows) == {"azure_conv": 200, "azure_code": 200, "mooncake_conversation": 200}
    assert all(row.prompt_tokens > 0 and row.output_tokens > 0 for row in rows)


def test_sources_are_chosen_by_name() -> None:
    assert {row.source for row in read_lengths(TRACES, ["azure_code"])} == {"azure_code"}
    with pytest.raises(ValueError, match=r"no source sharegpt: choose from azure_conv, azure_code"):
        read_lengths(TRACES, ["azure_code", "sharegpt"])


def test_a_row_of_another_shape_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"source": "a", "prompt_tokens": 1, "output_tokens": 2}\n{"source": "a"}\n')
    with pytest.raises(ValueError, match=r"rows.jsonl, line 2: expected an object"):
        read_lengths(file)


@given(
    st.lists(st.builds(Lengths, st.sampled_from("ab"), st.integers(1, 10**6), st.integers(1, 10**5)), min_size=1),
    st.integers(64, 4096),
)
def test_scaled_lengths_fit_the_context(rows: list[Lengths], context: int) -> None:
    for row in scale(rows, context, least_prompt=30):
        assert row.prompt_tokens >= 30
        assert row.output_tokens >= LEAST_OUTPUT
        assert row.prompt_tokens + row.output_tokens <= context


def test_scaling_keeps_each_sources_shape() -> None:
    rows = read_lengths(TRACES)
    scaled = scale(rows, 512, least_prompt=30)
    assert [row.source for row in scaled] == [row.source for row in rows]
    for source in ("azure_conv", "mooncake_conversation"):
        outputs = sorted(row.output_tokens for row in scaled if row.source == source)
        assert percentile(outputs, 90) == pytest.approx(128, abs=1)
        assert percentile(outputs, 50) < 100
    shortest = min(rows, key=lambda row: (row.source != "azure_code", row.output_tokens))
    assert scaled[rows.index(shortest)].output_tokens == max(shortest.output_tokens, LEAST_OUTPUT)  # never longer


def test_a_context_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match=r"context is 32, which holds no prompt of 30 tokens"):
        scale([Lengths("a", 10, 10)], 32, least_prompt=30)


def test_a_draw_is_fair_to_sources_and_repeats() -> None:
    rows = read_lengths(TRACES)
    drawn = draw(rows, 32, seed=1)
    assert drawn == draw(rows, 32, seed=1) != draw(rows, 32, seed=2)
    assert sorted(Counter(row.source for row in drawn).values()) == [10, 11, 11]
    assert sorted(draw(rows[:3], 6, seed=1), key=rows.index) == sorted(rows[:3] * 2, key=rows.index)


def test_prompts_are_chats_of_exact_lengths(writer: PromptWriter) -> None:
    lengths = [Lengths("a", tokens, 5) for tokens in (writer.least_tokens, 60, 700)]
    requests = writer.requests(lengths, seed=3)
    assert [len(request.prompt_ids) for request in requests] == [row.prompt_tokens for row in lengths]
    text = Tokenizer.load(BUILTIN).decode(requests[1].prompt_ids, skip_special_tokens=False)
    assert text.count("<|im_start|>user\nCase-") == 1
    assert text.endswith("<|im_start|>assistant\n")


def test_a_prompt_shorter_than_its_frame_is_refused(writer: PromptWriter) -> None:
    with pytest.raises(ValueError, match=r"a prompt of 5 tokens is too short"):
        writer.requests([Lengths("a", 5, 5)], seed=0)


def test_rounds_have_equal_lengths_and_texts_of_their_own() -> None:
    plan = Plan(streams=[4], rounds=2, requests_per_stream=2, least_requests=8, seed=0, timeout=1)
    writer = PromptWriter(ByteTokenizer())
    workload = Workload(scale(read_lengths(TRACES), 512, writer.least_tokens), writer, plan)
    first, second, warm_up = (workload.requests(4, round_) for round_ in (0, 1, -1))
    assert [(len(r.prompt_ids), r.output_tokens) for r in first] == [
        (len(r.prompt_ids), r.output_tokens) for r in second
    ]
    assert len(first) == 8
    assert not {tuple(r.prompt_ids) for r in first} & {tuple(r.prompt_ids) for r in [*second, *warm_up]}
    assert len(warm_up) == 4
    assert all(request.output_tokens <= 8 for request in warm_up)
    assert workload.requests(4, 0) == first
