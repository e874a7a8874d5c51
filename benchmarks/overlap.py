"""What overlapping steps hides of the host's work, and what it costs where there is nothing to hide it behind.

    python benchmarks/overlap.py              # the engine's own host side before a device that is only a clock
    python benchmarks/overlap.py --model      # the embedded default on this machine's CPU

The first takes the real core, scheduler and runner (tensors of the batch, the chain on the device, results to groups);
only the model is left out: a step is finished so many milliseconds after it was launched, or after the one before it.
What launching kernels costs the host is not in it. The second answers the same requests in both orders. Both alternate.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from hamburger.engine.build import build_core
from hamburger.engine.core.batch import BatchResult, LaunchedStep, ScheduledBatch
from hamburger.engine.core.core import EngineCore
from hamburger.engine.core.overlap import OverlappedCore
from hamburger.engine.device.runner import Runner
from hamburger.engine.types.config import EngineArgs, EngineConfig
from hamburger.engine.types.messages import SubmitRequest
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.model.batch import ForwardBatch, StepOutput
from hamburger.model.config import GraftConfig, ModelConfig, TrunkConfig
from hamburger.model.kv_cache import PagedKVCache

ROUNDS = 5
STEPS = 50  # of a round
MAX_GROUP = 4
TRUNK = TrunkConfig(
    vocab_size=1024, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=32,
    rms_norm_eps=1e-5, rope_theta=1e4, tie_word_embeddings=True, max_position_embeddings=8192, eos_token_ids=(1,),
)  # fmt: skip


class NoModel:
    """What a Runner asks of a model; its groups are there at once."""

    def __init__(self) -> None:
        graft = GraftConfig(max_group=MAX_GROUP, merger_heads=1, micro_layers=1, feature_layers=(0,))
        self.config = ModelConfig(trunk=TRUNK, graft=graft)
        self.embed_tokens = torch.nn.Embedding(TRUNK.vocab_size, TRUNK.hidden_size)
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(2, TRUNK.vocab_size, (1024, MAX_GROUP), generator=generator)
        self._sizes: Tensor = torch.randint(1, MAX_GROUP + 1, (1024,), generator=generator)

    def step(self, batch: ForwardBatch, cache: PagedKVCache) -> StepOutput:
        rows, width = len(batch.emit), batch.max_group_limit
        sizes = torch.minimum(self._sizes[:rows], batch.group_limits).clamp(max=width)
        return StepOutput(self._tokens[:rows, :width], sizes, torch.ones(rows, width), None)


class Device:
    """Works off what it is given, one step after the other."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._free_at = seconds, 0.0

    def take(self) -> float:
        """A step is launched now. When it will be finished."""
        self._free_at = max(time.perf_counter(), self._free_at) + self._seconds
        return self._free_at


class DeviceStep:
    def __init__(self, step: LaunchedStep, device: Device) -> None:
        self._step, self._device, self._ready_at = step, device, device.take()

    def result(self) -> BatchResult:
        time.sleep(max(0.0, self._ready_at - time.perf_counter()))
        return self._step.result()

    def then(self, batch: ScheduledBatch) -> DeviceStep:
        return DeviceStep(self._step.then(batch), self._device)


class DeviceRunner:
    def __init__(self, runner: Runner, device: Device) -> None:
        self._runner, self._device = runner, device

    def launch(self, batch: ScheduledBatch) -> DeviceStep:
        return DeviceStep(self._runner.launch(batch), self._device)

    def run(self, batch: ScheduledBatch) -> BatchResult:
        return self.launch(batch).result()


def decoding(core: EngineCore, streams: int) -> Callable[[], float]:
    """Let so many streams decode. Returns what measures the mean seconds of STEPS steps."""
    for i in range(streams):
        params = SamplingParams(temperature=0, ignore_eos=True, seed=i, confidence=0.5, max_tokens=8000)
        core.add(SubmitRequest(str(i), [2] * 32, params, time.monotonic()))
    while core.step().outputs == []:
        pass

    def measure() -> float:
        for _ in range(2):  # what ran since the last call is finished long ago
            core.step()
        start = time.perf_counter()
        for _ in range(STEPS):
            core.step()
        return (time.perf_counter() - start) / STEPS

    return measure


def host_side() -> None:
    print("| streams | device, ms | plain step, ms | overlapped | host's part, plain | hidden of it (range) |")
    print("| ---: | ---: | ---: | ---: | ---: | --- |")
    for streams in (1, 16, 64, 256):
        config = EngineConfig(
            max_model_len=8192, max_num_seqs=256, max_num_batched_slots=8192, block_size=32, num_blocks=256 * 256,
            eos_token_ids=(1,), max_group=MAX_GROUP, prefix_cache=False,
        )  # fmt: skip
        for milliseconds in (2.0, 10.0):
            # The pool itself is never touched: its tensors would be the model's.
            runner = Runner(cast(Any, NoModel()), PagedKVCache(TRUNK, 1, 32, torch.float32, torch.device("cpu")))
            cores = [
                kind(config, DeviceRunner(runner, Device(milliseconds / 1000))) for kind in (EngineCore, OverlappedCore)
            ]
            measures = [decoding(core, streams) for core in cores]
            rounds = [[measure() * 1000 for measure in measures] for _ in range(ROUNDS)]
            plain, ahead = (statistics.median(column) for column in zip(*rounds, strict=True))
            hidden = sorted((p - a) / (p - milliseconds) for p, a in rounds)
            print(
                f"| {streams} | {milliseconds:g} | {plain:.2f} | {ahead:.2f} | {plain - milliseconds:.2f} "
                f"| {statistics.median(hidden):.0%} ({hidden[0]:.0%} to {hidden[-1]:.0%}) |"
            )


def answer_all(core: EngineCore, streams: int, confidence: float) -> tuple[float, int]:
    """Answers of 16 to 64 tokens, two for each stream. Seconds, and tokens."""
    draw, waiting, tokens = random.Random(streams), 2 * streams, 0
    start = time.perf_counter()
    for i in range(waiting):
        params = SamplingParams(
            temperature=0, ignore_eos=True, seed=i, confidence=confidence, max_tokens=draw.randint(16, 64)
        )
        core.add(SubmitRequest(str(i), draw.choices(range(100, 40_000), k=40), params, time.monotonic()))
    while core.has_work:
        tokens += sum(len(output.token_ids) for output in core.step().outputs)
    return time.perf_counter() - start, tokens


def on_this_cpu() -> None:
    for streams in (1, 16):
        plain, info = build_core(EngineArgs(device="cpu", max_num_seqs=streams, prefix_cache=False, groups="composed"))
        ahead = OverlappedCore(plain.config, cast(Runner, plain._runner))
        rates: list[list[float]] = []
        for _ in range(ROUNDS):
            both = [answer_all(core, streams, info.default_confidence) for core in (plain, ahead)]
            rates.append([tokens / seconds for seconds, tokens in both])
        ratios = sorted(a / p for p, a in rates)
        medians = [statistics.median(column) for column in zip(*rates, strict=True)]
        print(
            f"{streams} streams: plain {medians[0]:.0f} tok/s, overlapped {medians[1]:.0f}, "
            f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="store_true", help="measure the embedded default instead")
    if parser.parse_args().model:
        on_this_cpu()
    else:
        host_side()
