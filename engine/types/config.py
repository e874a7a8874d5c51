"""How an engine is set up: what the user asks (EngineArgs) and what was resolved from it (EngineConfig). No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from hamburger.model.config import ConfigError

Quantization = Literal["auto", "none", "int8", "int4"]
AttentionBackend = Literal["auto", "torch", "triton"]
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
OverlapSteps = Literal["auto", "on", "off"]
OVERLAP_STEPS: tuple[OverlapSteps, ...] = get_args(OverlapSteps)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """What the user asks for; None and "auto" are resolved when the engine is built.

    model: folder, hub id, `.ckpt` or GGUF file; None means the embedded default, `builtin` the plain base under it.
    base: the base model's folder or hub id, for checkpoints that hold only a part of it.
    max_model_len: most tokens of prompt and answer together; None means what the model was made for.
    max_num_seqs: most sequences that run at once. max_num_batched_slots: most slots that one step computes.
    kv_cache_memory: bytes for the KV pool; None sizes it from free memory. block_size: slots of one block.
    confidence: the default of requests that name none; None takes the checkpoint's.
    max_queue: most requests that may wait. max_queue_seconds: the longest that one may wait.
    quantization: `none` keeps the weights' dtype. On CPU `int8`, `int4`; `auto` takes 4 bits for weights that have no
        more, 8 for the others, and the dtype where the compiled kernels cannot run. On a GPU `int8`; `auto` is `none`.
    attention_backend: what runs attention and all else between the matrices on a GPU; `auto` is `triton` where its
        kernels can run, else `torch`.
    prefix_cache: prompts that begin alike share the slots of their beginning, while the pool still holds them.
    enforce_eager: on a GPU, launch every operation of a decoding step anew rather than replay CUDA graphs.
    tensor_parallel_size: over how many devices the model and its KV pool are split, one process a device; on CPU, over
        how many processes.
    overlap_steps: whether each step is prepared and launched while the one before it runs; `auto` does so on a GPU.
    num_engines: how many engines share this machine, this one included: each sizes its pool for its part of it.

    Raises ConfigError that names the field when a value is out of range.
    """

    model: str | None = None
    base: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_slots: int = 512
    kv_cache_memory: int | None = None
    block_size: int = 32
    confidence: float | None = None
    max_queue: int = 1024
    max_queue_seconds: float = 600.0
    prefix_cache: bool = True
    quantization: Quantization = "auto"
    enforce_eager: bool = False
    attention_backend: AttentionBackend = "auto"
    tensor_parallel_size: int = 1
    overlap_steps: OverlapSteps = "auto"
    num_engines: int = 1

    def __post_init__(self) -> None:
        if self.quantization not in QUANTIZATIONS:
            raise ConfigError(f"quantization is {self.quantization!r}: it must be one of {', '.join(QUANTIZATIONS)}.")
        if self.overlap_steps not in OVERLAP_STEPS:
            raise ConfigError(f"overlap_steps is {self.overlap_steps!r}: it must be one of {', '.join(OVERLAP_STEPS)}.")
        if self.max_model_len is not None:
            _at_least("max_model_len", self.max_model_len, 2)
        if self.kv_cache_memory is not None:
            _at_least("kv_cache_memory", self.kv_cache_memory, 1)
        if self.confidence is not None and not 0 <= self.confidence <= 1:
            raise ConfigError(f"confidence is {self.confidence}: it must be in [0, 1].")
        _at_least("tensor_parallel_size", self.tensor_parallel_size, 1)
        if self.tensor_parallel_size > 1:
            self._check_split()
        _at_least("num_engines", self.num_engines, 1)
        _check_limits(self)

    def _check_split(self) -> None:
        size = self.tensor_parallel_size
        if self.quantization not in ("auto", "none"):
            raise ConfigError(
                f"quantization is {self.quantization}, but tensor_parallel_size is {size}, and the kernels for it run "
                "whole models only: use none, or tensor_parallel_size 1."
            )
        if self.overlap_steps == "on":
            raise ConfigError(
                f"overlap_steps is on, but tensor_parallel_size is {size}, and steps of several ranks do not "
                "overlap: use auto or off."
            )
        if ":" in self.device:
            raise ConfigError(
                f"device is {self.device}, but tensor_parallel_size is {size}, which takes the first {size} GPUs: use "
                "cuda, and CUDA_VISIBLE_DEVICES to choose among them."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The resolved numbers that scheduling depends on. Fields are those of EngineArgs, and:

    num_blocks: blocks of the KV pool; together they hold at least one sequence of max_model_len at one slot a token,
        so anything that was admitted can finish.
    eos_token_ids: the model's end tokens. max_group: most tokens of a group.

    Raises ConfigError that names the field when a value is out of range.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_slots: int
    block_size: int
    num_blocks: int
    eos_token_ids: tuple[int, ...]
    max_group: int
    max_queue: int = 1024
    max_queue_seconds: float = 600.0
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        _at_least("max_model_len", self.max_model_len, 2)
        _at_least("max_group", self.max_group, 1)
        _check_limits(self)
        if self.total_slots < self.max_model_len:
            raise ConfigError(
                f"max_model_len is {self.max_model_len} tokens, but the KV pool holds {self.total_slots} slots "
                f"({self.num_blocks} blocks of {self.block_size}): lower max_model_len or raise kv_cache_memory."
            )

    @property
    def total_slots(self) -> int:
        return self.num_blocks * self.block_size


def _check_limits(config: EngineArgs | EngineConfig) -> None:
    _at_least("max_num_seqs", config.max_num_seqs, 1)
    _at_least("block_size", config.block_size, 1)
    _at_least("max_queue", config.max_queue, 1)
    if not 0 < config.max_queue_seconds <= math.inf:
        raise ConfigError(f"max_queue_seconds is {config.max_queue_seconds}: it must be above 0.")
    if config.max_num_batched_slots < config.max_num_seqs:
        # One slot for each running sequence, so that every step moves all of them.
        raise ConfigError(
            f"max_num_batched_slots is {config.max_num_batched_slots}: it must be at least max_num_seqs "
            f"({config.max_num_seqs})."
        )


def _at_least(name: str, value: float, low: int) -> None:
    if not value >= low:
        raise ConfigError(f"{name} is {value}: it must be at least {low}.")
