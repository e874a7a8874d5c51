"""Sequence: two lengths, positions, and the one place that trims a group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import EOS, scripted_logprobs, scripted_stop_prob
from hamburger.engine.core.sequence import Sequence
from hamburger.engine.types.messages import GroupOutput, SubmitRequest
from hamburger.engine.types.sampling_params import SamplingParams

STOP_IDS = (10, 11)


def make_sequence(prompt_ids: list[int], params: SamplingParams, max_model_len: int = 10_000) -> Sequence:
    sequence = Sequence(SubmitRequest("r", prompt_ids, params, 1.0), (EOS,), max_model_len)
    sequence.scheduled_time = 2.0
    return sequence


def feed(sequence: Sequence, groups: list[list[int]]) -> list[GroupOutput]:
    """Accept groups until one finishes the answer."""
    outputs: list[GroupOutput] = []
    for group in groups:
        first = sequence.num_output_tokens
        outputs.append(
            sequence.accept(
                group,
                [scripted_stop_prob(first + i, token) for i, token in enumerate(group)],
                [scripted_logprobs(first + i, token, 1) for i, token in enumerate(group)],
            )
        )
        if outputs[-1].finish_reason is not None:
            break
    return outputs


def test_two_lengths_and_positions() -> None:
    sequence = make_sequence([5, 6, 7], SamplingParams())
    feed(sequence, [[20, 21, 22], [23], [24, 25]])
    assert (sequence.num_slots, sequence.num_tokens, sequence.num_output_tokens) == (6, 9, 6)
    assert [list(sequence.slot_tokens(i)) for i in range(6)] == [[5], [6], [7], [20, 21, 22], [23], [24, 25]]
    assert [sequence.slot_position(i) for i in range(6)] == [0, 1, 2, 5, 6, 8]


@pytest.mark.parametrize(
    ("params", "group", "kept", "reason", "stop_token_id"),
    [
        (SamplingParams(), [1, EOS, 2], 2, "stop", EOS),
        (SamplingParams(ignore_eos=True), [1, EOS, 2], 3, None, None),
        (SamplingParams(stop_token_ids=(7,)), [7, EOS], 1, "stop", 7),
        (SamplingParams(stop_token_ids=(7,), ignore_eos=True), [EOS, 7, 8], 2, "stop", 7),
        (SamplingParams(max_tokens=2), [1, 2, 3, 4], 2, "length", None),
        (SamplingParams(max_tokens=2), [1, EOS], 2, "stop", EOS),
        (SamplingParams(max_tokens=4), [1, 2, 3, 4], 4, "length", None),
        (SamplingParams(min_tokens=1), [EOS, EOS, 3], 2, "stop", EOS),
        (SamplingParams(min_tokens=2), [EOS, EOS], 2, None, None),
    ],
)
def test_where_a_group_ends(
    params: SamplingParams, group: list[int], kept: int, reason: str | None, stop_token_id: int | None
) -> None:
    [output] = feed(make_sequence([1], params), [group])
    assert output.token_ids == group[:kept]
    assert (output.finish_reason, output.stop_token_id) == (reason, stop_token_id)


def test_the_context_limit_is_in_tokens() -> None:
    sequence = make_sequence([1] * 6, SamplingParams(), max_model_len=10)
    outputs = feed(sequence, [[1, 2, 3], [4, 5, 6]])
    assert [output.token_ids for output in outputs] == [[1, 2, 3], [4]]
    assert outputs[-1].finish_reason == "length"
    assert (sequence.num_tokens, sequence.num_slots) == (10, 8)


def test_a_sequence_takes_no_empty_group_and_none_after_its_end() -> None:
    sequence = make_sequence([1], SamplingParams(max_tokens=1))
    with pytest.raises(RuntimeError, match="cannot take"):
        sequence.accept([], [], None)
    sequence.accept([1], [0.0], None)
    with pytest.raises(RuntimeError, match="cannot take"):
        sequence.accept([1], [0.0], None)


groups_strategy = st.lists(
    st.lists(st.sampled_from([1, 2, 3, *STOP_IDS, EOS]), min_size=1, max_size=4), min_size=1, max_size=12
)


@given(
    groups=groups_strategy,
    max_tokens=st.integers(1, 30),
    context_left=st.integers(1, 30),
    min_tokens=st.integers(0, 10),
    ignore_eos=st.booleans(),
    use_stop_ids=st.booleans(),
)
def test_accept_keeps_exactly_the_reference_prefix(
    groups: list[list[int]], max_tokens: int, context_left: int, min_tokens: int, ignore_eos: bool, use_stop_ids: bool
) -> None:
    """The reference knows no groups: it walks the flat tokens and stops at the first that ends the answer."""
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(min_tokens, max_tokens),
        ignore_eos=ignore_eos,
        stop_token_ids=STOP_IDS if use_stop_ids else (),
    )
    flat = [token for group in groups for token in group]
    ends = ({*STOP_IDS} if use_stop_ids else set()) | (set() if ignore_eos else {EOS})
    expected: list[int] = []
    reason = None
    for token in flat:
        expected.append(token)
        if token in ends and len(expected) > params.min_tokens:
            reason = "stop"
        elif len(expected) == min(max_tokens, context_left):
            reason = "length"
        if reason:
            break

    sequence = make_sequence([9, 9], params, max_model_len=2 + context_left)
    outputs = feed(sequence, groups)

    assert [token for output in outputs for token in output.token_ids] == expected == sequence.output_ids
    assert [output.token_ids for output in outputs] == sequence.groups
    assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert outputs[-1].finish_reason == reason
    assert outputs[-1].stop_token_id == (expected[-1] if reason == "stop" else None)
    assert [p for output in outputs for p in output.stop_probs] == [
        scripted_stop_prob(i, token) for i, token in enumerate(expected)
    ]
    assert [x for output in outputs for x in output.logprobs or []] == [
        scripted_logprobs(i, token, 1) for i, token in enumerate(expected)
    ]
    position = 1
    for k, group in enumerate(sequence.groups):
        position += len(group)
        assert sequence.slot_position(2 + k) == position
