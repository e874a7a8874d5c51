"""`hamburger distill`: answers to prompts, written by the base model itself through the engine.

Every answer is on disk as soon as it is finished, and depends on (seed, id, sample) alone; so a run that was killed
goes on with what is missing, and nothing is written twice.
"""

from __future__ import annotations

import argparse
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from hamburger.engine.generation_result import GenerationResult
from hamburger.engine.llm import LLM
from hamburger.engine.request import RequestUpdate
from hamburger.engine.types.messages import EngineInfo
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.model.checkpoints.sources import PROBE_FILE, resolve_source
from hamburger.training.base_model import base_arguments
from hamburger.training.corpus.conversation import ChatTokenizer, prompt_ids
from hamburger.training.corpus.jsonl import GrowingFile, check_own, read_rows
from hamburger.training.corpus.prompts import Prompt, is_held_out, read_prompts, unit_hash
from hamburger.training.corpus.repetition import is_repetitive
from hamburger.training.errors import TrainingError
from hamburger.training.forward.fingerprint import fingerprint
from hamburger.training.progress import token_bar

_KEYS = ("id", "model", "sampling")  # of every row that was written here


class Writer(Protocol):
    """What writes the answers; engine.llm.LLM is one."""

    info: EngineInfo
    tokenizer: Any

    def generate_each(
        self,
        requests: Iterable[tuple[Sequence[int], SamplingParams]],
        on_update: Callable[[RequestUpdate], None] = ...,
    ) -> Iterator[tuple[int, GenerationResult]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillSettings:
    """greedy_share: of all answers, but at most one a prompt is greedy. limit: answers at most; None: all."""

    held_out: float = 0.04
    greedy_share: float = 0.5
    temperature: float = 0.6
    top_p: float = 0.95
    max_tokens: int = 384
    seed: int = 0
    samples: int = 1
    limit: int | None = None
    keep_loops: bool = False

    def sampling(self, prompt_id: str, sample: int) -> SamplingParams:
        """How an answer is sampled; a function of its arguments and the settings alone."""
        greedy = sample == 0 and unit_hash(f"greedy {self.seed} {prompt_id}") < self.greedy_share * self.samples
        return SamplingParams(
            temperature=0.0 if greedy else self.temperature,
            top_p=1.0 if greedy else self.top_p,
            max_tokens=self.max_tokens,
            seed=answer_seed(self.seed, prompt_id, sample),
            confidence=1.0,
        )


@dataclass(slots=True)
class Tally:
    """What became of the answers that were asked for; the tokens are those written in this run."""

    found: int = 0
    kept: int = 0
    cut_off: int = 0
    repetitive: int = 0
    too_long: int = 0
    held_out: int = 0
    num_tokens: int = 0

    def lines(self) -> list[str]:
        lines = [f"{self.kept} answers written, {self.num_tokens} tokens; {self.cut_off} were cut off at max_tokens."]
        if self.found:
            lines.append(f"{self.found} were there already.")
        if self.repetitive:
            lines.append(f"{self.repetitive} went round in circles and were dropped.")
        if self.too_long:
            lines.append(f"{self.too_long} prompts leave no room for an answer of max_tokens and were left out.")
        if self.held_out:
            lines.append(f"{self.held_out} prompts are held out for evaluation.")
        return lines


@dataclass(frozen=True, slots=True)
class _Task:
    prompt: Prompt
    prompt_ids: list[int]
    sample: int


def run(args: argparse.Namespace) -> int:
    """Write the answers. Raises TrainingError, CheckpointError, ConfigError or OSError for what cannot be used."""
    console = Console(stderr=True, highlight=False)
    settings = DistillSettings(
        **{name: getattr(args, name) for name in DistillSettings.__dataclass_fields__}  # the options have these names
    )
    # All of it is read before the model is loaded, so that a wrong line is found at once.
    prompts = list(read_prompts(args.prompts))
    if not prompts:
        raise TrainingError(f"there is no prompt in {', '.join(map(str, args.prompts))}: each line is to hold one.")
    model, base = base_arguments(args.model, args.base)
    source = resolve_source(model, base)
    weights = fingerprint(source, without=(PROBE_FILE,))  # another model's folder may have the same name
    if args.out.exists():  # and so is a file of other answers
        check_own(args.out, _KEYS, "distill", is_out=True)
        with GrowingFile(args.out) as answers:
            _known(answers.path, settings, {"model": source.name, "weights": weights}, prompts)
    llm = LLM(
        model,
        base,
        device=args.device,
        dtype=args.dtype,
        max_num_seqs=args.max_num_seqs,
        max_model_len=args.max_model_len,
        prefix_cache=False,  # what was computed for one prompt must not round the answer to another
        on_progress=lambda line: console.print(line, markup=False),
    )
    tally = distill(llm, prompts, args.out, settings, model_name=source.name, weights=weights, console=console)
    for line in tally.lines():
        console.print(line, markup=False)
    return 0


def distill(
    writer: Writer,
    prompts: Sequence[Prompt],
    out: Path,
    settings: DistillSettings,
    *,
    model_name: str,
    weights: str | None = None,
    console: Console | None = None,
) -> Tally:
    """Append to `out` the answers that are missing there. weights: the model's fingerprint; None: not told.
    console: where the progress bar is shown; None: nowhere.

    Ids of answers that were dropped because they repeat themselves stand in `<out>.dropped`, so that they are not
    written again.
    Raises TrainingError when the model is a HAMburger, when there is nothing to write, when `out` holds answers made
    otherwise, or is being written by another process.
    """
    if not writer.info.is_plain_base:
        raise TrainingError(
            f"{model_name} is a HAMburger, but it is its base model that must write the answers: name that as --model."
        )
    tally = Tally()
    tasks = _tasks(writer, prompts, settings, tally)
    if not tasks and tally.too_long:
        raise TrainingError(
            f"none of the {tally.too_long} prompts that are not held out leaves room for an answer of "
            f"{settings.max_tokens} tokens in the model's context of {writer.info.max_model_len}, so there is nothing "
            "to write: lower --max-tokens, or give shorter prompts."
        )
    if not tasks and tally.held_out:
        raise TrainingError(
            f"all {tally.held_out} prompts are held out for evaluation, so there is nothing to write: give more, or "
            "lower --held-out."
        )
    dropped_file = out.with_name(out.name + ".dropped")
    for file in (out, dropped_file):
        check_own(file, _KEYS, "distill", is_out=True)
    by = {"model": model_name, "dtype": writer.info.dtype} | ({} if weights is None else {"weights": weights})
    with GrowingFile(out) as answers, GrowingFile(dropped_file) as dropped:
        known, was_dropped = (_known(file.path, settings, by, prompts) for file in (answers, dropped))
        if was_dropped and settings.keep_loops:
            raise TrainingError(
                f"{dropped_file} names {len(was_dropped)} answers that were dropped, which --keep-loops keeps: remove "
                "it, and they are written, or name another file with --out."
            )
        todo = [task for task in tasks if (task.prompt.id, task.sample) not in known | was_dropped]
        tally.found, tally.repetitive = len(known), len(was_dropped)
        with token_bar("Writing", len(tasks), console) as bar:
            bar.advance(len(tasks) - len(todo))
            requests = ((task.prompt_ids, settings.sampling(task.prompt.id, task.sample)) for task in todo)
            for index, result in writer.generate_each(requests, lambda update: bar.add_tokens(len(update.token_ids))):
                task = todo[index]
                head = _head(task, settings, by)
                tally.num_tokens += len(result.token_ids)
                if not settings.keep_loops and is_repetitive(result.token_ids):
                    tally.repetitive += 1
                    dropped.append(head)
                else:
                    tally.kept += 1
                    tally.cut_off += result.finish_reason == "length"
                    answers.append(head | _body(task, result))
                bar.advance(1)
    return tally


def answer_seed(seed: int, prompt_id: str, sample: int) -> int:
    """The sampling seed of one answer, in [0, 2**60)."""
    digest = hashlib.sha256(f"{seed} {sample} {prompt_id}".encode(errors="surrogatepass")).hexdigest()
    return int(digest[:15], 16)


def _tasks(writer: Writer, prompts: Sequence[Prompt], settings: DistillSettings, tally: Tally) -> list[_Task]:
    """What there is to write in all; counts the prompts that are left out."""
    tasks: list[_Task] = []
    tokenizer: ChatTokenizer = writer.tokenizer
    # By hash, so that what a run has written when it is ended is a fair sample of all files.
    for prompt in sorted(prompts, key=lambda p: unit_hash(f"order {p.id}")):
        if settings.limit is not None and len(tasks) >= settings.limit:
            break
        if is_held_out(prompt.id, settings.held_out):
            tally.held_out += 1
            continue
        ids = prompt_ids(tokenizer, prompt.messages)
        if len(ids) + settings.max_tokens > writer.info.max_model_len:
            tally.too_long += 1
            continue
        tasks += [_Task(prompt, ids, sample) for sample in range(settings.samples)]
    return tasks[: settings.limit]


def _head(task: _Task, settings: DistillSettings, by: Mapping[str, str]) -> dict[str, Any]:
    category = {} if task.prompt.category is None else {"category": task.prompt.category}
    return {
        "id": task.prompt.id,
        "sample": task.sample,
        **category,
        "sampling": _sampling_values(settings, task.prompt.id, task.sample),
        **by,
    }


def _body(task: _Task, result: GenerationResult) -> dict[str, Any]:
    return {
        "messages": task.prompt.messages,
        "prompt_ids": result.prompt_ids,
        "response": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
    }


def _sampling_values(settings: DistillSettings, prompt_id: str, sample: int) -> dict[str, Any]:
    params = settings.sampling(prompt_id, sample)
    names = ("temperature", "top_p", "max_tokens", "seed")
    return {name: getattr(params, name) for name in names}


def _known(
    path: Path, settings: DistillSettings, by: Mapping[str, str], prompts: Sequence[Prompt]
) -> set[tuple[str, int]]:
    """(id, sample) of every row. Raises TrainingError for a row that these settings would not have made, and for one
    that answers another prompt than the one that has its id now.

    by: "model", and as far as they are known "dtype" and "weights", which older rows do not say.
    """
    counts: Counter[tuple[str, int]] = Counter()
    asked = {prompt.id: prompt.messages for prompt in prompts}
    for row in read_rows(path):
        prompt_id, sample = row.values.get("id"), row.values.get("sample", 0)
        if not isinstance(prompt_id, str) or type(sample) is not int:
            raise TrainingError(f"{row.place} was not written by distill: name another file with --out.")
        said = {name: value for name, value in by.items() if name == "model" or name in row.values}
        wanted = {**said, "sampling": _sampling_values(settings, prompt_id, sample)}
        made = {name: row.values.get(name) for name in wanted}
        if made != wanted:
            raise TrainingError(
                f"{row.place} was made with other options ({made}; now {wanted}): repeat those, or name another file "
                "with --out."
            )
        messages = row.values.get("messages")  # those that were dropped have none
        if messages is not None and messages != asked.get(prompt_id, messages):
            raise TrainingError(
                f'{row.place} answers another prompt than the one that has the id "{prompt_id}" now. Prompts without '
                "an id are called by their line, so leave their lines as they were: add new ones behind them, or name "
                "another file with --out."
            )
        counts[prompt_id, sample] += 1
    twice = [key for key, times in counts.items() if times > 1]
    if twice:
        raise TrainingError(f'{path} holds the answer to "{twice[0][0]}" twice: remove one of them.')
    return set(counts)
