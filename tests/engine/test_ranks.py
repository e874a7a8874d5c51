"""The ranks' processes: an LLM on two of them, and every way that one of them, or a step, can end."""

from __future__ import annotations

import io
import json
import logging
import os
import queue
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from engines_of_servers import children, until
from fakes import ScriptedRunner
from hamburger.engine import build
from hamburger.engine.core.batch import BatchResult, ScheduledBatch
from hamburger.engine.device.load import resolve, shard_steps_of
from hamburger.engine.device.memory import step_bytes
from hamburger.engine.device.step_costs import measure_costs
from hamburger.engine.drafting.costs import MeasuredCosts
from hamburger.engine.llm import LLM
from hamburger.engine.logs import LogFormat, configure_logging
from hamburger.engine.ranks import build as build_rank
from hamburger.engine.ranks.build import RankBuild
from hamburger.engine.ranks.ranks import LeadingRunner, Ranks
from hamburger.engine.transport.wire import Encoder, Failed, RankArgs, RankMeet, RankPool
from hamburger.engine.types.config import EngineArgs
from hamburger.engine.types.errors import EngineDead, OutOfMemory
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.model.checkpoints.load import save_checkpoint
from hamburger.model.checkpoints.sources import BUILTIN, CheckpointError
from hamburger.model.config import ConfigError, ModelConfig
from hamburger.model.kv_cache import slot_bytes
from hamburger.model.parallel.collectives import Collectives
from hamburger.model.parallel.step_shape import StepShape
from processes import is_alive
from small_models import graft_config, random_tensors, trunk_config
from split_models import Starving


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("split"))


def made(folder: Path, **trunk: Any) -> Path:
    """A model in a folder."""
    config = ModelConfig(trunk=trunk_config(vocab_size=49152, eos_token_ids=(2,), **trunk), graft=graft_config())
    save_checkpoint(folder, config, random_tensors(config, seed=1))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN / name, folder / name)
    return folder


def llm(folder: Path, size: int, **options: Any) -> LLM:
    threads = torch.get_num_threads()
    try:
        return LLM(
            str(folder),
            device="cpu",
            dtype="float32",
            kv_cache_memory=2**20,
            max_num_seqs=4,
            tensor_parallel_size=size,
            **{"confidence": 0.3, **options},
        )
    finally:
        torch.set_num_threads(threads)  # which the ranks have shared out


def rank_processes() -> list[int]:
    return children(os.getpid(), "hamburger.engine.ranks.rank")


def test_an_llm_on_two_ranks(folder: Path) -> None:
    params = [SamplingParams(max_tokens=20, temperature=t, seed=5, ignore_eos=True, logprobs=1) for t in (0, 1, 0.5)]
    prompts = ["Once upon a time", "The sky is", "x"]
    one = llm(folder, 1)
    expected = one.generate(prompts, params, progress=False)
    two = llm(folder, 2)
    [process] = rank_processes()
    assert two.info.device == "2 x cpu"
    assert two.info.total_slots == one.info.total_slots  # of the same kv_cache_memory
    answers = two.generate(prompts, params, progress=False)
    assert [answer.groups for answer in answers] == [answer.groups for answer in expected]
    assert any(len(group) > 1 for answer in answers for group in answer.groups)
    os.kill(process, signal.SIGKILL)
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(EngineDead, match=f"rank 1, its process {process}, was ended by SIGKILL"):
            two.generate(prompts, params, progress=False)
    assert time.monotonic() - began < 20


def test_ranks_hold_codes_of_their_own_heads(folder: Path) -> None:
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=1)
    found = []
    for size in (1, 2):
        model = llm(folder, size, kv_cache_dtype="int8", confidence=1.0)
        assert model.info.kv_cache_dtype == "int8"
        [answer] = model.generate(["Once upon a time"], params, progress=False)
        found.append([entry.logprob for entry in answer.logprobs or ()])
    assert len(found[0]) == 8
    assert found[1] == pytest.approx(found[0], abs=0.01)


def test_ranks_measure_their_steps_and_check_drafts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def measure(*args: Any) -> MeasuredCosts:
        measured.append(measure_costs(*args))
        return MeasuredCosts((1, 2), (1.0, 1.0), (0.0, 0.0))  # or drafts may not pay here

    monkeypatch.setattr(build, "measure_costs", measure)
    params = [SamplingParams(max_tokens=24, temperature=t, seed=5, ignore_eos=True, logprobs=1) for t in (0, 1, 0)]
    prompts = ["Once upon a time", "The sky is", "x"]
    expected = llm(folder, 1, groups="verified", confidence=1.0).generate(prompts, params, progress=False)
    two = llm(folder, 2, groups="verified", confidence=None)
    assert (two.info.groups, two.info.max_group, two.info.default_confidence) == ("verified", 8, 0.0)
    foreseen = [replace(p, prediction_ids=tuple(e.token_ids)) for p, e in zip(params, expected, strict=True)]
    answers = two.generate(prompts, foreseen, progress=False)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert any(len(group) > 1 for answer in answers for group in answer.groups)
    of_one, of_two = measured
    every = {1, 2, 3, 4, 6, 8, 9, 12, 16, 17, 24, 32}  # or fewer, where steps are slow
    assert {1, 2, 4, 8, 16, 32} <= set(of_two.rows) <= every
    assert {1, 2, 4, 8, 16, 32} <= set(of_one.rows) <= every
    assert min(of_two.steps) > 0


class _Lift(logging.Handler):
    """Lifts a process's limit of memory when the first step has failed."""

    def __init__(self, process: int) -> None:
        super().__init__()
        self._process = process

    def emit(self, record: logging.LogRecord) -> None:
        _, most = resource.prlimit(self._process, resource.RLIMIT_AS)
        resource.prlimit(self._process, resource.RLIMIT_AS, (most, most))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="prlimit is Linux's")
def test_a_rank_whose_memory_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Really: its process may take 11 MiB more, and its half of 128 scored slots' logits takes 12."""
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, prompt_logprobs=0)
    prompts = [" ".join(f"word{i}" for i in range(60))]
    folder = made(tmp_path, hidden_size=128)
    expected = llm(folder, 1).generate(prompts, params, progress=False)
    two = llm(folder, 2)
    [process] = rank_processes()
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[0])
    _, most = resource.prlimit(process, resource.RLIMIT_AS)
    resource.prlimit(process, resource.RLIMIT_AS, (pages * resource.getpagesize() + 11 * 2**20, most))
    lift = _Lift(process)
    logging.getLogger("hamburger.engine.core.core").addHandler(lift)
    try:
        answers = two.generate(prompts, params, progress=False)
    finally:
        logging.getLogger("hamburger.engine.core.core").removeHandler(lift)
    assert "ran out of memory: The device has not enough memory: rank 1" in caplog.text
    assert [answer.groups for answer in answers] == [answer.groups for answer in expected]
    os.kill(process, signal.SIGKILL)  # what was logged has the engine in its frames
    until(lambda: not rank_processes())


@pytest.mark.slow
def test_ranks_end_with_their_llm(folder: Path) -> None:
    two = llm(folder, 2)
    [process] = rank_processes()
    del two
    until(lambda: not is_alive(process))


def test_a_refusal_leaves_no_process(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 4, .*use 1 or 2"):
        llm(folder, 4)
    with pytest.raises(ConfigError, match=r"the KV pool has .*raise kv_cache_memory"):
        LLM(str(folder), device="cpu", kv_cache_memory=1000, tensor_parallel_size=2)
    until(lambda: not rank_processes())


def test_what_keeps_a_rank_from_loading_is_told(tmp_path: Path) -> None:
    losses = queue.SimpleQueue[Failed]()
    ranks = Ranks(EngineArgs(model=str(tmp_path / "nowhere"), tensor_parallel_size=2), losses.put)
    with pytest.raises(CheckpointError, match="nowhere"):
        ranks.loaded()
    assert losses.get(timeout=10).kind == "checkpoint"
    until(lambda: not rank_processes())


def test_a_killed_rank_is_told_while_nothing_runs(tmp_path: Path) -> None:
    losses = queue.SimpleQueue[Failed]()
    ranks = Ranks(EngineArgs(model=str(tmp_path / "nowhere"), tensor_parallel_size=2), losses.put)
    until(rank_processes)
    [process] = rank_processes()
    os.kill(process, signal.SIGKILL)
    assert f"rank 1, its process {process}, was ended by SIGKILL" in losses.get(timeout=10).message
    with pytest.raises(EngineDead, match="SIGKILL"):
        ranks.loaded()


BROKEN_RANK = """
import sys
from hamburger.engine.ranks import rank

def broken(*given):
    raise RuntimeError("a broken kernel")

rank._follow = broken
rank.main(sys.argv)
"""


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_rank_logs_as_rank_0_does(log_format: LogFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = logging.StreamHandler(io.StringIO())
    started: list[list[str]] = []

    def note(command: list[str], **options: object) -> NoReturn:
        started.append(command)
        raise OSError("noted")

    root, losses = logging.getLogger(), queue.SimpleQueue[Failed]()
    handlers, level = root.handlers[:], logging.getLogger("hamburger").level
    try:
        configure_logging("error", log_format, handler)
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", note)
            ranks = Ranks(EngineArgs(tensor_parallel_size=2), losses.put)
            assert "noted" in losses.get(timeout=10).message
            ranks.close()  # until here it is held: its end tells of no loss
    finally:
        root.handlers[:] = handlers
        logging.getLogger("hamburger").setLevel(level)
        root.setLevel(logging.WARNING)
    assert started[0][-2:] == ["error", log_format]
    near, far = socket.socketpair()
    with near, far:
        near.sendall(Encoder().frame(RankArgs(EngineArgs(), 1)))
        rank = subprocess.run(
            [sys.executable, "-c", BROKEN_RANK, str(far.fileno()), *started[0][-2:]],
            pass_fds=[far.fileno()], capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    if log_format == "json":
        [line] = map(json.loads, rank.stderr.splitlines())
        assert (line["level"], line["message"]) == ("error", "The engine stopped on an error.")
        assert "a broken kernel" in line["traceback"]
    else:
        assert " ERROR hamburger.engine.transport.engine_process: The engine stopped on an error." in rank.stderr


class _Interrupted(ScriptedRunner):
    def run(self, batch: ScheduledBatch) -> BatchResult:
        raise KeyboardInterrupt


def test_a_step_that_was_broken_off_is_the_last() -> None:
    runner = LeadingRunner(_Interrupted(), Ranks(EngineArgs(), lambda failed: None))
    with pytest.raises(KeyboardInterrupt):
        runner.run(ScheduledBatch([]))
    with pytest.raises(EngineDead, match="a step of its ranks was broken off"):
        runner.run(ScheduledBatch([]))


def test_memory_that_does_not_hold_a_step_ends_nothing() -> None:
    runner = LeadingRunner(
        ScriptedRunner(out_of_memory=lambda step, batch: step < 3), Ranks(EngineArgs(), lambda failed: None)
    )
    for _ in range(2):
        with pytest.raises(OutOfMemory, match="scripted"):
            runner.run(ScheduledBatch([]))
    assert runner.run(ScheduledBatch([])) == BatchResult([])


class _Dying(Ranks):
    """Ranks of which one ends when it is told to."""

    def __init__(self) -> None:
        super().__init__(EngineArgs(), lambda failed: None)

    def lose_one(self) -> None:
        self._watch.report_loss(Failed("error", "rank 1 has ended"))


class _Aborted(ScriptedRunner):
    """A rank ends during the second step, whose calls are aborted: they end without an error."""

    def __init__(self, ranks: _Dying, **options: Any) -> None:
        super().__init__(**options)
        self._ranks = ranks

    def run(self, batch: ScheduledBatch) -> BatchResult:
        if self.num_steps == 1:
            self._ranks.lose_one()
        return super().run(batch)


@pytest.mark.parametrize("has_memory", [True, False])
def test_nothing_of_a_step_that_a_rank_did_not_survive_is_believed(has_memory: bool) -> None:
    ranks = _Dying()
    runner = LeadingRunner(_Aborted(ranks, out_of_memory=lambda step, batch: step > 1 and not has_memory), ranks)
    assert runner.run(ScheduledBatch([])) == BatchResult([])
    for _ in range(2):
        with pytest.raises(EngineDead, match="rank 1 has ended"):
            runner.run(ScheduledBatch([]))


class _ScriptedMeter:
    """Reads what it was told."""

    def __init__(self, *peaks: int) -> None:
        self._peaks, self.began = [*peaks], 0

    def begin(self) -> None:
        self.began += 1

    def peak(self) -> int:
        return self._peaks.pop(0)

    def used(self) -> int:
        raise NotImplementedError  # of graphs, which ranks do not have


class _Two:
    """Rank 0, and rank 1 in a thread, which measures `number` steps."""

    def __init__(self, folder: Path, meter: _ScriptedMeter, number: int, starved: set[int]) -> None:
        self.args = EngineArgs(
            model=str(folder),
            device="cpu",
            dtype="float32",
            tensor_parallel_size=2,
            max_num_batched_slots=40,
            max_num_seqs=8,
            enforce_eager=True,
        )
        threads, ranks, shapes = torch.get_num_threads(), Collectives(0, 2), queue.SimpleQueue[StepShape]()
        self.follower = RankBuild(self.args, 1)
        Starving(self.follower.steps, starved)
        steps = shard_steps_of(resolve(self.args), self.args, ranks)
        torch.set_num_threads(threads)  # which the ranks have shared out
        self.steps, self._told = steps, list[int]()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            meet = RankMeet(listener.getsockname()[1], number)
            self._thread = threading.Thread(
                target=lambda: self._told.append(self.follower.meet(meet, shapes.get, meter)), daemon=True
            )
            self._thread.start()
            ranks.host(torch.device("cpu"), listener)
        self.steps.lead(shapes.put)

    def step_bytes(self, meter: _ScriptedMeter) -> int:
        free_bytes = 1000 * slot_bytes(self.steps.trunk_config, torch.float32)
        return step_bytes(
            self.steps, self.args, "composed", 64, free_bytes, meter, kv_dtype=torch.float32, captures=False
        )

    def told(self) -> int:
        self._thread.join(60)
        return self._told[0]


def test_all_ranks_run_the_largest_steps_together_and_measure_their_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_rank, "rank_pool_bytes", lambda args, device, for_steps: 1000 - for_steps)
    ours, theirs = _ScriptedMeter(200, 700), _ScriptedMeter(500, 300)
    two = _Two(folder, theirs, 2, set())
    assert two.step_bytes(ours) == 700
    assert two.told() == 1000 - 500
    assert (ours.began, theirs.began) == (3, 3)
    cache = two.follower.cache(RankPool(7))
    assert cache.data[0].shape == (8, two.args.block_size, 2, two.steps.config.trunk.num_kv_heads // 2, 8)


def test_largest_steps_that_do_not_fit_on_another_rank_are_refused(folder: Path) -> None:
    two = _Two(folder, _ScriptedMeter(1), 1, {4})
    with pytest.raises(ConfigError, match=r"max_num_batched_slots is 40 .*lower them\. \(rank 1\)"):
        two.step_bytes(_ScriptedMeter())
    two.told()
