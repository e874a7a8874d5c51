"""Whether FlashInfer attends prompts' chunks: tried at the start, on the model's own shapes, against the Triton kernel.

`auto` takes it where it is installed, suits the model, gives the same numbers and was faster. `flashinfer` asks for it
and is refused where it does not work. Which is faster never changes what is asked for.
"""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hamburger.model.config import ConfigError, TrunkConfig
from hamburger.model.gpu.availability import Backend, chunk_attention_of, why_not_installed, why_unsuited
from hamburger.model.gpu.chunks import Chunk, ChunkAttention, window_of

ROUNDS = 9
_CONTEXT = 8192  # slots of the long context, where a sequence can have so many
_TOLERANCE = 2e-2  # relative norm: twice what bfloat16 may differ by
# A library that does not import, does not compile, or is of another version than this was written for.
_FAULTS = (
    ImportError, OSError, RuntimeError, ValueError, TypeError, AttributeError, AssertionError, LookupError,
    subprocess.SubprocessError,
)  # fmt: skip

Work = Callable[[], object]
Timer = Callable[[Work], float]  # milliseconds that the device was busy with it


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptStep:
    """The largest step of prompts: its slots, tokens of the longest sequence, slots of a block."""

    max_slots: int
    max_model_len: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Trial:
    """milliseconds: the attention of one step in all layers, a median. difference: relative norm."""

    milliseconds: Mapping[Backend, float]
    difference: float


class FlashInferFails(Exception):
    """What FlashInfer said, in one line."""


def settle_backend(
    asked: str,
    chosen: Backend,
    trunk: TrunkConfig,
    dtype: torch.dtype,
    run_trial: Callable[[], Trial],
) -> tuple[Backend, str | None]:
    """The backend for this model, and a remark about it for the log. Raises ConfigError for what is asked in vain.

    asked: attention_backend. chosen: by choose_backend. trunk: its sizes in this process.
    """
    if asked not in ("auto", "flashinfer") or chosen == "torch" or (asked == "auto" and why_not_installed()):
        return chosen, None
    reason, trial = why_unsuited(trunk, dtype), None
    if reason is None:
        try:
            trial = run_trial()
        except FlashInferFails as error:
            reason = f"FlashInfer fails on this machine ({error})"
        else:
            # Written so that NaN is no agreement.
            if not trial.difference <= _TOLERANCE:
                reason = f"its numbers differ from Triton's by {trial.difference:.2g}"
    if reason is not None or trial is None:
        if asked == "flashinfer":
            raise ConfigError(f"attention_backend is flashinfer, but {reason}: use auto or triton.")
        return "triton", f"no FlashInfer, as {reason}"
    ours, theirs = trial.milliseconds["triton"], trial.milliseconds["flashinfer"]
    remark = f"a step's prompts take {theirs:.3f} ms with FlashInfer, {ours:.3f} ms with Triton"
    return "flashinfer" if asked == "flashinfer" or theirs < ours else "triton", remark


def try_flashinfer(
    trunk: TrunkConfig, dtype: torch.dtype, device: torch.device, step: PromptStep, timer: Timer
) -> Trial:
    """Attend the same step with both, and time them in turn. Raises FlashInferFails."""
    scene = _Scene(trunk, dtype, device, step)
    works: dict[Backend, Work] = {}

    def attended(name: Backend) -> Tensor:
        works[name] = work = scene.work(chunk_attention_of(name, trunk, dtype, device))
        return work().double()

    exact = attended("triton")  # what is wrong with our own kernel is not FlashInfer's
    try:
        found = attended("flashinfer")
        milliseconds = medians(works, timer)
    except _FAULTS as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise FlashInferFails(lines[0]) from error
    return Trial(milliseconds, float((found - exact).norm() / exact.norm()))


def medians(works: Mapping[Backend, Work], timer: Timer) -> dict[Backend, float]:
    """Each one's median over some rounds, in each of which all are timed; a first round is not counted."""
    times: dict[Backend, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS + 1):
        for name, work in works.items():
            times[name].append(timer(work))
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}


def cuda_timer(device: torch.device) -> Timer:
    """By events on the device, so that a host which is too slow for it counts as well."""

    def timed(work: Work) -> float:
        stream = torch.cuda.current_stream(device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        work()
        end.record(stream)
        end.synchronize()
        return float(begin.elapsed_time(end))

    return timed


class _Scene:
    """Random queries and one layer's cache, which stands for all: a prompt's first chunk, and one after a long context.
    The blocks of each sequence lie shuffled."""

    def __init__(self, trunk: TrunkConfig, dtype: torch.dtype, device: torch.device, step: PromptStep) -> None:
        queries = max(1, min(step.max_slots // 2, step.max_model_len))
        context = max(queries, min(step.max_model_len, _CONTEXT))
        self._trunk, self._block_size = trunk, step.block_size
        self._chunks = [Chunk(0, 0, queries, 0), Chunk(1, queries, queries, context - queries)]
        width = -(-context // step.block_size)
        noise = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=dtype, device=device, generator=noise)

        self._tables = torch.randperm(2 * width, generator=noise, device=device).view(2, width)
        self._data = normal(2 * width, step.block_size, 2, trunk.num_kv_heads, trunk.head_dim)
        self._q = normal(2 * queries, trunk.num_heads, trunk.head_dim)

    def work(self, attention: ChunkAttention) -> Callable[[], Tensor]:
        """A step's plan and its attention in all layers; gives a layer's output for each window, joined."""
        windows = [window_of(self._trunk, layer) for layer in range(self._trunk.num_layers)]

        @torch.inference_mode()
        def attend_all() -> Tensor:
            attend = attention.plan(self._chunks, self._tables, self._block_size)
            outs = {window: torch.empty_like(self._q) for window in windows}
            for window in windows:
                attend(self._q, self._data, outs[window], window)
            return torch.cat(list(outs.values()))

        return attend_all
