"""`hamburger segment`: answers -> entropies under the base model -> groups, as a data set to train on.

Conversations are scored part by part and each part is written whole, so a run that was killed goes on after the last
one; answers that were added to the files since then are added to the data set.
"""

from __future__ import annotations

import argparse
import hashlib
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Protocol

import torch
from rich.console import Console

from hamburger.engine.text.tokenizer import Tokenizer
from hamburger.model.checkpoints.sources import EMBEDDED_BASE, PROBE_FILE, resolve_source
from hamburger.training.base_model import base_arguments
from hamburger.training.corpus.answers import WrittenAnswer, check_written_with, read_answers
from hamburger.training.corpus.conversation import ChatTokenizer, TokenizedConversation, TrainOn
from hamburger.training.corpus.dataset import DatasetMeta, Example, SegmentedDataset
from hamburger.training.corpus.dataset_writer import DatasetWriter
from hamburger.training.corpus.prompts import is_held_out
from hamburger.training.corpus.repetition import first_repeated_ngram, is_repetitive
from hamburger.training.corpus.segmentation import Strategy, check_settings, segment
from hamburger.training.errors import TrainingError
from hamburger.training.forward.fingerprint import fingerprint
from hamburger.training.forward.scoring import Scorer, TokenScores
from hamburger.training.prepare.group_report import group_report
from hamburger.training.progress import token_bar
from hamburger.training.recipe import spaced_layers

_SCORED_AT_ONCE = 32  # a few passes of the scorer, so that the bar moves


class TokenScorer(Protocol):
    """What scores texts; training.forward.scoring.Scorer does."""

    max_length: int

    def score(
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int], top_k: int, state_layers: tuple[int, ...]
    ) -> list[TokenScores]: ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """A conversation to score: its ids and response mask, and the key by which it is recognised in a data set."""

    id: str
    key: str
    token_ids: array[int]
    response: bytes  # one byte a token, 0 or 1

    @property
    def start(self) -> int:
        return self.response.index(1)


@dataclass(slots=True)
class Tally:
    """What became of the answers."""

    added: int = 0
    found: int = 0
    twice: int = 0
    held_out: int = 0
    repetitive_dropped: int = 0
    repetitive_cut: int = 0
    shortened: int = 0
    too_long: int = 0

    def lines(self) -> list[str]:
        reasons = {
            "were in the data set already": self.found,
            "came twice, word for word": self.twice,
            "answer held-out prompts and were left out": self.held_out,
            "went round in circles and were dropped": self.repetitive_dropped,
            "went round in circles and were cut where they begin to repeat": self.repetitive_cut,
            "were cut at max_length": self.shortened,
            "have a prompt of max_length tokens or more and were left out": self.too_long,
        }
        return [f"{self.added} answers added.", *(f"{number} {text}." for text, number in reasons.items() if number)]


def run(args: argparse.Namespace) -> int:
    """Make the data set and report. Raises TrainingError, CheckpointError, ConfigError, TokenizerError or OSError."""
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    check_settings(args.strategy, args.max_group, args.ratio, args.floor)
    model, base = base_arguments(args.model, args.base)
    source = resolve_source(model, base)
    if next(read_answers(args.answers), None) is None:
        raise TrainingError(f"there is no answer in {', '.join(map(str, args.answers))}: each line is to hold one.")
    tokenizer = Tokenizer.load(source.tokenizer_path)
    check_written_with(tokenizer, args.answers)
    scorer = Scorer.load(
        model,
        base,
        device=args.device,
        dtype=args.dtype,
        quantization=args.quantization,
        on_progress=lambda line: err.print(line, markup=False),
    )
    trunk = scorer.model.config.trunk
    if scorer.model.config.graft is not None:
        raise TrainingError(
            f"{source.name} is a HAMburger, but it is its base model that must score: name that as --model."
        )
    if args.top_k > trunk.vocab_size:
        raise TrainingError(f"--top-k is {args.top_k}, but the model has {trunk.vocab_size} tokens: name no more.")
    meta = DatasetMeta(
        model=source.name,
        model_argument=_from_anywhere(args.model),
        base=_from_anywhere(args.base),
        vocab_size=trunk.vocab_size,
        strategy=args.strategy,
        ratio=args.ratio,
        floor=args.floor,
        max_group=args.max_group,
        top_k=args.top_k,
        max_length=args.max_length,
        train_on=args.train_on,
        loops=args.loops,
        held_out=args.held_out,
        state_layers=state_layers(args.states, trunk.num_layers),
        dtype=str(scorer.model.embed_tokens.weight.dtype).removeprefix("torch."),
        quantization="auto" if scorer.is_quantized else "none",
        weights=fingerprint(source, without=(PROBE_FILE,)),
    )
    tally = segment_answers(
        scorer,
        tokenizer,
        read_answers(args.answers),
        args.out,
        meta,
        end_token_ids=trunk.eos_token_ids,
        part_size=args.part_size,
        console=err,
    )
    for line in tally.lines():
        out.print(line, markup=False)
    data = SegmentedDataset(args.out)
    if not len(data):
        raise TrainingError(f"no answer is left, so {args.out} holds no example: give others, or other options.")
    out.print(group_report(data))
    return 0


def _from_anywhere(model: str | None) -> str | None:
    """A folder or file by its whole path, so that `inspect` finds it from elsewhere; names as they are."""
    if model is None or model == EMBEDDED_BASE or not Path(model).expanduser().exists():
        return model
    return str(Path(model).expanduser().resolve())


def state_layers(asked: int | tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """The layers whose states are kept, of a number of them or their names. Raises TrainingError."""
    if isinstance(asked, int):
        return spaced_layers(asked, num_layers) if asked else ()
    if asked[-1] >= num_layers:
        raise TrainingError(f"--states names layer {asked[-1]}, but the model's are 0..{num_layers - 1}.")
    return asked


def segment_answers(
    scorer: TokenScorer,
    tokenizer: ChatTokenizer,
    answers: Iterable[WrittenAnswer],
    folder: Path,
    meta: DatasetMeta,
    *,
    end_token_ids: Collection[int],
    part_size: int = 512,
    console: Console | None = None,
) -> Tally:
    """Add the answers that the data set in `folder` lacks. console: where the bar is shown; None: nowhere.

    Raises TrainingError for answers that cannot be used (the message names the line), and for such a folder.
    """
    tally = Tally()
    with DatasetWriter(folder, meta) as writer:
        todo = _prepare(tokenizer, answers, meta, end_token_ids, min(meta.max_length, scorer.max_length), writer, tally)
        with token_bar("Scoring", len(todo), console) as bar:
            for part in _chunks(todo, part_size):
                examples: list[Example] = []
                for chunk in _chunks(part, _SCORED_AT_ONCE):
                    ids, starts = [p.token_ids for p in chunk], [p.start for p in chunk]
                    scores = scorer.score(ids, starts, meta.top_k, meta.state_layers)
                    examples += [make_example(p, s, meta) for p, s in zip(chunk, scores, strict=True)]
                    bar.add_tokens(sum(len(p.token_ids) for p in chunk))
                    bar.advance(len(chunk))
                writer.write(examples)
                tally.added += len(examples)
    return tally


def make_example(prepared: Prepared, scores: TokenScores, meta: DatasetMeta) -> Example:
    """scores: of the tokens from prepared.start on."""
    response = torch.frombuffer(bytearray(prepared.response), dtype=torch.bool)
    trained = response[prepared.start :]
    entropy = torch.zeros(len(response))
    entropy[prepared.start :] = scores.entropies.float() * trained
    optional = {"top_ids": scores.top_ids[trained], "top_logprobs": scores.top_logprobs[trained]} if meta.top_k else {}
    if meta.state_layers:
        optional["states"] = scores.states[trained]
    return Example(
        prepared.id,
        prepared.key,
        torch.tensor(prepared.token_ids, dtype=torch.int32),
        response,
        entropy,
        group_sizes(entropy.tolist(), prepared.response, meta),
        **optional,
    )


def group_sizes(entropies: Sequence[float], response: Sequence[int], meta: DatasetMeta) -> torch.Tensor:
    """uint8 [N]: at each group's first token its size, else 0; tokens that are not trained are groups of one.

    Each answer is segmented by itself, so no group reaches over a border.
    """
    sizes: list[int] = []
    for is_trained, run in groupby(range(len(response)), key=lambda i: bool(response[i])):
        indices = list(run)
        if not is_trained:
            sizes += [1] * len(indices)
            continue
        # check_settings was asked for the strategy, so it is one.
        strategy: Strategy = meta.strategy  # type: ignore[assignment]
        values = [entropies[i] for i in indices]
        for size in segment(values, strategy, meta.max_group, meta.ratio, meta.floor, meta.vocab_size):
            sizes += [size] + [0] * (size - 1)
    return torch.tensor(sizes, dtype=torch.uint8)


def _prepare(
    tokenizer: ChatTokenizer,
    answers: Iterable[WrittenAnswer],
    meta: DatasetMeta,
    end_token_ids: Collection[int],
    max_length: int,
    writer: DatasetWriter,
    tally: Tally,
) -> list[Prepared]:
    """The conversations to add, in order; counts what is left out and why."""
    todo: dict[str, Prepared] = {}
    for answer in answers:
        if is_held_out(answer.id, meta.held_out):
            tally.held_out += 1
            continue
        train_on: TrainOn = "all" if meta.train_on == "all" else "last"
        conversation = answer.tokenize(tokenizer, end_token_ids, train_on)
        if max(conversation.token_ids) >= meta.vocab_size:
            raise TrainingError(
                f"{answer.place} has the token id {max(conversation.token_ids)}, but the model's vocabulary is "
                f"0..{meta.vocab_size - 1}: name the model that wrote the answers with --model."
            )
        length = _length_without_repetition(conversation, meta.loops)
        if length is None:
            tally.repetitive_dropped += 1
            continue
        end = min(length, max_length)
        ids, response = conversation.token_ids[:end], conversation.response[:end]
        if True not in response:
            tally.too_long += 1
            continue
        prepared = _prepared(answer.id, ids, response)
        if prepared.key in writer.keys:
            tally.found += 1
        elif prepared.key in todo:
            tally.twice += 1
        else:
            todo[prepared.key] = prepared
            tally.repetitive_cut += length < len(conversation.token_ids)
            tally.shortened += length > max_length
    return list(todo.values())


def _length_without_repetition(conversation: TokenizedConversation, handling: str) -> int | None:
    """Tokens to keep of a conversation whose last answer may repeat itself: all where it does not, None where the
    example is dropped. handling: DatasetMeta.loops."""
    ids, response = conversation.token_ids, conversation.response
    if handling == "keep":
        return len(ids)
    end = len(response) - response[::-1].index(True)
    start = end - next((i for i, r in enumerate(response[end - 1 :: -1]) if not r), end)
    answer = ids[start:end]
    if not is_repetitive(answer):
        return len(ids)
    repeats_at = first_repeated_ngram(answer)
    return None if handling == "drop" or repeats_at is None else start + repeats_at


def _prepared(id: str, token_ids: Sequence[int], response: Sequence[bool]) -> Prepared:
    ids, mask = array("i", token_ids), bytes(response)
    key = hashlib.sha256(b"".join(i.to_bytes(4, "little") for i in ids) + mask).hexdigest()[:20]
    return Prepared(id, key, ids, mask)


def _chunks(items: Sequence[Prepared], size: int) -> list[Sequence[Prepared]]:
    return [items[i : i + size] for i in range(0, len(items), size)]
