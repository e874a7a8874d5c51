"""`hamburger eval-quality`: tokens per KV against quality on held-out prompts, beside the untouched base.

It answers, scores and reports; everything slow is kept in the folder, so a call that was cut off goes on where it was.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from hamburger.engine.text.tokenizer import Tokenizer
from hamburger.engine.types.messages import EngineInfo
from hamburger.model.device.devices import choose_device, choose_dtype
from hamburger.training.corpus.conversation import prompt_ids
from hamburger.training.corpus.jsonl import GrowingFile, check_own
from hamburger.training.errors import TrainingError
from hamburger.training.forward.fingerprint import fingerprint
from hamburger.training.forward.scoring import Scorer
from hamburger.training.quality.answers import (
    Answer,
    Engine,
    EngineOptions,
    ModelName,
    generate_answers,
    load_engine,
)
from hamburger.training.quality.plots import plot_curve, plot_reliability
from hamburger.training.quality.points import Point, make_point, reliability
from hamburger.training.quality.prompts import Prompt, choose_prompts, read_kinds
from hamburger.training.quality.report import Evaluation, verdict_lines, write_json, write_markdown
from hamburger.training.quality.scores import AnswerScore, Score, base_logprobs, score_answer
from hamburger.training.quality.speed import Setting, Timed, micro_step_cost, time_all
from hamburger.training.quality.verdict import suggested_confidence, verdicts

BASE_CONFIDENCE = 1.0  # a plain base runs no micro-step, whatever it is asked
SHOWN_SETTINGS = (
    *("per_kind", "held_out", "max_prompt_tokens", "max_tokens"),
    *("speed_prompts", "speed_tokens", "rounds", "seed"),
)
# What is kept in the folder, and some of what its rows hold.
_KEPT = {
    "answers.jsonl": ("model", "confidence", "id", "prompt_ids", "groups", "stop_probs"),
    "speed.jsonl": ("model", "confidence", "id", "prompt_ids", "sizes", "seconds"),
    "scores.jsonl": ("scorer", "text", "logprobs"),
}


@dataclass(frozen=True, slots=True)
class _Job:
    """What one call evaluates. *_print: fingerprints of the models as they are run."""

    args: argparse.Namespace
    say: Callable[[str], None]
    model: ModelName
    base: ModelName
    model_print: str
    base_print: str
    scorer_print: str
    prompts: list[Prompt]
    options: EngineOptions


def run(args: argparse.Namespace) -> int:
    """Evaluate and write the results. Returns 0, whatever the verdict.

    Raises TrainingError, CheckpointError, ConfigError, HamburgerError or OSError.
    """
    err, out = Console(stderr=True, highlight=False), Console(highlight=False)
    for name, keys in _KEPT.items():
        check_own(args.out / name, keys, "eval-quality")
    args.out.mkdir(parents=True, exist_ok=True)
    job = _job(args, lambda line: err.print(line, markup=False, soft_wrap=True))
    with GrowingFile(args.out / "answers.jsonl") as cache:
        info, answers = _model_answers(job, cache)
        base_answers = _base_answers(job, cache)
    settings = [Setting(job.base_print, BASE_CONFIDENCE), *(Setting(job.model_print, c) for c in answers)]
    with GrowingFile(args.out / "speed.jsonl") as cache:
        timed = _timed(job, cache, settings)
    with GrowingFile(args.out / "scores.jsonl") as cache:
        scores, base_scores = _scores(job, cache, answers, base_answers)
    evaluation = _evaluation(job, info, scores, base_scores, timed, settings)
    _write(args.out, evaluation)
    for line in verdict_lines(evaluation):
        out.print(line, markup=False, soft_wrap=True)
    out.print(f"The table, the curve and all figures are in {args.out}.", markup=False, soft_wrap=True)
    return 0


def _job(args: argparse.Namespace, say: Callable[[str], None]) -> _Job:
    """Everything that can be wrong is looked at here, before any model is loaded."""
    model = ModelName(args.model, args.base)
    base = ModelName(args.base_model or model.own_base)
    if base.has_graft:
        raise TrainingError(f"base_model {args.base_model} is a HAMburger: name the untouched model below it.")
    tokenizer = model.tokenizer()
    _check_same_tokenizer(tokenizer, base.tokenizer())

    def encode(messages: Sequence[dict[str, str]]) -> list[int]:
        return prompt_ids(tokenizer, messages)

    kinds = None if args.kinds is None else read_kinds(args.kinds)
    prompts = choose_prompts(args.prompts, kinds, args.per_kind, args.held_out, encode, args.max_prompt_tokens)
    longest = max(len(prompt.prompt_ids) for prompt in prompts)
    named = ", ".join(dict.fromkeys(prompt.kind for prompt in prompts))
    say(f"{len(prompts)} held-out prompts ({args.per_kind} each of {named}), the longest of {longest} tokens")
    # What `auto` means here, so that a folder that goes on elsewhere mixes no two machines' figures.
    device = choose_device(args.device)
    machine = (str(device), str(choose_dtype(args.dtype, device)))
    as_served = () if args.quantization == "none" else (args.quantization,)
    engine = (*machine, args.max_tokens, *as_served)
    return _Job(
        args=args,
        say=say,
        model=model,
        base=base,
        model_print=fingerprint(model.source, *engine),
        base_print=fingerprint(base.source, *engine),
        scorer_print=fingerprint(base.source, *machine),
        prompts=prompts,
        options=EngineOptions(
            args.device,
            args.dtype,
            args.quantization,
            args.max_num_seqs,
            longest + max(args.max_tokens, args.speed_tokens),
        ),
    )


def _check_same_tokenizer(mine: Tokenizer, base: Tokenizer) -> None:
    """The base scores the model's token ids, so every id must mean the same text to both."""
    if mine.vocab_size != base.vocab_size or any(
        mine.token_bytes(i) != base.token_bytes(i) for i in range(mine.vocab_size)
    ):
        raise TrainingError("model and base_model have different tokenizers: name the base that the model was made of.")


def _model_answers(job: _Job, cache: GrowingFile) -> tuple[EngineInfo, dict[float, list[Answer]]]:
    """What the engine says of the model, and the model's answers by confidence."""
    engine = _load(job.model, job)
    info = engine.llm.info
    confidences = sorted({*job.args.confidences, info.default_confidence})
    wanted = [(prompt, c) for c in confidences for prompt in job.prompts]
    found = generate_answers(lambda: engine, cache, job.model_print, wanted, job.args.max_tokens)
    return info, {c: [a for a in found if a.confidence == c] for c in confidences}


def _base_answers(job: _Job, cache: GrowingFile) -> list[Answer]:
    wanted = [(prompt, BASE_CONFIDENCE) for prompt in job.prompts]
    return generate_answers(lambda: _load(job.base, job), cache, job.base_print, wanted, job.args.max_tokens)


def _timed(job: _Job, cache: GrowingFile, settings: list[Setting]) -> dict[Setting, list[Timed]]:
    def engines() -> dict[str, Engine]:
        return {
            job.base_print: _load(job.base, job, max_num_seqs=1),
            job.model_print: _load(job.model, job, max_num_seqs=1),
        }

    prompts = spread(job.prompts, job.args.speed_prompts)
    return time_all(engines, cache, prompts, settings, job.args.speed_tokens) if prompts else {}


def spread(prompts: Sequence[Prompt], number: int) -> list[Prompt]:
    """`number` of the prompts (or all), taken from the kinds in turns."""
    kinds: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        kinds.setdefault(prompt.kind, []).append(prompt)
    longest = max(map(len, kinds.values()), default=0)
    turns = [members[i] for i in range(longest) for members in kinds.values() if i < len(members)]
    return turns[:number]


def _scores(
    job: _Job, cache: GrowingFile, answers: dict[float, list[Answer]], base_answers: list[Answer]
) -> tuple[dict[float, list[AnswerScore]], list[AnswerScore]]:
    def load() -> Score:
        _release_memory()
        name, args = job.base, job.args
        scorer = Scorer.load(name.model, name.base, device=args.device, dtype=args.dtype, on_progress=job.say)

        def score(sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> list[list[float]]:
            return [found.logprobs.tolist() for found in scorer.score(sequences, starts)]

        return score

    everything = [*base_answers, *(answer for found in answers.values() for answer in found)]
    logprobs = base_logprobs(everything, load, cache, job.scorer_print)
    scored = [score_answer(answer, values) for answer, values in zip(everything, logprobs, strict=True)]
    base_scores, rest = scored[: len(base_answers)], scored[len(base_answers) :]
    return {c: [s for s in rest if s.confidence == c] for c in answers}, base_scores


def _evaluation(
    job: _Job,
    info: EngineInfo,
    scores: dict[float, list[AnswerScore]],
    base_scores: list[AnswerScore],
    timed: dict[Setting, list[Timed]],
    settings: list[Setting],
) -> Evaluation:
    rounds, seed = job.args.rounds, job.args.seed

    def point(confidence: float | None, mine: list[AnswerScore], setting: Setting) -> Point:
        pair = (timed[setting], timed[settings[0]]) if timed else None
        return make_point(confidence, mine, base_scores, rounds, seed, pair)

    points = [point(c, scores[c], setting) for c, setting in zip(scores, settings[1:], strict=True)]
    below_one = [t for s in settings[1:] if s.confidence < 1 for t in timed.get(s, [])]
    cost = micro_step_cost(timed.get(settings[0], []), below_one)
    kinds: dict[str, list[str]] = {}
    for prompt in job.prompts:
        kinds.setdefault(prompt.kind, []).append(prompt.id)
    return Evaluation(
        model=job.model.source.name,
        base=job.base.source.name,
        default_confidence=info.default_confidence,
        suggested_confidence=suggested_confidence(points),
        settings=_settings(job, info),
        prompts=kinds,
        base_point=point(None, base_scores, settings[0]),
        points=points,
        reliability=reliability(s for found in scores.values() for s in found),
        micro_step_cost=cost,
        verdicts=verdicts(points, info.default_confidence, cost),
    )


def _settings(job: _Job, info: EngineInfo) -> dict[str, Any]:
    return {
        **{name: getattr(job.args, name) for name in SHOWN_SETTINGS},
        "device": info.device,
        "dtype": info.dtype,
        "weights": info.dtype if info.quantization == "none" else info.quantization,
        "threads": torch.get_num_threads(),
        "model_fingerprint": job.model_print,
        "base_fingerprint": job.base_print,
    }


def _write(folder: Path, e: Evaluation) -> None:
    write_json(folder / "results.json", e)
    write_markdown(folder / "results.md", e)
    plot_curve(
        folder / "curve.png", f"{e.model} beside the untouched {e.base}", e.base_point, e.points, e.default_confidence
    )
    plot_reliability(folder / "reliability.png", f"The dial of {e.model}", e.reliability, e.points)


def _load(name: ModelName, job: _Job, max_num_seqs: int | None = None) -> Engine:
    _release_memory()
    options = replace(job.options, max_num_seqs=max_num_seqs or job.options.max_num_seqs)
    return load_engine(name, options, job.say)


def _release_memory() -> None:
    """A KV pool is sized by what is free, so the model before must really be gone."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
