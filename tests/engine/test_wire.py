"""Frames: what goes in comes out, however the bytes are cut."""

from __future__ import annotations

import math
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_engines import fake_config, fake_info
from hamburger.engine.transport.wire import LENGTH, Decoder, Encoder, Ended, Failed, Progress, WireError, frames
from hamburger.engine.types.config import EngineArgs
from hamburger.engine.types.events import EngineReady, StepReport, StepStarted, Stop
from hamburger.engine.types.messages import (
    AbortRequest,
    CheckedDrafts,
    GroupOutput,
    RequestFailed,
    StepOutputs,
    StepStats,
    SubmitRequest,
    TokenLogprobs,
)
from hamburger.engine.types.sampling_params import SamplingParams

ids = st.integers(0, 2**31)
logprobs = st.builds(TokenLogprobs, st.floats(-1e9, 0), st.lists(st.tuples(ids, st.floats(-1e9, 0)), max_size=3))
drafts = st.builds(
    CheckedDrafts,
    st.sampled_from(["micro", "lookup", "prediction", "grammar"]),
    st.lists(ids, min_size=1, max_size=7),
    st.lists(st.floats(0, 1), min_size=1, max_size=7),
    st.integers(0, 7),
)
groups = st.builds(
    GroupOutput,
    request_id=st.text(),
    token_ids=st.lists(ids, max_size=4),
    stop_probs=st.lists(st.floats(0, 1), max_size=4),
    logprobs=st.none() | st.lists(logprobs, max_size=2),
    finish_reason=st.sampled_from([None, "stop", "length"]),
    stop_token_id=st.none() | ids,
    scheduled_time=st.floats(0, 1e9),
    prompt_logprobs=st.none() | st.lists(st.none() | logprobs, max_size=2),
    cached_slots=ids,
    drafts=st.none() | drafts,
    dropped_slots=ids,
)
requests = st.builds(
    SubmitRequest,
    request_id=st.text(),
    prompt_ids=st.lists(ids, max_size=20),
    params=st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 2**40),
        seed=st.integers(0, 2**63 - 1),
        top_k=st.integers(0, 2**62),
        temperature=st.floats(0, 100),
        logit_bias=st.dictionaries(ids, st.floats(-100, 100), max_size=3),
        stop=st.lists(st.text(min_size=1), max_size=2).map(tuple),
        stop_token_ids=st.lists(ids, max_size=3).map(tuple),
        confidence=st.floats(0, 1),
        prediction_ids=st.lists(ids, max_size=5).map(tuple),
    ),
    arrival_time=st.floats(0, 1e9),
)
stats = st.builds(
    StepStats,
    *[st.integers(0, 2**40)] * 7,
    st.lists(st.integers(1, 16), max_size=3),
    st.floats(0, 1e6),
    generated_slots=st.integers(0, 2**40),
    drafts=st.lists(drafts, max_size=2),
)
reports = st.builds(
    StepReport,
    st.builds(
        StepOutputs,
        st.lists(groups, max_size=3),
        st.lists(st.builds(RequestFailed, st.text(), st.sampled_from(["queue_timeout", "draining"]), st.text())),
        st.none() | stats,
    ),
    st.lists(st.integers(0, 2**40)),
    st.floats(0, 1e9),
)
values = st.one_of(
    requests,
    reports,
    st.builds(AbortRequest, st.text()),
    st.builds(StepStarted, st.floats(0, 1e9)),
    st.builds(Progress, st.text()),
    st.builds(Failed, st.sampled_from(["config", "checkpoint", "error"]), st.text()),
    st.just(Stop()),
    st.just(Ended()),
    st.just(EngineArgs(model="x", max_queue_seconds=math.inf)),
    st.just(EngineReady(fake_info(fake_config()), fake_config())),
)


@given(st.lists(values, max_size=5))
def test_values_come_back_as_they_were(sent: list[Any]) -> None:
    encoder, decoder = Encoder(), Decoder()
    for value in sent:
        frame = encoder.frame(value)
        assert LENGTH.unpack(frame[: LENGTH.size])[0] == len(frame) - LENGTH.size
        assert decoder.value(frame[LENGTH.size :]) == value


@given(st.lists(values, min_size=1, max_size=3), st.data())
def test_a_stream_that_ends_anywhere_gives_the_whole_frames_before(sent: list[Any], data: st.DataObject) -> None:
    encoder = Encoder()
    parts = [encoder.frame(value) for value in sent]
    joined = b"".join(parts)
    cut = data.draw(st.integers(0, len(joined)))
    whole = next((i for i in range(len(parts)) if cut < sum(map(len, parts[: i + 1]))), len(parts))
    mine, theirs = socket.socketpair()
    with mine, theirs:
        mine.sendall(joined[:cut])
        mine.close()
        assert list(frames(theirs)) == sent[:whole]


@pytest.mark.parametrize("rest", [b"", b"\xff", b"\x01\xc1", b"\x07\x80"])
def test_what_is_no_frame_raises(rest: bytes) -> None:
    with pytest.raises(WireError, match="cannot be read"):
        Decoder().value(rest)


def test_a_length_beyond_all_raises() -> None:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        mine.sendall(b"\xff\xff\xff\xff\x00")
        with pytest.raises(WireError, match="4294967295 bytes"):
            next(frames(theirs))
