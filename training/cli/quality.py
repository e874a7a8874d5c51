"""The arguments of `hamburger eval-quality`. No torch: the command line is built before any work."""

from __future__ import annotations

import argparse
from pathlib import Path

from hamburger.engine.types.config import ENGINE_SETTINGS
from hamburger.training.cli.types import confidences, number, out_folder, whole
from hamburger.training.corpus.prompts import HELD_OUT

CONFIDENCES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)


def add_eval_quality_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `hamburger eval-quality`; training/quality/evaluate.py reads them."""
    models = parser.add_argument_group("models")
    models.add_argument(
        "--model",
        metavar="M",
        help="the HAMburger: folder, hub id or .ckpt (default: the embedded one)",
    )
    models.add_argument("--base", metavar="B", help="base model of a checkpoint that holds only a part of it")
    models.add_argument(
        "--base-model",
        metavar="BASE",
        help="the untouched base to compare with, and to score with: folder, hub id, GGUF file or `builtin` "
        "(default: the one that the model refers to, else builtin)",
    )
    models.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    models.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32 (default: auto)")
    models.add_argument(
        "--quantization",
        choices=ENGINE_SETTINGS["quantization"].choices,
        default="none",
        help="as of `serve`; `none` measures the checkpoint itself, `auto` what is served (default: none)",
    )
    models.add_argument(
        "--max-num-seqs", type=whole(1), default=64, metavar="N", help="answers generated at once (default: 64)"
    )
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument(
        "--prompts",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSON Lines, also .gz; only held-out rows are used",
    )
    prompts.add_argument(
        "--kinds",
        type=Path,
        metavar="FILE",
        help="YAML: kind -> list of sources (`source`, `source:category`, wildcards allowed; default: those of our own "
        "prompt files, or, where no row is of them, each row's `category`, else its `source`, else its file)",
    )
    prompts.add_argument(
        "--per-kind", type=whole(1), default=40, metavar="N", help="prompts of each kind (default: 40)"
    )
    prompts.add_argument(
        "--held-out",
        type=number(0, 1),
        default=HELD_OUT,
        metavar="F",
        help="fraction that training left out, as in `distill` (default: 0.04)",
    )
    prompts.add_argument(
        "--max-prompt-tokens", type=whole(1), default=1024, metavar="N", help="longer prompts are passed over"
    )
    measure = parser.add_argument_group("what is measured")
    measure.add_argument(
        "--confidences",
        type=confidences,
        default=list(CONFIDENCES),
        metavar="C,C",
        help=f"one point each (default: {','.join(f'{c:g}' for c in CONFIDENCES)}); the model's own is always measured",
    )
    measure.add_argument("--max-tokens", type=whole(1), default=384, metavar="N", help="of an answer (default: 384)")
    measure.add_argument(
        "--speed-prompts",
        type=whole(0),
        default=10,
        metavar="N",
        help="prompts whose decoding is timed, one at a time; 0 for none (default: 10)",
    )
    measure.add_argument(
        "--speed-tokens", type=whole(1), default=128, metavar="N", help="longest timed answer (default: 128)"
    )
    measure.add_argument("--rounds", type=whole(1), default=2000, metavar="N", help="bootstrap draws (default: 2000)")
    measure.add_argument("--seed", type=whole(0), default=0, metavar="N", help="of the bootstrap (default: 0)")
    parser.add_argument(
        "--out", type=out_folder, required=True, metavar="FOLDER", help="for results and what a later call resumes from"
    )
