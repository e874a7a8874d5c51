"""The command line of `hamburger distill`, `segment`, `regroup` and `inspect`. No torch: each --help loads this."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from hamburger.training.cli.types import confidence_range, layers, number, out_file, out_folder, whole
from hamburger.training.corpus.prompts import HELD_OUT
from hamburger.training.corpus.segmentation import STRATEGIES


def add_distill_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `hamburger distill`."""
    parser.add_argument(
        "prompts",
        metavar="PROMPTS",
        nargs="+",
        type=Path,
        help='JSON Lines, also .gz: {"id": ..., "prompt": ...} or {"id": ..., "messages": [...]}',
    )
    _add_model(parser, "who writes the answers: a folder, a file or a hub id (default: the embedded base model)")
    parser.add_argument(
        "--out", metavar="FILE", type=_answers_file, required=True, help="answers, one a line; goes on where it ended"
    )
    _add_held_out(parser)
    parser.add_argument(
        "--greedy-share",
        metavar="F",
        type=number(0, 1),
        default=0.5,
        help="share of greedy answers, at most one a prompt; the others are sampled (default: %(default)s)",
    )
    parser.add_argument("--temperature", metavar="T", type=number(0.01, 100), default=0.6, help=_DEFAULT)
    parser.add_argument("--top-p", metavar="P", type=number(0.001, 1), default=0.95, help=_DEFAULT)
    parser.add_argument("--max-tokens", metavar="N", type=whole(1), default=384, help=f"an answer's limit; {_DEFAULT}")
    parser.add_argument("--seed", metavar="N", type=whole(0), default=0, help=_DEFAULT)
    parser.add_argument("--samples", metavar="N", type=whole(1), default=1, help=f"answers to each prompt; {_DEFAULT}")
    parser.add_argument("--limit", metavar="N", type=whole(1), help="most answers in all: a fair sample of all prompts")
    parser.add_argument(
        "--keep-loops",
        action="store_true",
        help="keep answers that go round in circles, as `segment --loops cut` likes",
    )
    parser.add_argument("--max-num-seqs", metavar="N", type=whole(1), default=64, help=f"answers at once; {_DEFAULT}")
    parser.add_argument("--max-model-len", metavar="N", type=whole(1), help="context in tokens (default: the model's)")


def add_segment_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `hamburger segment`."""
    parser.add_argument("answers", metavar="ANSWERS", nargs="+", type=Path, help="what distill wrote; also .gz")
    _add_model(parser, "whose entropies decide: a folder, a file or a hub id (default: the embedded base model)")
    parser.add_argument(
        "--quantization",
        choices=("auto", "none"),
        default="auto",
        help="auto: on a CPU read with the kernels and their weights of 4 and 8 bits, as the model is served, twice as "
        f"fast; none, and any model with dtype float32: the weights as they are; {_DEFAULT}",
    )
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        type=out_folder,
        required=True,
        help="data set; new answers are added to one that is there",
    )
    parser.add_argument("--strategy", choices=STRATEGIES, default="decreasing_v2", help=_DEFAULT)
    parser.add_argument(
        "--ratio",
        metavar="R",
        type=number(0, 1),
        default=0.3,
        help=f"a token joins below R times the group's highest entropy; {_DEFAULT}",
    )
    parser.add_argument(
        "--floor",
        metavar="NATS",
        type=number(0, math.inf),
        default=0.05,
        help=f"decreasing_v2: a token always joins below this entropy; {_DEFAULT}",
    )
    parser.add_argument("--max-group", metavar="N", type=whole(1), default=4, help=f"tokens a group; {_DEFAULT}")
    parser.add_argument(
        "--top-k",
        metavar="K",
        type=whole(0),
        default=16,
        help=f"keep the base's K likeliest tokens of each position, for distillation; 0: none; {_DEFAULT}",
    )
    parser.add_argument(
        "--states",
        metavar="LAYERS",
        type=layers,
        default=0,
        help="keep the base's hidden states, for the recipe `frozen` with cached_states: after so many evenly spaced "
        f"layers, or after the layers named (7,14,29); 2 D bytes a layer and token; {_DEFAULT}",
    )
    parser.add_argument(
        "--max-length", metavar="N", type=whole(2), default=1024, help=f"cut conversations after N tokens; {_DEFAULT}"
    )
    parser.add_argument(
        "--train-on", choices=("last", "all"), default="last", help=f"which turns of the assistant; {_DEFAULT}"
    )
    parser.add_argument(
        "--loops",
        choices=("drop", "cut", "keep"),
        default="drop",
        help=f"answers that go round in circles: drop them, or cut them where they begin to repeat; {_DEFAULT}",
    )
    _add_held_out(parser)
    parser.add_argument("--part-size", metavar="N", type=whole(1), default=512, help=f"examples a file; {_DEFAULT}")


def add_regroup_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `hamburger regroup`."""
    parser.add_argument("data", metavar="DATA", nargs="+", type=Path, help="what segment wrote")
    _add_model(parser, "whose groups: a HAMburger of the data's base, for example a checkpoint of train", required=True)
    parser.add_argument("--out", metavar="FOLDER", type=out_folder, required=True, help="the data set to write")
    parser.add_argument(
        "--confidence",
        metavar="C,C",
        type=confidence_range,
        default="0.4,0.95",
        help=f"the range that each answer's confidence is drawn from; {_DEFAULT}",
    )
    parser.add_argument("--seed", metavar="N", type=whole(0), default=0, help=_DEFAULT)
    parser.add_argument("--part-size", metavar="N", type=whole(1), default=512, help=f"examples a file; {_DEFAULT}")


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `hamburger inspect`."""
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="what segment wrote")
    parser.add_argument(
        "index", metavar="INDEX", nargs="?", type=whole(0), default=0, help="which example (default: 0)"
    )
    parser.add_argument(
        "--html", metavar="FILE", type=out_file, help="write a web page instead, with each token's entropy"
    )
    parser.add_argument("--model", help="whose tokenizer (default: the model that the data set names)")
    parser.add_argument("--base", help="the base model that a checkpoint refers to")


_DEFAULT = "default: %(default)s"


def _answers_file(text: str) -> Path:
    if text.endswith(".gz"):
        raise argparse.ArgumentTypeError(f"{text}: answers are appended line by line, which gzip cannot: leave .gz out")
    return out_file(text)


def _add_model(parser: argparse.ArgumentParser, help_text: str, *, required: bool = False) -> None:
    parser.add_argument("--model", required=required, help=help_text)
    parser.add_argument("--base", help="the base model that a checkpoint refers to")
    parser.add_argument("--device", default="auto", help=f"auto, cpu, cuda or cuda:N; {_DEFAULT}")
    parser.add_argument("--dtype", default="auto", help=f"auto, bfloat16, float32 or float16; {_DEFAULT}")


def _add_held_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--held-out",
        metavar="F",
        type=number(0, 1),
        default=HELD_OUT,
        help="share of the prompts, chosen by their ids, that is left out for evaluation (default: %(default)s)",
    )
