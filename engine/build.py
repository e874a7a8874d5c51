"""Builds an engine core: checkpoint, model, KV pool, runner. Torch is imported here and in what it imports."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from hamburger.engine.config import EngineArgs, EngineConfig
from hamburger.engine.core import EngineCore
from hamburger.engine.grammar import Grammars
from hamburger.engine.memory import pool_bytes
from hamburger.engine.messages import EngineInfo, SubmitRequest
from hamburger.engine.pool import blocks_of_pool
from hamburger.engine.runner import Runner
from hamburger.engine.sampling_params import SamplingParams
from hamburger.engine.tokenizer import Tokenizer
from hamburger.model.assemble import assemble
from hamburger.model.checkpoint import load_checkpoint
from hamburger.model.config import ConfigError, ModelConfig
from hamburger.model.devices import choose_device, choose_dtype
from hamburger.model.float8 import CAPABILITY
from hamburger.model.kv_cache import PagedKVCache, slot_bytes
from hamburger.model.native import Kernels, layers_fit, load_kernels
from hamburger.model.sources import resolve_source


def build_core(
    args: EngineArgs, on_progress: Callable[[str], None] = lambda line: None
) -> tuple[EngineCore, EngineInfo]:
    """Load the model and size the KV pool. on_progress gets one line for people at the start of each stage.

    Raises CheckpointError or ConfigError, whose messages are fit for the user.
    """
    source = resolve_source(args.model, args.base)
    device = choose_device(args.device)
    dtype = choose_dtype(args.dtype, device)
    on_progress(f"loading {source.name} as {str(dtype).removeprefix('torch.')} on {device}")
    checkpoint = load_checkpoint(source, dtype, on_progress=on_progress)
    model_config = checkpoint.config
    max_model_len = _max_model_len(args.max_model_len, model_config)
    kernels = _kernels(args, model_config, dtype, device)
    model = assemble(
        model_config,
        checkpoint.tensors,
        dtype=dtype,
        device=device,
        max_positions=max_model_len,
        kernels=kernels,
        bits={"int4": 4, "int8": 8}.get(args.quantization),
        float8=_float8(args, dtype, device),
    )
    if model.quantization == "fp8":
        on_progress("weights as fp8")
    if kernels is not None:
        on_progress(f"weights as {model.quantization}, kernels for {kernels.instructions}")
    del checkpoint
    prefix_cache = args.prefix_cache and model_config.trunk.context_tokens == model_config.trunk.fixed_context_tokens
    if args.prefix_cache and not prefix_cache:
        on_progress("no prefix cache: with dynamic rope scaling a prompt's keys depend on its length")
    on_progress("sizing the KV pool")
    config = EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_slots=args.max_num_batched_slots,
        block_size=args.block_size,
        num_blocks=_num_blocks(args, model_config, max_model_len, dtype, device),
        eos_token_ids=model_config.trunk.eos_token_ids,
        max_group=model_config.max_group,
        max_queue=args.max_queue,
        max_queue_seconds=args.max_queue_seconds,
        prefix_cache=prefix_cache,
    )
    cache = PagedKVCache(model_config.trunk, config.num_blocks, config.block_size, dtype, device)
    graft = model_config.graft
    confidence = args.confidence if args.confidence is not None else model_config.default_confidence
    tokens_per_kv = graft.expected_tokens_per_kv if graft and confidence == graft.default_confidence else 1.0
    info = EngineInfo(
        model=source.name,
        is_plain_base=graft is None,
        max_model_len=max_model_len,
        max_group=model_config.max_group,
        default_confidence=confidence,
        vocab_size=model_config.trunk.vocab_size,
        eos_token_ids=list(model_config.trunk.eos_token_ids),
        block_size=config.block_size,
        total_slots=config.total_slots,
        expected_tokens=int(config.total_slots * tokens_per_kv),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_slots=config.max_num_batched_slots,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        quantization=model.quantization,
    )
    grammars = Grammars(lambda: Tokenizer.load(source.tokenizer_path), info.vocab_size, info.eos_token_ids)
    core = EngineCore(config, Runner(model, cache), grammars=grammars)
    on_progress("warming up")
    _warm_up(core, info)
    return core, info


def _kernels(args: EngineArgs, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Kernels | None:
    """The compiled kernels, or None for torch's own; whoever asks for float32 without more wants its digits."""
    asked = args.quantization
    if asked in ("none", "fp8") or (asked == "auto" and args.dtype == "float32"):
        return None
    possible = device.type == "cpu" and dtype in (torch.bfloat16, torch.float32) and layers_fit(config.trunk)
    kernels = load_kernels() if possible else None
    if kernels is None and asked != "auto":
        name = str(dtype).removeprefix("torch.")
        reason = "this processor, or the package was built without a compiler" if possible else f"{name} on {device}"
        if device.type == "cpu" and not layers_fit(config.trunk):
            reason = "this model's shape (widths must be multiples of 32)"
        raise ConfigError(f"quantization is {asked}, which there are no kernels for with {reason}: use none.")
    return kernels


def _float8(args: EngineArgs, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights are to be fp8. Raises ConfigError where nothing multiplies it."""
    if args.quantization != "fp8":
        return False
    if device.type != "cuda":
        raise ConfigError("quantization is fp8, which needs a GPU: use auto, int8 or int4 on CPU.")
    if (capability := torch.cuda.get_device_capability(device)) < CAPABILITY:
        have, need = (".".join(map(str, pair)) for pair in (capability, CAPABILITY))
        raise ConfigError(
            f"quantization is fp8, which needs a GPU of compute capability {need}, and this has {have}: use none."
        )
    if dtype != torch.bfloat16:
        raise ConfigError("quantization is fp8, whose results are bfloat16: set dtype to auto or bfloat16.")
    return True


def _warm_up(core: EngineCore, info: EngineInfo) -> None:
    """One short answer, so that the first request does not wait for libraries to prepare their kernels."""
    prompt_ids = [0] * max(1, min(16, info.max_model_len - 2))
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, seed=0, confidence=info.default_confidence)
    core.add(SubmitRequest("warm-up", prompt_ids, params, time.monotonic()))
    while core.has_work:
        core.step()


def _max_model_len(asked: int | None, config: ModelConfig) -> int:
    limit = config.trunk.context_tokens
    if asked is not None and asked > limit:
        raise ConfigError(f"max_model_len is {asked}, but the model was made for {limit} tokens: lower it.")
    return asked or limit


def _num_blocks(
    args: EngineArgs, config: ModelConfig, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> int:
    return blocks_of_pool(
        pool_bytes(device, args.kv_cache_memory, args.num_engines),
        slot_bytes(config.trunk, dtype),
        block_size=args.block_size,
        max_model_len=max_model_len,
        max_num_seqs=args.max_num_seqs,
    )
