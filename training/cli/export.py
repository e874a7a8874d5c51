"""The command line of `hamburger export`. No torch: every command's --help loads this."""

from __future__ import annotations

import argparse
from pathlib import Path

from hamburger.training.cli.types import number, out_folder, whole


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `hamburger export`; training/export/export.py reads them."""
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        type=Path,
        help="a training run (its latest checkpoint), a folder of our format, or the published Lightning .ckpt",
    )
    parser.add_argument("--out", metavar="FOLDER", type=out_folder, required=True, help="the folder to write")
    parser.add_argument("--base", metavar="B", help="the base model: a folder, hub id or `builtin`; a .ckpt needs it")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="of the weights (default: %(default)s)",
    )
    parser.add_argument(
        "--merge", action="store_true", help="write whole weights, even where the checkpoint refers to its base"
    )
    parser.add_argument(
        "--calibrate", metavar="DATA", type=Path, help="fit the dial on a segmented data set that was not trained on"
    )
    parser.add_argument(
        "--held-back",
        action="store_true",
        help="DATA was trained on: use only what the run kept back of it for validation",
    )
    parser.add_argument(
        "--calibrate-tokens",
        metavar="N",
        type=whole(1),
        help="answer tokens of it to use (default: 20000)",
    )
    parser.add_argument("--device", default="auto", help="to calibrate on: auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument(
        "--groups",
        choices=("composed", "verified"),
        help="how it is served where nobody says, and calibrated (default: as it is)",
    )
    parser.add_argument(
        "--confidence", metavar="C", type=number(0, 1), help="the checkpoint's default confidence (default: as it is)"
    )
    parser.add_argument(
        "--expected-tokens-per-kv",
        metavar="X",
        type=number(1, 16),
        help="what was measured at that confidence; it is for reports only",
    )
    parser.add_argument(
        "--data", metavar="FOLDER", type=Path, nargs="+", default=[], help="what it was trained on, for MODEL_CARD.md"
    )
    parser.add_argument("--card-notes", metavar="FILE", type=Path, help="Markdown to put into MODEL_CARD.md")
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint of our format that FOLDER holds")
