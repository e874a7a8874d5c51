"""The arguments of `hamburger eval-settle` and `fit-settle`. No torch: the command line is built before any work."""

from __future__ import annotations

import argparse
import math
from fractions import Fraction
from pathlib import Path

from hamburger.training.cli.types import out_file, out_folder, whole


def add_eval_settle_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `hamburger eval-settle`; training/settling/evaluate.py reads them."""
    _add_model_arguments(parser)
    texts = parser.add_argument_group("texts")
    texts.add_argument(
        "--answers", type=Path, nargs="*", default=[], metavar="FILE", help="the model's own, as `distill` writes them"
    )
    texts.add_argument(
        "--texts", type=Path, nargs="*", default=[], metavar="FILE", help='by people: JSON Lines with "text"'
    )
    texts.add_argument("--min-tokens", type=whole(2), default=300, metavar="N", help="shorter ones are left out (300)")
    texts.add_argument("--max-tokens", type=whole(2), default=2048, metavar="N", help="longer ones are cut (2048)")
    texts.add_argument("--per-kind", type=whole(1), default=20, metavar="N", help="answers of a file's category (20)")
    policies = parser.add_argument_group("policies: each score with each window, growth and share")
    scores = ["keys", "random, by head", "recency"]
    policies.add_argument(
        "--scores",
        type=_texts,
        default=scores,
        metavar="S;S",
        help=f"who stays, as docs/training.md tells ({'; '.join(scores)})",
    )
    policies.add_argument("--probe", type=Path, metavar="FILE", help="of the score `probe` (default: the model's own)")
    policies.add_argument(
        "--windows", type=_wholes, metavar="N,N", help="newest tokens that stay whole (what suits the model)"
    )
    policies.add_argument(
        "--growths", type=_growths, metavar="F,F", help="or so much of the answer, if more (what suits the model)"
    )
    policies.add_argument(
        "--keeps", type=_shares, metavar="F,F", help="share of older tokens that stays (what suits the model)"
    )
    policies.add_argument("--chunk", type=whole(1), default=64, metavar="N", help="tokens that are looked at together")
    policies.add_argument("--limit", type=whole(1), metavar="N", help="most slots of an answer (default: no limit)")
    parser.add_argument("--seed", type=whole(0), default=0, metavar="N", help="of random choice and of the bootstrap")
    parser.add_argument(
        "--out", type=out_folder, required=True, metavar="FOLDER", help="for results and what a later call resumes from"
    )


def add_fit_settle_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `hamburger fit-settle`; training/settling/fit.py reads them."""
    _add_model_arguments(parser)
    parser.add_argument(
        "--answers",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="the model's own, as `distill` writes them",
    )
    parser.add_argument(
        "--min-tokens", type=whole(192), default=300, metavar="N", help="shorter ones are left out (300)"
    )
    parser.add_argument("--max-tokens", type=whole(192), default=1024, metavar="N", help="longer ones are cut (1024)")
    parser.add_argument("--steps", type=whole(1), default=600, metavar="N", help="of the fit (600)")
    parser.add_argument("--probe", type=Path, metavar="FILE", help="keep this one's weights: fit the shares alone")
    parser.add_argument(
        "--share-texts", type=whole(1), default=32, metavar="N", help="answers that shares are fitted to (32)"
    )
    settings = parser.add_argument_group("settings that shares are fitted for, and that serve from then on")
    settings.add_argument("--window", type=whole(32), metavar="N", help="settle_window (64)")
    settings.add_argument("--growth", type=_growth, metavar="F", help="settle_growth (0)")
    settings.add_argument("--keep", type=_kept, metavar="F", help="settle_keep (0.33)")
    parser.add_argument("--seed", type=whole(0), default=0, metavar="N", help="of the order of chunks")
    parser.add_argument(
        "--out",
        type=out_file,
        required=True,
        metavar="FILE",
        help="`serve` looks for settle.safetensors beside the model",
    )


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    models = parser.add_argument_group("model")
    models.add_argument(
        "--model", metavar="M", help="folder, hub id, GGUF file or `builtin` (default: the embedded one)"
    )
    models.add_argument("--base", metavar="B", help="base model of a checkpoint that holds only a part of it")
    models.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    models.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32 (default: auto)")


def _texts(text: str) -> list[str]:
    return [part.strip() for part in text.split(";")]


def _wholes(text: str) -> list[int]:
    return [whole(0)(part) for part in text.split(",")]


def _shares(text: str) -> list[float]:
    return [_share(part) for part in text.split(",")]


def _share(text: str) -> float:
    try:
        share = float(Fraction(text))
    except (ValueError, ArithmeticError):  # such as 1/0
        share = math.nan
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: shares are in [0, 1], such as 1/4 or 0.25")
    return share


def _kept(text: str) -> float:
    share = _share(text)
    if share == 1:
        raise argparse.ArgumentTypeError("a share of 1 keeps every slot, so that nothing settles: name a lower one")
    return share


def _growths(text: str) -> list[float]:
    return [_growth(part) for part in text.split(",")]


def _growth(text: str) -> float:
    growth = _share(text)
    if growth == 1:
        raise argparse.ArgumentTypeError(
            "a growth of 1 keeps the whole answer, so that nothing settles: name a lower one"
        )
    return growth
