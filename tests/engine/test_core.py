"""EngineCore: what a step reports, and that memory pressure never changes an answer."""

from __future__ import annotations

import pytest

from fake_engines import fake_config, fake_core
from fakes import EOS, ScriptedRunner
from hamburger.engine.core.batch import BatchResult, ScheduledBatch
from hamburger.engine.core.core import EngineCore
from hamburger.engine.types.messages import AbortRequest, RequestFailed, StepOutputs, StepStats, SubmitRequest
from hamburger.engine.types.sampling_params import SamplingParams


def still() -> float:
    return 0.0


class Clock:
    """Advances by one second each time it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def request(name: str, prompt_ids: list[int], max_tokens: int | None = None) -> SubmitRequest:
    return SubmitRequest(name, prompt_ids, SamplingParams(max_tokens=max_tokens, seed=1), arrival_time=0.0)


def stats(outputs: StepOutputs) -> StepStats:
    assert outputs.stats is not None
    return outputs.stats


def test_a_request_from_its_first_step_to_its_last() -> None:
    core = fake_core(ScriptedRunner({"a": [[1, 2], [3, 4, EOS, 5]]}), clock=Clock())
    core.add(request("a", [7, 8, 9, 10, 11]))
    first = core.step()
    [output] = first.outputs
    assert (output.token_ids, output.finish_reason, output.scheduled_time) == ([1, 2], None, 1.0)
    assert stats(first) == StepStats(
        num_running=1, num_waiting=0, num_preemptions=0, used_slots=8, total_slots=1024, prompt_slots=5,
        decoded_sequences=1, group_sizes=[2], seconds=1.0, generated_slots=1,
    )  # fmt: skip
    second = core.step()
    [output] = second.outputs
    assert (output.token_ids, output.finish_reason, output.stop_token_id) == ([3, 4, EOS], "stop", EOS)
    assert stats(second) == StepStats(
        num_running=0, num_waiting=0, num_preemptions=0, used_slots=0, total_slots=1024, prompt_slots=0,
        decoded_sequences=1, group_sizes=[3], seconds=1.0, generated_slots=1,
    )  # fmt: skip
    assert not core.has_work


def test_prompt_slots_count_replays_but_no_new_group() -> None:
    runner = ScriptedRunner({name: [[i] for i in range(40)] for name in "ab"})
    core = fake_core(runner, fake_config(num_blocks=4, max_model_len=16), still)
    core.add(request("a", [1] * 4, max_tokens=8))
    core.add(request("b", [2] * 4, max_tokens=8))
    seen = []
    while core.has_work:
        step = stats(core.step())
        seen.append((step.num_running, step.num_preemptions, step.prompt_slots, step.decoded_sequences))
    # b is preempted with 5 groups in its 6th step; when a is done it replays 4 + 4 slots and computes its newest group.
    assert seen == [
        (2, 0, 8, 2), (2, 0, 0, 2), (2, 0, 0, 2), (2, 0, 0, 2), (2, 0, 0, 2),
        (1, 1, 0, 1), (1, 0, 0, 1), (0, 0, 0, 1),
        (1, 0, 8, 1), (1, 0, 0, 1), (0, 0, 0, 1),
    ]  # fmt: skip
    assert runner.emitted == {"a": [[i] for i in range(8)], "b": [[i] for i in range(8)]}


def test_a_step_without_work_reports_an_idle_engine() -> None:
    runner = ScriptedRunner()
    core = fake_core(runner, clock=still)
    core.add(request("a", [1, 2]))
    core.step()
    core.abort(AbortRequest("a"))
    core.abort(AbortRequest("a"))
    core.abort(AbortRequest("never seen"))
    core.check_integrity()
    step = core.step()
    assert (stats(step).num_running, stats(step).used_slots, step.outputs) == (0, 0, [])
    assert runner.num_steps == 1


def test_a_request_that_waits_too_long_fails() -> None:
    clock = Clock()
    core = fake_core(ScriptedRunner(eos_chance=0), fake_config(max_num_seqs=1, max_queue_seconds=10), clock)
    core.add(request("a", [1], max_tokens=200))
    core.add(request("b", [1]))
    failures: list[RequestFailed] = []
    while not failures:
        failures = core.step().failures
    assert [(f.request_id, f.kind) for f in failures] == [("b", "queue_timeout")]
    assert "10 s" in failures[0].message
    assert 10 < clock.now < 14
    core.check_integrity()


def test_fail_all_gives_everything_up() -> None:
    core = fake_core(ScriptedRunner(eos_chance=0), fake_config(max_num_seqs=1), still)
    core.add(request("a", [1]))
    core.add(request("b", [1]))
    core.step()
    outputs = core.fail_all("draining", "closing")
    assert [(f.request_id, f.kind, f.message) for f in outputs.failures] == [
        ("a", "draining", "closing"),
        ("b", "draining", "closing"),
    ]
    assert (stats(outputs).num_running, stats(outputs).num_waiting, stats(outputs).used_slots) == (0, 0, 0)
    assert not core.has_work
    core.check_integrity()


def test_a_runner_that_loses_a_group_is_an_error() -> None:
    class Lossy:
        def run(self, batch: ScheduledBatch) -> BatchResult:
            return BatchResult([])

    core = EngineCore(fake_config(), Lossy(), still)
    core.add(request("a", [1]))
    with pytest.raises(RuntimeError, match="0 groups for 1"):
        core.step()


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_tiny_pool_gives_the_same_answers_as_a_large_one(block_size: int) -> None:
    def answers(num_blocks: int) -> tuple[dict[str, list[int]], int]:
        config = fake_config(max_model_len=40, block_size=block_size, num_blocks=num_blocks, max_num_seqs=6)
        core = fake_core(ScriptedRunner(eos_chance=0.01), config, still)
        tokens: dict[str, list[int]] = {}
        preemptions = 0
        for i in range(30):
            core.add(request(f"r{i}", [i, i + 1, i + 2], max_tokens=5 + i))
        while core.has_work:
            step = core.step()
            core.check_integrity()
            preemptions += stats(step).num_preemptions
            for output in step.outputs:
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
        return tokens, preemptions

    large, calm = answers(1024)
    tiny, preemptions = answers(40 // block_size)
    assert calm == 0
    assert preemptions > 0
    assert len(tiny) == 30
    assert tiny == large
