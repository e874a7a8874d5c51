"""The arguments of `hamburger train`. No torch: the command line is built before any work."""

from __future__ import annotations

import argparse
from pathlib import Path

from hamburger.training.cli.types import out_folder


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `hamburger train`; training/run/train.py reads them."""
    ours = "published, frozen, adapter, merges, dial"
    parser.add_argument("recipe", metavar="RECIPE", help=f"YAML file, or one of ours: {ours}")
    parser.add_argument(
        "--data", type=Path, nargs="+", required=True, metavar="FOLDER", help="data sets that `segment` wrote"
    )
    parser.add_argument("--out", type=out_folder, required=True, metavar="RUN", help="folder of the run")
    parser.add_argument(
        "--init", metavar="M", help="a HAMburger folder to begin from, for example a checkpoint of another run"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the run's latest checkpoint")
    parser.add_argument(
        "--validation",
        type=Path,
        nargs="+",
        metavar="FOLDER",
        help="data sets to validate with (default: a share of the data is kept back)",
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a field of the recipe, for example objective.stop=0.3 (repeatable)",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
