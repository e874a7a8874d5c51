"""The command line of `hamburger plan`; engine/plan/report.py reads it. No torch: every command's --help loads this."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from hamburger.engine.types.config import EngineArgs
from hamburger.server.setting_values import parse_bytes


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a folder (its config.json is enough), hub id, .gguf file or `builtin`, or a published shape, "
        "llama-3.2-1b, llama-3.1-8b or llama-3.1-70b (default: the embedded model)",
    )
    parser.add_argument("--base", metavar="B", help="folder or hub id of the base model, where MODEL refers to one")
    parser.add_argument(
        "--graft",
        choices=("published", "fused"),
        help="plan a HAMburger made of a plain MODEL: the paper's graft, or the smaller one of `train adapter`",
    )
    shape = parser.add_argument_group("instead of MODEL, its numbers")
    shape.add_argument("--layers", metavar="N", type=_whole(1), help="layers that keep KV")
    shape.add_argument("--kv-heads", metavar="N", type=_whole(1), help="key and value heads of a layer")
    shape.add_argument("--head-dim", metavar="N", type=_whole(1), help="numbers of a head")
    shape.add_argument("--parameters", metavar="N", type=_whole(1), help="parameters, all together")
    machine = parser.add_argument_group("the machine")
    machine.add_argument(
        "--memory", metavar="SIZE", type=_size, help="the GPU's, or what the host has free, such as 80GB"
    )
    machine.add_argument(
        "--reserved", metavar="SIZE", type=_size, default=0, help="of it, what others take, such as CUDA itself"
    )
    machine.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="how weights are held, and which share of free memory the KV pool takes (default: %(default)s)",
    )
    machine.add_argument(
        "--tensor-parallel-size",
        metavar="N",
        type=_whole(1),
        default=EngineArgs().tensor_parallel_size,
        help="as for serve: GPUs that share the model, each of so much memory (default: %(default)s)",
    )
    machine.add_argument("--kv-cache-memory", metavar="SIZE", type=_size, help="the KV pool's size, as for serve")
    machine.add_argument(
        "--bandwidth",
        metavar="SIZE",
        type=_size,
        help="bytes it reads a second, such as 2TB: adds bounds of speed",
    )
    machine.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="of weights and KV (default: %(default)s)",
    )
    machine.add_argument(
        "--quantization",
        choices=("auto", "none", "int8"),
        default="auto",
        help="as for serve; on a CPU auto is 8 bits, or 4 that a file has, but with float32 none; on a GPU it is none "
        "(default: %(default)s)",
    )
    machine.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "bfloat16", "int8"),
        default="auto",
        help="of the KV pool alone, as for serve (default: as --dtype)",
    )
    load = parser.add_argument_group("the load")
    load.add_argument("--prompt-tokens", metavar="N", type=_whole(1), help="of a request (default: 1024)")
    load.add_argument(
        "--output-tokens",
        metavar="N",
        type=_whole(1),
        help="of its answer (default: 512; in a shorter context than both together, these share it as 2 to 1)",
    )
    load.add_argument(
        "--tokens-per-kv",
        metavar="G",
        type=_ratio,
        help="answer tokens of a slot (default: the checkpoint's)",
    )
    load.add_argument(
        "--settle",
        metavar="BOOL",
        type=_flag,
        default=False,
        help="as for serve: true where old tokens of its answer give slots back (default: false)",
    )
    load.add_argument(
        "--settle-window",
        metavar="N",
        type=_whole(32),
        help="as for serve (default: what suits the model)",
    )
    load.add_argument(
        "--settle-growth",
        metavar="F",
        type=_share_or_none,
        help="as for serve (default: what suits the model)",
    )
    load.add_argument(
        "--settle-keep",
        metavar="F",
        type=_share,
        help="as for serve (default: what suits the model)",
    )
    load.add_argument("--settle-limit", metavar="N", type=_whole(1), help="as for serve (default: none)")
    load.add_argument(
        "--max-loras",
        metavar="N",
        type=_whole(0),
        default=EngineArgs().max_loras,
        help="as for serve: LoRA adapters that memory is left free for (default: %(default)s)",
    )
    load.add_argument(
        "--max-lora-rank",
        metavar="N",
        type=_whole(1),
        default=EngineArgs().max_lora_rank,
        help="as for serve (default: %(default)s)",
    )
    load.add_argument("--max-model-len", metavar="N", type=_whole(2), help="as for serve (default: the model's)")
    load.add_argument("--max-num-seqs", metavar="N", type=_whole(1), help="as for serve (default: as many as fit)")
    load.add_argument(
        "--block-size", metavar="N", type=_whole(1), default=EngineArgs().block_size, help="(default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON; sizes in bytes, speeds in tokens a second")


def _whole(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} up")
        return int(text)

    return parse


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def _size(text: str) -> int:
    try:
        size: int = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: {error}") from None
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: it must be at least one byte")
    return size


def _share(text: str, least: float = 1 / 64, named: str = "1/64") -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value <= 63 / 64:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share, a number from {named} to 63/64")
    return value


def _share_or_none(text: str) -> float:
    return _share(text, 0.0, "0")


def _ratio(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= 16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 16")
    return value
