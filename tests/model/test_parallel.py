"""A model that two processes hold together, over gloo: the same tokens as one rank's, whatever the model's kind."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafted import assert_same_text, checked, drafted, drafting_core, never_drafted
from hamburger.engine.core.core import EngineCore
from hamburger.engine.transport.wire import Encoder, Progress, RankMeet, RankPool
from hamburger.engine.types.messages import GroupOutput, SubmitRequest
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.model.assemble import assemble, assemble_shard
from hamburger.model.batch import ForwardBatch
from hamburger.model.config import ConfigError
from hamburger.model.execution import Execution
from hamburger.model.parallel.collectives import Collectives
from hamburger.model.parallel.shard import shard_tensor
from hamburger.model.parallel.step_shape import shard_trunk
from playing import play
from slow_cases import slow_but
from small_models import CPU, core_of, params, trunk_config
from split_models import BLOCK_SIZE, CASES, SIZE, Starving, shard_of, tensors_of
from trunk_shapes import OLMO2

Requests = dict[str, tuple[list[int], SamplingParams]]


class Pair:
    """This process as rank 0, and another one as rank 1, which `core` gives a model each time."""

    def __init__(self) -> None:
        self._encoder, self._group = Encoder(), Collectives(0, SIZE)
        self._mine, theirs = socket.socketpair()
        command = [
            sys.executable,
            str(Path(__file__).parent.parent / "helpers" / "split_models.py"),
            str(theirs.fileno()),
        ]
        with theirs:
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._send(RankMeet(listener.getsockname()[1], 0))
            self._group.host(CPU, listener)

    def core(
        self, case: str, starved: tuple[set[int], set[int]] = (set(), set()), *, drafts: bool = False, **options: Any
    ) -> EngineCore:
        """starved: calls of the group before which memory ends, of each rank. drafts: groups are verified."""
        self._send(Progress(" ".join(["starve", *map(str, starved[1])])))
        self._send(Progress(case))
        self._send(RankPool(options.setdefault("num_blocks", 256)))
        steps = shard_of(case, self._group)
        self.calls = Starving(steps, starved[0])
        steps.lead(self._send)
        core = core_of(steps, block_size=BLOCK_SIZE, **options)
        return drafting_core(steps, core.config) if drafts else core

    def close(self) -> None:
        self._mine.close()
        assert self._process.wait(30) == 0  # nothing it was told was wrong

    def _send(self, value: object) -> None:
        self._mine.sendall(self._encoder.frame(value))


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def one_rank(case: str, **options: Any) -> EngineCore:
    model = assemble(CASES[case], tensors_of(case), dtype=torch.float32, device=CPU, max_positions=512)
    return core_of(model, block_size=BLOCK_SIZE, **options)


def run(core: EngineCore, requests: Requests) -> tuple[dict[str, list[GroupOutput]], int, int]:
    """Each request's groups, and how many were preempted and slots found in the prefix cache. Four start each step."""
    outputs: dict[str, list[GroupOutput]] = {name: [] for name in requests}
    waiting = list(requests.items())
    num_preempted = num_found = 0
    while waiting or core.has_work:
        for name, (prompt_ids, sampling) in waiting[:4]:
            core.add(SubmitRequest(name, prompt_ids, sampling, 0.0))
        del waiting[:4]
        step = core.step()
        assert not step.failures
        assert step.stats is not None
        num_preempted += step.stats.num_preemptions
        num_found += step.stats.cache_hits
        for output in step.outputs:
            outputs[output.request_id].append(output)
    core.check_integrity()
    return outputs, num_preempted, num_found


def assert_equal(ours: dict[str, list[GroupOutput]], expected: dict[str, list[GroupOutput]]) -> None:
    for name, groups in expected.items():
        assert [group.token_ids for group in ours[name]] == [group.token_ids for group in groups], name
        for mine, theirs in zip(ours[name], groups, strict=True):
            assert mine.finish_reason == theirs.finish_reason
            assert mine.stop_probs == pytest.approx(theirs.stop_probs, abs=1e-4)
            for at in ("logprobs", "prompt_logprobs"):
                for a, b in zip(getattr(mine, at) or (), getattr(theirs, at) or (), strict=True):
                    assert (a is None) == (b is None)
                    if a is not None:
                        assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
                        assert [x for _, x in a.top] == pytest.approx([x for _, x in b.top], abs=1e-3)


def many_kinds(vocab_size: int) -> Requests:
    """Greedy and sampled, at every confidence, with whatever changes the choice of tokens."""
    draw = random.Random(7)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 1.3, "top_k": 20, "logprobs": 3},
        {"logprobs": 2, "prompt_logprobs": 2},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"min_tokens": 5},
        {"logit_bias": {4: 3.0, 90: 2.0}},
    ]
    confidences = (0.0, 0.3, 0.5, 0.8, 1.0)
    return {
        f"{i} {kind}": (
            [draw.randrange(2, vocab_size) for _ in range(draw.randrange(1, 40))],
            params(**kind, confidence=confidences[i % 5], seed=draw.randrange(2**31), max_tokens=draw.randrange(5, 14)),
        )
        for i, kind in enumerate(kinds * 3)
    }


@pytest.mark.parametrize("case", slow_but(["untied, biases", "short list", "plain"], CASES))
def test_the_tokens_of_one_rank(pair: Pair, case: str) -> None:
    requests = many_kinds(CASES[case].trunk.vocab_size)
    expected, *_ = run(one_rank(case), requests)
    ours, *_ = run(pair.core(case), requests)
    assert_equal(ours, expected)
    sizes = {len(group.token_ids) for groups in expected.values() for group in groups}
    assert sizes == set(range(1, CASES[case].max_group + 1))  # else micro-steps were not tried


@pytest.mark.parametrize("case", slow_but(["short list", "plain"], CASES))
def test_drafts_leave_the_tokens_of_one_rank_without_any(pair: Pair, case: str) -> None:
    asked = [
        SubmitRequest(str(i), prompt_ids, replace(sampling, ignore_eos=True, max_tokens=14), 0.0)
        for i, (prompt_ids, sampling) in enumerate(many_kinds(CASES[case].trunk.vocab_size).values())
    ]
    wanted = play(one_rank(case), never_drafted(asked), at_once=4).outputs
    ours = drafted(asked, wanted)
    found = play(pair.core(case, drafts=True), ours, at_once=4).outputs
    assert_same_text(found, wanted)
    seen = checked(found)
    assert min(seen["accepted"], seen["rejected"]) > 20
    if CASES[case].graft is not None:
        assert seen["micro"] > 20
    calm = pair.calls.number
    again = play(pair.core(case, ({calm // 3}, {calm // 2}), drafts=True), ours, at_once=4).outputs
    assert_same_text(again, wanted)  # with steps that the memory of a rank did not hold


@pytest.mark.parametrize("case", slow_but(["positions"], ["positions", "plain"]))
def test_prefix_cache_and_preemption(pair: Pair, case: str) -> None:
    options: dict[str, Any] = {"num_blocks": 25, "max_num_seqs": 8, "max_model_len": 100, "prefix_cache": True}
    shared = [5, 9, 17, 33, 2, 8, 41, 3, 6]
    requests = {
        str(i): ([*shared, i], params(temperature=i % 2, seed=i, confidence=0.3, max_tokens=30, ignore_eos=True))
        for i in range(8)
    }
    expected, *_ = run(one_rank(case, **{**options, "num_blocks": 500, "prefix_cache": False}), requests)
    ours, num_preempted, num_found = run(pair.core(case, **options), requests)
    assert_equal(ours, expected)
    assert num_preempted
    assert num_found


@pytest.mark.parametrize(
    "case", slow_but(["short list"], ["plain, untied", "short list", "positions", "merge adapter"])
)
def test_a_step_that_the_memory_of_a_rank_does_not_hold_is_done_again_in_halves(pair: Pair, case: str) -> None:
    requests = many_kinds(CASES[case].trunk.vocab_size)
    expected, *_ = run(one_rank(case), requests)
    run(pair.core(case), requests)
    calm = pair.calls.number
    draw = random.Random(case)
    first, second, third = (draw.randrange(calm // 2) for _ in range(3))  # later a request may be alone, and fails
    ours, *_ = run(pair.core(case, ({first}, {second, third})), requests)
    assert_equal(ours, expected)
    assert pair.calls.number > calm


@pytest.mark.parametrize("rank", slow_but([0], [0, 1]))
def test_memory_may_end_before_any_call(pair: Pair, rank: int) -> None:
    """Again and again, elsewhere in the same two steps each time."""
    asked = params(confidence=0.0, max_tokens=6, ignore_eos=True, prompt_logprobs=1)
    requests: Requests = {"a": ([3, 9, 27], asked), "b": ([5, 6], asked)}
    expected, *_ = run(one_rank("positions"), requests)
    calls = set(range(5, 10000, 197))
    core = pair.core("positions", (set(), calls) if rank else (calls, set()))
    for _ in range(15):
        core.reset()
        ours, *_ = run(core, requests)
        assert_equal(ours, expected)
    assert pair.calls.number > 5 * 197


class _Alone(Collectives):
    """A group of one: nobody is waited for."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor, parts: list[Tensor]) -> None:
        parts[0].copy_(x)

    def broadcast(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("case", slow_but(["fused"], ["positions", "fused", "merge adapter"]))
def test_the_kernels_make_the_calls_that_are_foreseen(case: str) -> None:
    """StepCalls would refuse any other."""
    pytest.importorskip("triton", reason="the package triton is not installed")
    execution = Execution(attention="triton", packed=False)
    steps = assemble_shard(
        CASES[case], tensors_of(case), _Alone(0, 1), dtype=torch.float32, device=CPU, max_positions=512,
        execution=execution,
    )  # fmt: skip
    steps.lead(lambda shape: None)
    asked = params(confidence=0.2, max_tokens=7, ignore_eos=True, prompt_logprobs=1)
    requests: Requests = {"a": ([5, 9, 17], asked), "b": ([33, 2], replace(asked, temperature=1.0))}
    expected, *_ = run(one_rank(case), requests)
    ours, *_ = run(core_of(steps, block_size=BLOCK_SIZE), requests)
    assert_equal(ours, expected)


def test_a_rank_holds_its_part_only() -> None:
    tensors = tensors_of("short list")
    whole = [name for name in tensors if "norm" in name or name.startswith(("embedder.", "stop_head.", "short_list"))]
    whole += ["micro_decoder.feature_proj.weight", "micro_decoder.embedding_proj.weight"]
    for name, tensor in tensors.items():
        padded = 98 if len(tensor) == 97 else len(tensor)  # the vocabulary
        expected = tensor.numel() if name in whole else tensor.numel() // len(tensor) * padded // SIZE
        parts = [shard_tensor(name, tensor, rank, SIZE) for rank in range(SIZE)]
        assert [part.numel() for part in parts] == [expected] * SIZE, name
        if name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight", "lm_head.weight")):
            # Nothing else copies these: a view would keep the whole tensor in memory.
            assert all(part.untyped_storage().nbytes() == part.nbytes for part in parts), name


@pytest.mark.parametrize(
    ("changes", "size", "possible"),
    [
        ({"num_heads": 9, "num_kv_heads": 3}, 2, "use 1 or 3"),
        ({"num_heads": 8, "num_kv_heads": 2}, 4, "use 1 or 2"),
        ({"num_heads": 8, "num_kv_heads": 8, "intermediate_size": 50}, 4, "use 1 or 2"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(changes: dict[str, Any], size: int, possible: str) -> None:
    with pytest.raises(ConfigError, match=rf"tensor_parallel_size is {size}, .*num_key_value_heads .*{possible}\."):
        shard_trunk(trunk_config(**changes), size)


def test_norms_over_all_heads_are_not_shared_out() -> None:
    trunk = trunk_config(**OLMO2)
    assert shard_trunk(trunk, 1) == trunk
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 2, but olmo2 norms .*: use 1\."):
        shard_trunk(trunk, 2)


def test_a_batch_has_no_field_that_the_ranks_are_not_told() -> None:
    """Whoever adds one to ForwardBatch decides what the others need of it (ParallelSteps._receive)."""
    told = {
        "token_ids", "group_sizes", "max_group_size", "positions", "write_slots", "block_tables", "context_slots",
        "query_slots", "context_slots_host", "num_single", "emit", "max_group_limit", "scored", "text_lengths",
    }  # fmt: skip
    rank_0_alone = {
        "confidence",
        "group_limits",
        "sampling",
        "checks",
        "max_free_limit",
    }  # the last of graphs
    refused = {"loras", "settled_from", "settled_slots"}  # by EngineArgs
    assert {field.name for field in fields(ForwardBatch)} == told | rank_0_alone | refused
