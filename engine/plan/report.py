"""`hamburger plan`: finds the model's shape, plans, and prints a table or JSON. Weights are never read."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial

from hamburger.engine.plan.held import Held, as_int8, as_numbers, as_packed
from hamburger.engine.plan.known_shapes import PRESETS, with_graft
from hamburger.engine.plan.plan import Load, Machine, Plan, make_plan
from hamburger.engine.plan.shape import KV_BYTES, NUMBER_BYTES, Shape, num_parameters, shape_of
from hamburger.engine.types.config import SETTLE_SETTINGS, EngineArgs
from hamburger.engine.types.settling import Settling
from hamburger.model.checkpoints.config.folder import read_model_config
from hamburger.model.checkpoints.four_bits import four_bit_linears
from hamburger.model.checkpoints.settle_settings import settle_settings
from hamburger.model.checkpoints.sources import resolve_source
from hamburger.model.config import ConfigError, ModelConfig
from hamburger.model.kernel_shapes import layers_fit
from hamburger.model.parallel.step_shape import shard_trunk

_PROMPT, _OUTPUT = 1024, 512  # tokens, where a context has room for them
_SLOTS = "slots of a request"
_EXPLICIT = ("layers", "kv_heads", "head_dim", "parameters")


def run(args: argparse.Namespace) -> int:
    """Print the plan; returns the exit code. Raises ConfigError or CheckpointError, whose messages are for the user."""
    machine = Machine(
        device=args.device,
        memory_bytes=args.memory,
        reserved_bytes=args.reserved,
        kv_cache_memory=args.kv_cache_memory,
        bandwidth=args.bandwidth,
    )
    _check_split(args)
    shape, fitted = _shape(args)
    prompt_tokens, output_tokens = _request(args, shape)
    load = Load(
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        tokens_per_kv=args.tokens_per_kv,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        block_size=args.block_size,
        settling=_settling(args, fitted),
        max_loras=args.max_loras,
        max_lora_rank=args.max_lora_rank,
    )
    plan = make_plan(shape, machine, load)
    print(json.dumps(asdict(plan), indent=2) if args.json else table(plan))
    return 0


def _check_split(args: argparse.Namespace) -> None:
    """Raises ConfigError for what the engine refuses of several GPUs."""
    size = args.tensor_parallel_size
    EngineArgs(tensor_parallel_size=size, settle=args.settle, max_loras=args.max_loras, quantization=args.quantization)
    if size > 1 and args.device == "cpu":
        raise ConfigError(f"tensor_parallel_size is {size}, but device is cpu, whose memory they share: plan it for 1.")


def _request(args: argparse.Namespace, shape: Shape) -> tuple[int, int]:
    """Tokens of a prompt and of its answer; where nothing is said of them, such as fit the context."""
    context = args.max_model_len or shape.max_model_len
    if args.prompt_tokens is None and args.output_tokens is None and context and context < _PROMPT + _OUTPUT:
        return (prompt := max(context * 2 // 3, 1)), max(context - prompt, 1)
    return args.prompt_tokens or _PROMPT, args.output_tokens or _OUTPUT


def _settling(args: argparse.Namespace, fitted: Mapping[str, float]) -> Settling | None:
    if not args.settle:
        for name in sorted(SETTLE_SETTINGS):
            if getattr(args, name) is not None:
                raise ConfigError(f"{name} is given, but settle is off: turn that on, or leave {name} out.")
        return None
    return Settling.of_model(fitted, args.settle_window, args.settle_growth, args.settle_keep, args.settle_limit)


def _shape(args: argparse.Namespace) -> tuple[Shape, Mapping[str, float]]:
    """And what suits the model of settling."""
    size = args.tensor_parallel_size
    given = [name for name in _EXPLICIT if getattr(args, name) is not None]
    if not given:
        name, config, four_bits, fitted = _model(args.model, args.base)
        if args.graft is not None:
            if config.graft is not None:
                raise ConfigError(f"graft is {args.graft}, but {name} is a HAMburger already: leave it out.")
            config = with_graft(config.trunk, args.graft)
        part = replace(config, trunk=shard_trunk(config.trunk, size))
        shape = shape_of(name, part, args.dtype, _kv_dtype(args), held=_held(args, part, four_bits))
        return replace(shape, parameters=num_parameters(config), num_parts=size), fitted
    for option in ("model", "base", "graft"):
        if getattr(args, option) is not None:
            raise ConfigError(f"{option} is given, and {given[0]} too: give a model, or its numbers.")
    if missing := [name for name in _EXPLICIT if name not in given]:
        raise ConfigError(f"{given[0]} is given without {', '.join(missing)}: give all four, or a model.")
    if args.quantization == "int8":  # of what it leaves in numbers, how many there are is not said
        raise ConfigError(f"quantization is int8, but {given[0]} is given: it needs a model.")
    if args.kv_heads % size:
        raise ConfigError(f"tensor_parallel_size is {size}, but it must divide kv_heads, which is {args.kv_heads}.")
    shape = Shape(
        name=f"{args.parameters:,} parameters",
        num_layers=args.layers,
        num_kv_heads=args.kv_heads // size,
        head_dim=args.head_dim,
        parameters=args.parameters,
        weights_bytes=-(-args.parameters // size) * NUMBER_BYTES[args.dtype],
        kv_bytes=KV_BYTES[_kv_dtype(args) or args.dtype],
        max_model_len=None,
        max_group=None,
        tokens_per_kv=1.0,
        reads=None,
        num_parts=size,
    )
    return shape, {}


def _kv_dtype(args: argparse.Namespace) -> str | None:
    return None if args.kv_cache_dtype == "auto" else str(args.kv_cache_dtype)


def _model(model: str | None, base: str | None) -> tuple[str, ModelConfig, Callable[[], set[str]], Mapping[str, float]]:
    """Its name and shape, what says which of its linears have 4 bits, and what suits it of settling."""
    if model in PRESETS:
        if base is not None:
            raise ConfigError(f"base is set, but {model} is a whole model: remove base.")
        return model, ModelConfig(trunk=PRESETS[model]), set, {}
    source = resolve_source(model, base, weights=False)
    config = read_model_config(source)
    return source.name, config, partial(four_bit_linears, source, config.trunk), settle_settings(source)


def _held(args: argparse.Namespace, config: ModelConfig, four_bits: Callable[[], set[str]]) -> Held:
    """As a server would have the weights: on a CPU by the engine's own rule (engine/device/load.py)."""
    number_bytes, on_cpu, asked = NUMBER_BYTES[args.dtype], args.device == "cpu", args.quantization
    if asked == "int8" and not on_cpu:
        if args.dtype == "float32":
            raise ConfigError("quantization is int8, which a GPU multiplies with inputs of 16 bits: set another dtype.")
        return as_int8(config, number_bytes)
    fits = layers_fit(config.trunk) and args.dtype != "float16"
    if on_cpu and fits and (asked == "int8" or (asked == "auto" and args.dtype == "bfloat16")):
        return as_packed(config, number_bytes, four_bits() if asked == "auto" else ())
    if asked == "int8":
        raise ConfigError(
            "quantization is int8, which there are no kernels for with float16, or with widths that are no multiples "
            "of 32: use none."
        )
    return as_numbers(config, number_bytes, copies_tied_head=on_cpu and args.dtype != "float16")


def table(plan: Plan) -> str:
    """The plan for people. Beside what groups or settled slots save stands a server without them."""
    each = "" if plan.num_gpus == 1 else f" on each of {plan.num_gpus} GPUs"
    rows = [
        ("model", plan.model),
        ("parameters", f"{plan.parameters:,}"),
        ("weights", _gib(plan.weights_bytes) + each),
        *([("LoRA adapters", _gib(plan.loras_bytes))] if plan.loras_bytes else []),
        ("one slot", f"{plan.slot_bytes / 1024:,.{0 if plan.slot_bytes % 1024 == 0 else 1}f} KiB{each}"),
        ("KV pool", f"{_gib(plan.pool_bytes)}{each}: {plan.pool_slots:,} slots in {plan.pool_blocks:,} blocks"),
        ("one request", f"{plan.prompt_tokens:,} prompt and {plan.output_tokens:,} answer tokens"),
        ("", ""),
    ]
    compared = plan.slots_per_request != plan.slots_per_request_plain
    if compared:
        rows.append(("", f"{f'{plan.tokens_per_kv:.4g} tokens per KV':>20}{'one token a slot':>20}"))

    def row(name: str, ours: float, plain: float, unit: str = "") -> None:
        width = 20 - len(unit) if compared else 0
        beside = f"{plain:>{width},.0f}{unit}" if compared else ""
        gain = f"{ours / plain:>9.2f} x" if compared and name != _SLOTS else ""
        rows.append((name, f"{ours:>{width},.0f}{unit}{beside}{gain}"))

    row(_SLOTS, plan.slots_per_request, plan.slots_per_request_plain)
    row("requests at once", plan.concurrent_requests, plan.concurrent_requests_plain)
    if (speed := plan.speed) is not None:
        row("one stream, at most", speed.one_stream, speed.one_stream_plain, " tok/s")
        row("all, at most", speed.all_requests, speed.all_requests_plain, " tok/s")
    lines = [f"{name:<22}{value}".rstrip() for name, value in rows]
    seats, default = plan.concurrent_requests, EngineArgs().max_num_seqs
    if plan.max_num_seqs is None and seats > default:
        lines += ["", f"Serve with --max-num-seqs {seats}, or its default of {default} is the limit."]
    if plan.max_num_seqs == seats:
        lines += ["", f"max_num_seqs is the limit here, {seats} answers at once, not memory."]
    if speed is not None:
        drafts = "" if plan.tokens_per_pass > 1 else "\nThey count one token a pass: accepted drafts add to it."
        lines += [
            "",
            "Speeds: what reading weights and KV alone would allow. A bound, no measurement; computing is not counted."
            + drafts,
        ]
    return "\n".join(lines)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"
