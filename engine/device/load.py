"""From EngineArgs to a model on its device: the whole of it, or one rank's part.

engine/build.py and engine/ranks/build.py use it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from hamburger.engine.device.cpu_threads import threads_of_rank
from hamburger.engine.device.memory import pool_bytes
from hamburger.engine.types.config import EngineArgs
from hamburger.engine.types.messages import Groups
from hamburger.engine.types.settling import Settling
from hamburger.model.assemble import assemble, assemble_shard
from hamburger.model.checkpoints.load import OpenCheckpoint, open_checkpoint
from hamburger.model.checkpoints.settle_probe import equal_shares, load_probe
from hamburger.model.checkpoints.settle_settings import settle_settings
from hamburger.model.checkpoints.sources import ModelSource, resolve_source
from hamburger.model.config import ConfigError, ModelConfig, TrunkConfig
from hamburger.model.cpu.library import Kernels, load_kernels
from hamburger.model.cpu.slot_choice import CpuSlotChoice
from hamburger.model.device.devices import choose_dtype, device_of_rank, make_current
from hamburger.model.execution import Execution
from hamburger.model.gpu.availability import AttentionBackend, choose_backend, why_no_triton
from hamburger.model.kernel_shapes import layers_fit
from hamburger.model.modules.rotary import RotaryEmbedding
from hamburger.model.parallel.collectives import Collectives
from hamburger.model.parallel.step_shape import shard_trunk
from hamburger.model.parallel.steps import ParallelSteps
from hamburger.model.settled_places import SettledPlaces
from hamburger.model.slot_choice import SlotChoice
from hamburger.model.steps import EagerSteps

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Resolved:
    """A checkpoint that was read, and that fits the arguments. max_model_len: in tokens. kv_dtype: of the KV cache.
    groups: what they are. settling: when old tokens of answers settle; None: never."""

    source: ModelSource
    checkpoint: OpenCheckpoint
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    max_model_len: int
    kernels: Kernels | None
    attention: AttentionBackend
    int8: bool
    groups: Groups
    settling: Settling | None


def resolve(args: EngineArgs, rank: int = 0, on_progress: Callable[[str], None] = lambda line: None) -> Resolved:
    """Read the checkpoint for one rank's device. Raises CheckpointError or ConfigError."""
    size = args.tensor_parallel_size
    source = resolve_source(args.model, args.base)
    device = device_of_rank(args.device, rank, size)
    dtype = choose_dtype(args.dtype, device)
    name = str(dtype).removeprefix("torch.")
    on_progress(f"loading {source.name} as {name} on {device if size == 1 else f'{size} x {device.type}'}")
    make_current(device)
    threads = threads_of_rank(torch.get_num_threads(), size if device.type == "cpu" else 1)  # ranks share the cores
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    attention, int8 = choose_backend(args.attention_backend, device), _int8(args, dtype, device)
    checkpoint = open_checkpoint(source, dtype, on_progress=on_progress)
    shard_trunk(checkpoint.config.trunk, size)  # before any other work, as it may be refused
    groups = groups_of(args, checkpoint.config)
    max_model_len = _max_model_len(args.max_model_len, checkpoint.config)
    trunk = checkpoint.config.trunk.for_texts(max_model_len)
    checkpoint = replace(checkpoint, config=replace(checkpoint.config, trunk=trunk))
    _check_settling(args, groups, trunk)
    if device.type == "cuda":
        reason = why_no_triton(device) if attention == "torch" and args.attention_backend == "auto" else None
        on_progress(f"attention by {attention}" + (f": no Triton, as {reason}" if reason is not None else ""))
    kernels = _kernels(args, checkpoint.config, dtype, device)
    return Resolved(
        source=source,
        checkpoint=checkpoint,
        device=device,
        dtype=dtype,
        kv_dtype=_kv_dtype(args, dtype, kernels),
        max_model_len=max_model_len,
        kernels=kernels,
        attention=attention,
        int8=int8,
        groups=groups,
        settling=args.settling(settle_settings(source)) if args.settle else None,
    )


def _kv_dtype(args: EngineArgs, dtype: torch.dtype, kernels: Kernels | None) -> torch.dtype:
    if args.kv_cache_dtype != "auto":
        return {"bfloat16": torch.bfloat16, "int8": torch.int8}[args.kv_cache_dtype]
    # Attention waits for memory, and the kernels read bfloat16 on any processor.
    return torch.bfloat16 if kernels is not None and args.dtype == "auto" else dtype


def steps_of(resolved: Resolved, args: EngineArgs) -> EagerSteps:
    """What runs the macro-steps of the whole model."""
    return assemble(
        resolved.checkpoint.config,
        resolved.checkpoint.tensors,
        dtype=resolved.dtype,
        device=resolved.device,
        max_positions=resolved.max_model_len,
        execution=_execution(resolved, args),
    )


def shard_steps_of(resolved: Resolved, args: EngineArgs, ranks: Collectives) -> ParallelSteps:
    """What runs this rank's part of them; the ranks may be connected later."""
    return assemble_shard(
        resolved.checkpoint.config,
        resolved.checkpoint.tensors,
        ranks,
        dtype=resolved.dtype,
        device=resolved.device,
        max_positions=resolved.max_model_len,
        execution=_execution(resolved, args),
    )


def _execution(resolved: Resolved, args: EngineArgs) -> Execution:
    return Execution(
        kernels=resolved.kernels,
        bits={"int4": 4, "int8": 8}.get(args.quantization),
        draft_bits=4 if resolved.groups == "verified" else 8,
        attention=resolved.attention,
        int8=resolved.int8,
    )


def rank_pool_bytes(args: EngineArgs, device: torch.device, kept_free: int) -> int:
    """Bytes that a rank has for its part of the KV pool. kept_free: what steps and adapters will need (memory.py)."""
    size = args.tensor_parallel_size
    asked = None if args.kv_cache_memory is None else args.kv_cache_memory // size
    return pool_bytes(device, asked, args.num_engines * (size if device.type == "cpu" else 1), kept_free)


def groups_of(args: EngineArgs, config: ModelConfig) -> Groups:
    """What the user asks, or the checkpoint says; a plain base model has drafts to verify, unless composed groups (of
    one token each there) are asked or its steps are to overlap. Raises ConfigError for verified groups that overlap."""
    overlaps, asked = args.overlap_steps == "on", args.groups
    if asked != "auto":
        found: Groups = asked
    elif config.graft is None:
        found = "composed" if overlaps else "verified"
    else:
        found = config.graft.groups
    if found == "verified" and overlaps:
        remedy = (
            "overlap_steps auto or off" if config.graft is None else "groups composed, or overlap_steps auto or off"
        )
        raise ConfigError(
            "overlap_steps is on, but groups are verified, and the host must know what was confirmed of a step before "
            f"it can plan the next: use {remedy}."
        )
    return found


def slot_choice(resolved: Resolved, settling: Settling) -> tuple[SlotChoice, SettledPlaces]:
    """Who stays where answers settle, and where. Raises CheckpointError for a probe of another model."""
    trunk = resolved.checkpoint.config.trunk
    rotary = RotaryEmbedding(trunk, resolved.max_model_len, resolved.device, torch.float32)
    fitted = load_probe(resolved.source, trunk)
    probe, shares = (None, equal_shares(trunk)) if fitted is None else fitted
    places = SettledPlaces(shares, settling.chunk, settling.kept)
    if resolved.kernels is not None:
        return CpuSlotChoice(resolved.kernels, rotary, probe), places
    return SlotChoice(rotary, probe), places


def settling_told(settling: Settling, choice: SlotChoice, places: SettledPlaces) -> str:
    """A line for people."""
    by = "a fitted probe" if choice.is_fitted else "their keys alone (less is lost with `hamburger fit-settle`)"
    if places.lent:
        by += f", and {int(places.lends.sum())} of {places.lends.numel()} heads lend their places to others"
    return f"old slots settle by {by}: {settling.told}"


def _check_settling(args: EngineArgs, groups: Groups, trunk: TrunkConfig) -> None:
    """Raises ConfigError for what old tokens of answers cannot settle with."""
    if not args.settle:
        return
    if groups == "composed":
        raise ConfigError(
            "settle is on, but groups are composed, whose slots hold several tokens: use groups verified."
        )
    if (beyond := trunk.slides_beyond) is not None:
        remedy = "turn it off" + (f", or set max_model_len to {beyond} at most" if beyond else "")
        raise ConfigError(
            f"settle is on, but this model's layers see a sliding window of slots, which would move: {remedy}."
        )


def _kernels(args: EngineArgs, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Kernels | None:
    """The compiled kernels, or None for torch's own; whoever asks for float32 without more wants its digits."""
    asked = args.quantization
    if asked == "none" or args.tensor_parallel_size > 1 or (asked == "auto" and args.dtype == "float32"):
        return None
    if asked == "int8" and device.type == "cuda":  # which has kernels of its own: _int8
        return None
    fits = layers_fit(config.trunk)
    possible = device.type == "cpu" and dtype in (torch.bfloat16, torch.float32) and fits
    kernels = load_kernels() if possible else None
    if kernels is None:
        name = str(dtype).removeprefix("torch.")
        reason = "this processor, or the package was built without a compiler" if possible else f"{name} on {device}"
        if device.type == "cpu" and not fits:
            reason = "this model's shape (widths must be multiples of 32)"
        if asked == "auto":
            if device.type == "cpu" and not possible:
                logger.warning("Plain torch serves, several times slower than compiled kernels: none for %s.", reason)
            return None
        raise ConfigError(f"quantization is {asked}, which there are no kernels for with {reason}: use none.")
    return kernels


def _int8(args: EngineArgs, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a GPU is to have weights of 8 bits. Raises ConfigError where it cannot multiply them."""
    if device.type != "cuda" or args.quantization != "int8":
        return False
    if (reason := why_no_triton(device)) is not None:
        raise ConfigError(f"quantization is int8, which needs Triton on a GPU, but {reason}: use none.")
    if dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError(
            "quantization is int8, which a GPU multiplies with inputs of 16 bits: set dtype to auto, bfloat16 or "
            "float16."
        )
    return True


def _max_model_len(asked: int | None, config: ModelConfig) -> int:
    limit = config.trunk.context_tokens
    if asked is not None and asked > limit:
        raise ConfigError(f"max_model_len is {asked}, but the model was made for {limit} tokens: lower it.")
    return asked or limit
