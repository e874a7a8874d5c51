"""`hamburger train`: makes a run of recipe, data and model, and trains to its end or until a signal asks to stop."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from rich.console import Console

from hamburger.model.checkpoints.sources import resolve_source
from hamburger.model.device.devices import choose_device, choose_dtype, make_current
from hamburger.training.base_model import other_scorer
from hamburger.training.batches.packs import Examples, Pack, Packer, PackStream, Source
from hamburger.training.corpus.dataset import SegmentedDataset
from hamburger.training.corpus.prompts import is_kept_back
from hamburger.training.errors import TrainingError
from hamburger.training.forward.origin import Origin, read_base, read_hamburger, with_graft
from hamburger.training.forward.trainable import build
from hamburger.training.recipe import Grouping, Recipe, parse_recipe, read_recipe
from hamburger.training.run.allocator import keep_freed_memory
from hamburger.training.run.folder import RunFolder, read_state
from hamburger.training.run.journal import Journal
from hamburger.training.run.trainer import Parts, Trainer
from hamburger.training.run.validation import Validator

STOPPED = 130  # the exit code of a run that a signal ended, so that a script does not go on without it


def run(args: argparse.Namespace) -> int:
    """Run the command (cli/train.py). Raises TrainingError, CheckpointError or ConfigError."""
    recipe = read_recipe(args.recipe, args.overrides)
    if args.init is not None:
        recipe = parse_recipe(recipe.model_dump() | {"init": args.init}, args.recipe)
    if args.validation is not None:  # nothing of the data is then kept back, and the run's folder has to say so
        recipe = parse_recipe(recipe.model_dump() | {"validation_share": 0.0}, args.recipe)
    if choose_device(args.device).type == "cpu":
        keep_freed_memory()
    data = _data_sets("--data", args.data)
    held_out = None if args.validation is None else _data_sets("--validation", args.validation)
    console = Console(stderr=True)
    with _stop_signals(console) as stop:
        job = Job(recipe, data, args.out, validation=held_out, device=args.device, resume=args.resume)
        complete = job.run(console, stop)
    job.accelerator.end_training()  # several processes part here
    if not complete and job.accelerator.is_main_process:
        console.print(f"stopped, with a checkpoint: go on with --resume (latest: {job.folder.latest()}).")
    return 0 if complete else STOPPED


def _data_sets(option: str, folders: Sequence[Path]) -> list[SegmentedDataset]:
    """Raises TrainingError where one is named twice: each of its examples would count twice."""
    places = [folder.resolve() for folder in folders]
    if again := [folder for i, folder in enumerate(folders) if places[i] in places[:i]]:
        raise TrainingError(f"{option} names {again[0]} twice: name it once.")
    return [SegmentedDataset(folder) for folder in folders]


class StopRequest:
    """Set by a signal; the run then ends after its step, with a checkpoint."""

    def __init__(self) -> None:
        self.requested = False

    def __call__(self) -> bool:
        return self.requested


@dataclass(frozen=True, slots=True, eq=False)
class _Data:
    train: Examples
    held_out: Examples


class Job:
    """One training run over data sets, made ready to go.

    validation: data sets to validate with; None keeps back recipe.validation_share of `data`.
    Raises TrainingError for data that do not fit the model or the recipe, and for a folder that is in use.
    """

    def __init__(
        self,
        recipe: Recipe,
        data: Sequence[Source],
        out: Path,
        *,
        validation: Sequence[Source] | None = None,
        device: str = "auto",
        resume: bool = False,
    ) -> None:
        if recipe.threads is not None:
            torch.set_num_threads(recipe.threads)
        where = choose_device(device)
        make_current(where)
        self.accelerator = Accelerator(mixed_precision="no", cpu=where.type == "cpu")
        self.recipe, self.folder, self._held = recipe, RunFolder(out), ExitStack()
        if resume:  # no checkpoint may go while it is read
            self._hold()
        latest = self.folder.start_from(resume=resume)
        chosen = _split(recipe, data, validation)
        start = recipe.init if latest is None else str(latest)
        origin = read_base(recipe.base) if start is None else read_hamburger(start)
        vocab = origin.config.trunk.vocab_size
        sets = [source for source in (*data, *(validation or ())) if isinstance(source, SegmentedDataset)]
        self.warnings = [*_check_scored(sets, origin), *_check_held_out(recipe, chosen, validation is not None)]
        for examples in (chosen.train, chosen.held_out):
            examples.check(recipe, origin.config.trunk)
        if recipe.cached_states and (origin.adapter is not None or origin.base is None):
            raise TrainingError(
                f"cached_states are the untouched base's, but {start} has a trunk of its own: leave out cached_states."
            )
        origin = with_graft(origin, recipe, lambda size: chosen.train.likeliest_ids(size, vocab))
        compute = choose_dtype(recipe.precision, self.accelerator.device)
        longest = max(chosen.train.longest, chosen.held_out.longest)
        trainable = build(origin, recipe, device=self.accelerator.device, compute=compute, max_positions=longest)
        packer = Packer(
            chosen.train, recipe.graft.max_group, recipe.slots_per_pack, recipe.seed, cached_states=recipe.cached_states
        )
        stream = PackStream(packer, recipe.groups, recipe.packs_per_step)
        if stream.packs_per_epoch < recipe.packs_per_step:
            self.warnings.append(
                f"warning: packs_per_step is {recipe.packs_per_step}, but the data makes {stream.packs_per_epoch}, so "
                "that a step takes some of them several times: lower packs_per_step or slots_per_pack."
            )
        self.trainer = Trainer(
            Parts(
                recipe,
                trainable,
                stream,
                _validator(recipe, chosen.held_out, self.accelerator),
                self.accelerator,
                self.folder,
                compute,
                len(chosen.train),
                chosen.train.fingerprint,
            )
        )
        if latest is not None:
            self.trainer.load(read_state(latest, recipe, len(chosen.train), chosen.train.fingerprint))
        if not resume:
            self._hold()
        if self.accelerator.is_main_process:
            self.folder.start(recipe, resume=resume)

    def _hold(self) -> None:
        if self.accelerator.is_main_process:
            self._held.enter_context(self.folder.held())

    def run(self, console: Console, stop: Callable[[], bool]) -> bool:
        """Train; returns whether the run is complete. The folder is then no longer held."""
        with self._held:
            return self._run(console, stop)

    def _run(self, console: Console, stop: Callable[[], bool]) -> bool:
        if not self.accelerator.is_main_process:
            return self.trainer.run(None, stop)
        for line in self.warnings:
            console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
        if self.trainer.step >= self.trainer.total_steps:
            console.print(
                f"the run has finished, with step {self.trainer.step}: nothing is left to train. Its checkpoint is "
                f"{self.folder.latest()}; another run can begin from that with --init.",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
            if not self.trainer.lacks_validation:
                return True
        journal = Journal(self.folder.path, self.trainer.step, self.trainer.total_steps, console)
        with journal.open():
            return self.trainer.run(journal, stop)


def _split(recipe: Recipe, data: Sequence[Source], validation: Sequence[Source] | None) -> _Data:
    """Examples to train with and to validate with; an id's answers are all on one side."""
    if validation is not None:
        return _Data(_not_empty(Examples(data)), Examples(validation))

    def kept_back(id: str) -> bool:
        return is_kept_back(id, recipe.validation_share)

    trained = Examples(data, lambda id: not kept_back(id))
    return _Data(_not_empty(trained, recipe.validation_share), Examples(data, kept_back))


def _check_scored(sets: Sequence[SegmentedDataset], origin: Origin) -> list[str]:
    """What looks as if another model scored the data, as lines to show. Raises TrainingError where one surely did."""
    vocab, base = origin.config.trunk.vocab_size, origin.base and resolve_source(origin.base, weights=False).name
    for data in sets:
        if data.meta.vocab_size != vocab:
            raise TrainingError(
                f"{data.folder} was scored by {data.meta.model}, which has a vocabulary of {data.meta.vocab_size}, but "
                f"the model to train has {vocab}: segment it with the model's own base."
            )
    return [line for data in sets for line in other_scorer(data.folder, data.meta.model, base)]


def _check_held_out(recipe: Recipe, data: _Data, is_given: bool) -> list[str]:
    """What is wrong with the examples to validate with, as lines to show. Raises TrainingError where that is all."""
    if not len(data.held_out):
        if is_given:
            raise TrainingError("--validation has no example with a trained token: check what `segment` wrote.")
        if not recipe.validation_share:
            return []
        share = f"validation_share {recipe.validation_share:g}"
        return [f"warning: {share} keeps no example back, so nothing is validated: raise it, or name --validation."]
    if number := len(data.held_out.ids & data.train.ids):
        return [f"warning: {number} prompts of --validation are trained too, so it foresees them too well."]
    return []


def _not_empty(examples: Examples, share: float = 0.0) -> Examples:
    if not len(examples):
        why = f", or lower validation_share, {share:g}" if share else ""
        raise TrainingError(f"the data has no example with a trained token to train: check what `segment` wrote{why}.")
    return examples


def _validator(recipe: Recipe, examples: Examples, accelerator: Accelerator) -> Validator | None:
    if not len(examples):
        return None
    packer = Packer(examples, recipe.graft.max_group, recipe.slots_per_pack, recipe.seed)
    as_trained = recipe.groups.model_copy(update={"single_share": 0.0})
    grouped, single = packer.in_order(as_trained), packer.in_order(Grouping(kind="single"))
    n = recipe.validation_batches
    return Validator(_spread(grouped, n), _spread(single, n), accelerator)


def _spread(packs: Sequence[Pack], number: int) -> Sequence[Pack]:
    """So many from all over the data sets, which come one after the other and may differ in kind."""
    return [packs[i * len(packs) // number] for i in range(number)] if len(packs) > number else packs


@contextmanager
def _stop_signals(console: Console) -> Iterator[StopRequest]:
    """SIGTERM and the first Ctrl-C ask for a stop; a second one is as always."""
    stop = StopRequest()

    def ask(number: int, frame: object) -> None:
        stop.requested = True
        signal.signal(number, before[signal.Signals(number)])
        console.print("stopping after this step, with a checkpoint; once more to stop at once.")

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
