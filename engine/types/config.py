"""How an engine is set up: what the user asks (EngineArgs) and what was resolved from it (EngineConfig). No torch.

EngineArgs is the one declaration of the engine's settings: LLM's keywords, the options, variables and YAML keys of
`hamburger serve` and their ranges follow from its fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypedDict

from hamburger.engine.types.messages import Groups
from hamburger.engine.types.setting import Setting, declared_settings, setting
from hamburger.engine.types.settling import Settling
from hamburger.model.config import ConfigError

Quantization = Literal["auto", "none", "int8", "int4"]
AttentionBackend = Literal["auto", "torch", "triton"]
OverlapSteps = Literal["auto", "on", "off"]
KVCacheDtype = Literal["auto", "bfloat16", "int8"]
VERIFIED_GROUP = 8  # tokens; longer runs of drafts than the micro decoder makes come from lookup and predictions


# What nobody asks for where no answer settles.
SETTLE_SETTINGS = frozenset({"settle_window", "settle_growth", "settle_keep", "settle_limit"})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """What the user asks for; None and "auto" are resolved when the engine is built. docs/configuration.md says more.

    num_engines: how many engines share this machine, this one included: each sizes its pool for its part of it. The
    server counts them; nobody sets it.

    Raises ConfigError that names the field when a value is out of range, or does not go with another.
    """

    model: str | None = setting(
        None,
        "what to serve: a folder, hub id, .ckpt or .gguf file, or `builtin`, the plain base under the embedded model "
        "(default: the embedded model)",
    )
    base: str | None = setting(
        None, "folder or hub id of the base model, for a checkpoint that holds only a part of it"
    )
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    dtype: str = setting(
        "auto",
        "numbers to compute with; auto: bfloat16 where the hardware multiplies it",
        choices=("auto", "bfloat16", "float32", "float16"),
    )
    # none keeps the dtype. auto is none on a GPU, and where the compiled kernels of a CPU cannot run.
    quantization: Quantization = setting(
        "auto",
        "bits of the weights; auto: on a CPU 4 where the checkpoint has no more, else 8, on a GPU none",
    )
    # All else between the matrices with it. auto: triton where its kernels can run.
    attention_backend: AttentionBackend = setting("auto", "what runs attention on a GPU: auto, torch or triton")
    tensor_parallel_size: int = setting(
        1,
        "over how many GPUs of this machine one model is split; on CPU, over how many processes",
        at_least=1,
    )
    max_model_len: int | None = setting(None, "most tokens of prompt and answer together", at_least=2)
    max_num_seqs: int = setting(64, "most answers generated at once", at_least=1)
    max_num_batched_slots: int = setting(512, "most slots that one step computes", at_least=1)
    kv_cache_memory: int | None = setting(
        None, "size of the KV pool, such as 4GiB (default: a share of free memory)", at_least=1, is_size=True
    )
    # auto: that of the states; beside the compiled kernels bfloat16. int8: with a float32 scale a slot and head.
    kv_cache_dtype: KVCacheDtype = setting(
        "auto", "numbers in the KV pool: auto, bfloat16 or int8, which halves them for a small loss"
    )
    block_size: int = setting(32, "slots of one block of the pool", at_least=1)
    confidence: float | None = setting(
        None, "confidence of requests that name none (default: the checkpoint's)", at_least=0, at_most=1
    )
    # verified: the text of the model itself; composed: the published form, whose groups are one slot.
    groups: Literal["auto", "composed", "verified"] = setting(
        "auto",
        "verified: the model checks all that is drafted, and the text is its own; composed: a group of tokens is one "
        "KV slot, and the text changes; auto: as the checkpoint says",
    )
    # Of verified groups. What an answer holds of its old tokens: docs/architecture.md#settled-slots.
    settle: bool = setting(False, "whether old tokens of an answer give most of their KV slots back")
    settle_window: int | None = setting(
        None, "newest tokens of an answer that keep their slots (default: what suits the model)", at_least=32
    )
    settle_growth: float | None = setting(
        None, "share of an answer's tokens that keep them, if that is more (default: what suits the model)", at_least=0,
        at_most=63 / 64,
    )  # fmt: skip
    settle_keep: float | None = setting(
        None, "share of older tokens that keep their slots (default: what suits the model)", at_least=1 / 64,
        at_most=63 / 64,
    )  # fmt: skip
    settle_limit: int | None = setting(
        None, "most KV slots of an answer: beyond it what settled first is lost (default: no limit)"
    )
    # Beside the base, several in one step. A GPU keeps memory free for so many of that rank.
    max_loras: int = setting(0, "most LoRA adapters that are loaded at once; 0: those that lora names", at_least=0)
    max_lora_rank: int = setting(64, "highest rank of a LoRA adapter", at_least=1)
    max_queue: int = setting(1024, "most requests that may wait", at_least=1, of_server=True)
    max_queue_seconds: float = setting(600.0, "longest that a request may wait", above=0, of_server=True)
    # As long as the pool still holds them.
    prefix_cache: bool = setting(True, "whether prompts that begin alike share the KV slots of their beginning")
    enforce_eager: bool = setting(False, "whether a GPU decodes without CUDA graphs")
    overlap_steps: OverlapSteps = setting(
        "auto", "whether a step is prepared while the one before it runs: auto (on a GPU), on or off"
    )
    num_engines: int = 1

    def __post_init__(self) -> None:
        _check_ranges(self)
        _at_least_one("num_engines", self.num_engines)
        _check_step_size(self)
        for name in () if self.settle else sorted(SETTLE_SETTINGS):
            if getattr(self, name) is not None:
                raise ConfigError(f"{name} is given, but settle is off: turn that on, or leave {name} out.")
        if self.tensor_parallel_size > 1:
            self._check_split()

    def settling(self, fitted: Mapping[str, float]) -> Settling:
        """When old tokens of answers settle, if they do. fitted: what suits the model (settle_settings.py).

        Raises ConfigError for a settle_limit that holds too little.
        """
        return Settling.of_model(fitted, self.settle_window, self.settle_growth, self.settle_keep, self.settle_limit)

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
        if self.settle:
            raise ConfigError(
                f"settle is on, but tensor_parallel_size is {size}, and ranks do not tell each other which slots stay: "
                "turn it off, or use tensor_parallel_size 1."
            )
        if self.max_loras:
            raise ConfigError(
                f"max_loras is {self.max_loras}, but tensor_parallel_size is {size}, and ranks do not tell each other "
                "which slots pass an adapter: use tensor_parallel_size 1, or serve an adapter merged into its model."
            )
        if ":" in self.device:
            raise ConfigError(
                f"device is {self.device}, but tensor_parallel_size is {size}, which takes the first {size} GPUs: use "
                "cuda, and CUDA_VISIBLE_DEVICES to choose among them."
            )


class LLMSettings(TypedDict, total=False):
    """What LLM takes by keyword: for type checkers and editors, who cannot read it off EngineArgs. A test compares."""

    device: str
    dtype: str
    quantization: Quantization
    attention_backend: AttentionBackend
    tensor_parallel_size: int
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_slots: int
    kv_cache_memory: int | None
    kv_cache_dtype: KVCacheDtype
    block_size: int
    confidence: float | None
    groups: Literal["auto", "composed", "verified"]
    settle: bool
    settle_window: int | None
    settle_growth: float | None
    settle_keep: float | None
    settle_limit: int | None
    max_loras: int
    max_lora_rank: int
    prefix_cache: bool
    enforce_eager: bool
    overlap_steps: OverlapSteps


# Each setting's declaration by its name.
ENGINE_SETTINGS: Mapping[str, Setting] = declared_settings(EngineArgs)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The resolved numbers that scheduling depends on. Fields are those of EngineArgs, and:

    num_blocks: blocks of the KV pool; together they hold at least one sequence of max_model_len at one slot a token,
        so anything that was admitted can finish.
    eos_token_ids: the model's end tokens. max_group: most tokens of a group. groups: what they are, resolved.
    settling: when old tokens of answers settle; None: never.
    even_context: slots of context at which attention takes as long as all else of a prompt's slot. Beside running
        answers, prompts behind more than that get fewer slots in a step. None: as many.

    Raises ConfigError that names the field when a value is out of range.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_slots: int
    block_size: int
    num_blocks: int
    eos_token_ids: tuple[int, ...]
    max_group: int
    groups: Groups = "composed"
    settling: Settling | None = None
    even_context: int | None = None
    max_queue: int = ENGINE_SETTINGS["max_queue"].default
    max_queue_seconds: float = ENGINE_SETTINGS["max_queue_seconds"].default
    prefix_cache: bool = ENGINE_SETTINGS["prefix_cache"].default

    def __post_init__(self) -> None:
        _check_ranges(self)
        _at_least_one("max_group", self.max_group)
        _check_step_size(self)
        if self.total_slots < self.max_model_len:
            raise ConfigError(
                f"max_model_len is {self.max_model_len} tokens, but the KV pool holds {self.total_slots} slots "
                f"({self.num_blocks} blocks of {self.block_size}): lower max_model_len or raise kv_cache_memory."
            )

    @property
    def total_slots(self) -> int:
        return self.num_blocks * self.block_size


def _check_ranges(config: EngineArgs | EngineConfig) -> None:
    """Raise ConfigError for the first field outside the range that its setting declares."""
    for name, declared in ENGINE_SETTINGS.items():
        if hasattr(config, name) and (fault := declared.fault(getattr(config, name))) is not None:
            raise ConfigError(f"{name} is {getattr(config, name)!r}: {fault}")


def _check_step_size(config: EngineArgs | EngineConfig) -> None:
    if config.max_num_batched_slots < config.max_num_seqs:
        # One slot for each running sequence, so that every step moves all of them.
        raise ConfigError(
            f"max_num_batched_slots is {config.max_num_batched_slots}: it must be at least max_num_seqs "
            f"({config.max_num_seqs})."
        )


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} is {value}: it must be at least 1.")
