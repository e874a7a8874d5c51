"""The ranks' processes: an LLM on two of them, and every way that one of them, or a step, can end."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from engines_of_servers import children, until
from fakes import ScriptedRunner
from hamburger.engine.batch import BatchResult, ScheduledBatch
from hamburger.engine.config import EngineArgs
from hamburger.engine.errors import EngineDead
from hamburger.engine.llm import LLM
from hamburger.engine.ranks import LeadingRunner, Ranks
from hamburger.engine.sampling_params import SamplingParams
from hamburger.engine.wire import Failed
from hamburger.model.checkpoint import save_checkpoint
from hamburger.model.config import ConfigError, ModelConfig
from hamburger.model.sources import BUILTIN, CheckpointError
from processes import is_alive
from small_models import graft_config, random_tensors, trunk_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("split")
    config = ModelConfig(trunk=trunk_config(vocab_size=49152, eos_token_ids=(2,)), graft=graft_config())
    save_checkpoint(folder, config, random_tensors(config, seed=1))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN / name, folder / name)
    return folder


def llm(folder: Path, size: int) -> LLM:
    threads = torch.get_num_threads()
    try:
        return LLM(
            str(folder),
            device="cpu",
            dtype="float32",
            kv_cache_memory=2**20,
            max_num_seqs=4,
            confidence=0.3,
            tensor_parallel_size=size,
        )
    finally:
        torch.set_num_threads(threads)  # which the ranks have shared out


def rank_processes() -> list[int]:
    return children(os.getpid(), "hamburger.engine.rank")


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


class _Interrupted(ScriptedRunner):
    def run(self, batch: ScheduledBatch) -> BatchResult:
        raise KeyboardInterrupt


def test_a_step_that_was_broken_off_is_the_last() -> None:
    runner = LeadingRunner(_Interrupted(), Ranks(EngineArgs(), lambda failed: None))
    with pytest.raises(KeyboardInterrupt):
        runner.run(ScheduledBatch([]))
    with pytest.raises(EngineDead, match="a step of its ranks was broken off"):
        runner.run(ScheduledBatch([]))


def test_ranks_that_ran_out_of_memory_say_so_to_the_end() -> None:
    inner = ScriptedRunner(out_of_memory=lambda step, batch: True)
    runner = LeadingRunner(inner, Ranks(EngineArgs(), lambda failed: None))
    for _ in range(2):
        with pytest.raises(EngineDead, match="scripted An engine of several ranks cannot go on: lower max_num_batched"):
            runner.run(ScheduledBatch([]))
