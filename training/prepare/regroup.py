"""`hamburger regroup`: data sets once more, in the groups that a trained model would make of their answers.

A token joins the group where the model's next micro-step would have given it and the dial would have let it. Both are
read along the given answer with one token a slot, as in validation. A run that was killed goes on after its last part.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from rich.console import Console
from torch import Tensor

from hamburger.model.checkpoints.sources import PROBE_FILE, resolve_source
from hamburger.model.config import GraftConfig
from hamburger.model.modules.hamburger import HamburgerModel
from hamburger.training.base_model import other_scorer, referenced_name
from hamburger.training.batches.batches import NO_TARGET, TrainBatch, collate, passes
from hamburger.training.corpus.dataset import DatasetMeta, Example, SegmentedDataset
from hamburger.training.corpus.dataset_writer import DatasetWriter
from hamburger.training.corpus.prompts import unit_hash
from hamburger.training.errors import TrainingError
from hamburger.training.export.calibrate import Calibration, identity
from hamburger.training.forward.fingerprint import fingerprint
from hamburger.training.forward.loading import load_model
from hamburger.training.loss.objective import Objective, Outcome, TrainingNetwork
from hamburger.training.prepare.group_report import group_report
from hamburger.training.progress import token_bar


def run(args: argparse.Namespace) -> int:
    """Run the command (cli/data.py). Raises TrainingError, CheckpointError or ConfigError."""
    err = Console(stderr=True, highlight=False)
    data = [SegmentedDataset(folder) for folder in args.data]
    source = resolve_source(args.model, args.base)
    model = load_model(
        source,
        device=args.device,
        dtype=args.dtype,
        on_progress=lambda line: err.print(line, markup=False),
    )
    trunk, graft = model.config.trunk, model.config.graft
    if graft is None:
        raise TrainingError(f"{source.name} has no graft, so it makes no groups: name a HAMburger.")
    low, high = args.confidence[0], args.confidence[-1]
    for folder in data:
        for line in other_scorer(folder.folder, folder.meta.model, referenced_name(source)):
            err.print(line, style="yellow", markup=False, soft_wrap=True)
    # Checkpoints of several runs have the same name; nearly tied tokens fall otherwise in another dtype.
    dtype = str(model.embed_tokens.weight.dtype).removeprefix("torch.")
    name = f"{source.name} ({fingerprint(source, without=(PROBE_FILE,))}, {dtype})"
    meta = _meta(data, trunk.vocab_size, graft, f"{name} at {low:g} to {high:g}, seed {args.seed}")
    with DatasetWriter(args.out, meta) as writer:
        left = {e.key: e for d in data for e in d.examples() if e.key not in writer.keys}
        examples = list(left.values())
        with token_bar(f"Groups of {source.name}", len(examples), err) as bar:
            for start in range(0, len(examples), args.part_size):
                part = []
                for example in regrouped(model, examples[start : start + args.part_size], (low, high), args.seed):
                    part.append(example)
                    bar.add_tokens(example.num_response_tokens)
                    bar.advance(1)
                writer.write(part)
    Console(highlight=False).print(group_report(SegmentedDataset(args.out)))
    return 0


@torch.inference_mode()
def regrouped(
    model: HamburgerModel, examples: Sequence[Example], confidence: tuple[float, float], seed: int
) -> Iterator[Example]:
    """The examples, in order, in the model's groups at a confidence that is drawn for each; without states.

    confidence: the range, within [0, 1]. The draw depends on the example and the seed alone.
    """
    network = TrainingNetwork(model, Objective(cross_entropy=0.0, lookahead="dense", first_token=False)).eval()
    graft = network.graft
    calibration = identity(graft.max_group)
    if graft.stop_scale is not None and graft.stop_bias is not None:
        calibration = Calibration(graft.stop_scale, graft.stop_bias)
    low, high = confidence
    for pack in passes(examples):
        single = [torch.ones_like(e.group_sizes) for e in pack]
        batch = collate(pack, graft.max_group, single).to(model.head_weight.device)
        rows = [int(e.response[1:].sum()) for e in pack]  # the first token has no slot before it that could give it
        if len(batch.emit):
            dials = _dials(network(batch), batch, calibration).split(rows)
        else:
            dials = batch.targets.new_empty(0, graft.max_group - 1).float().split(rows)
        for example, dial in zip(pack, dials, strict=True):
            chosen = low + (high - low) * unit_hash(f"confidence {seed} {example.key}")
            yield replace(example, group_sizes=own_groups(example.response, dial, chosen), states=None)


def own_groups(response: Tensor, dial: Tensor, confidence: float) -> Tensor:
    """Group sizes (uint8 [N], as Example.group_sizes) of an answer.

    response: bool [N]. dial: float [R, W - 1], for each of its R tokens but one at place 0 the logit of going on after
    a group's token j, where that group begins here; minus infinity where it cannot.
    """
    accepts = dial.isfinite() & (dial >= torch.logit(torch.tensor(confidence))) & (confidence < 1)
    goes_on = accepts.int().cumprod(1).sum(1).tolist()
    sizes = torch.ones(len(response), dtype=torch.uint8)
    places = (1 + response[1:].nonzero()[:, 0]).tolist()
    row = 0
    while row < len(places):
        size = 1 + goes_on[row]
        sizes[places[row] : places[row] + size] = 0
        sizes[places[row]] = size
        row += size
    return sizes


def _dials(outcome: Outcome, batch: TrainBatch, calibration: Calibration) -> Tensor:
    """float32 [M, W - 1], on the host: logits of going on, minus infinity where the answer's token is another one."""
    dial = calibration.dial(outcome.stop_logits[:, :-1].double()).float()
    given = (outcome.predicted == batch.targets) & (batch.targets != NO_TARGET)
    return dial.masked_fill(~given[:, 1:], float("-inf")).cpu()


def _meta(data: Sequence[SegmentedDataset], vocab_size: int, graft: GraftConfig, strategy: str) -> DatasetMeta:
    first = data[0]
    for other in data[1:]:
        if different := first.meta.differences(other.meta):
            raise TrainingError(
                f"{first.folder} and {other.folder} were made with different {different[0]}: regroup them apart."
            )
    if vocab_size != first.meta.vocab_size:
        raise TrainingError(
            f"the model has a vocabulary of {vocab_size}, {first.folder} of {first.meta.vocab_size}: name a HAMburger "
            "of the data's base."
        )
    return replace(first.meta, strategy=strategy, max_group=graft.max_group, state_layers=())
