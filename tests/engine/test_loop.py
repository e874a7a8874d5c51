"""run_loop: what it tells of its steps, and when."""

from __future__ import annotations

import queue
from itertools import pairwise

import pytest

from fake_engines import fake_core
from fakes import EOS, ScriptedRunner
from hamburger.engine.hosts.engine_loop import Inbox, run_loop
from hamburger.engine.types.events import LoopEvent, Message, StepReport, StepStarted, Stop
from hamburger.engine.types.messages import SubmitRequest
from hamburger.engine.types.sampling_params import SamplingParams


def request(name: str) -> SubmitRequest:
    return SubmitRequest(name, [1, 2, 3], SamplingParams(seed=1), arrival_time=0.0)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_s_beginning_is_told_after_a_pause_only(overlap: bool) -> None:
    core = fake_core(ScriptedRunner({"a": [[5], [6], [EOS]], "b": [[7, EOS]]}), clock=lambda: 0.0, overlap=overlap)
    inbox: Inbox = queue.SimpleQueue()
    told: list[LoopEvent] = []
    waiting: list[Message] = [Stop(), request("b")]

    def deliver(event: LoopEvent) -> None:
        told.append(event)
        if isinstance(event, StepReport) and not event.goes_on and waiting:
            inbox.put(waiting.pop())

    inbox.put(request("a"))
    run_loop(core, inbox, deliver, clock=lambda: float(len(told)))
    reports = [event for event in told if isinstance(event, StepReport)]
    # Before each report either the one before said that this step begins, or its beginning was told.
    for before, event in pairwise(told[:-1]):  # the last report gives up what is unfinished, without a step
        if isinstance(event, StepReport):
            assert isinstance(before, StepStarted) or (isinstance(before, StepReport) and before.goes_on)
        else:
            assert isinstance(before, StepReport)
            assert not before.goes_on
    assert sum(isinstance(event, StepStarted) for event in told) == 2
    assert [event.goes_on for event in reports][-1] is False
    groups = [output.token_ids for report in reports for output in report.outputs.outputs if output.token_ids]
    assert groups == [[5], [6], [EOS], [7, EOS]]
