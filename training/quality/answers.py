"""Greedy answers of a model at many confidences, each generated once, then read from a cache on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from hamburger.engine.build import build_core
from hamburger.engine.core.core import EngineCore
from hamburger.engine.generation_result import GenerationResult
from hamburger.engine.llm import LLM
from hamburger.engine.text.tokenizer import Tokenizer
from hamburger.engine.types.config import EngineArgs, Quantization
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.model.checkpoints.sources import BUILTIN, EMBEDDED_BASE, ModelSource, read_json, resolve_source
from hamburger.training.corpus.jsonl import GrowingFile, read_rows
from hamburger.training.progress import token_bar
from hamburger.training.quality.prompts import Prompt

_DIGITS = 6


@dataclass(frozen=True, slots=True)
class ModelName:
    """What the user named: a model, and the base of one that holds only a part."""

    model: str | None
    base: str | None = None

    @property
    def source(self) -> ModelSource:
        """Raises CheckpointError."""
        return resolve_source(self.model, self.base)

    @property
    def has_graft(self) -> bool:
        """Whether it is a HAMburger. Raises CheckpointError."""
        source = self.source
        ours = source.kind == "hamburger" and "graft" in read_json(source.path / "config.json")
        return ours or source.kind == "lightning"

    @property
    def own_base(self) -> str:
        """The base that it refers to, else the embedded one. Raises CheckpointError."""
        source = self.source
        if self.base is not None:
            return self.base
        refers = source.kind == "hamburger" and source.base_path not in (None, BUILTIN)
        return str(source.base_path) if refers else EMBEDDED_BASE

    def tokenizer(self) -> Tokenizer:
        """Raises CheckpointError and TokenizerError."""
        return Tokenizer.load(self.source.tokenizer_path)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How both models run; fields are those of EngineArgs."""

    device: str
    dtype: str
    quantization: Quantization
    max_num_seqs: int
    max_model_len: int


@dataclass(frozen=True, slots=True, eq=False)
class Engine:
    """A loaded model: the offline API, and the core below it whose single steps are timed."""

    llm: LLM
    core: EngineCore


@dataclass(frozen=True, slots=True)
class Answer:
    """One greedy answer. stop_probs: one entry a token. ended: the model ended it itself, with an end token."""

    prompt: Prompt
    confidence: float
    groups: list[list[int]]
    stop_probs: list[float]
    ended: bool

    @property
    def token_ids(self) -> list[int]:
        return [token_id for group in self.groups for token_id in group]


def load_engine(name: ModelName, options: EngineOptions, on_progress: Callable[[str], None]) -> Engine:
    """Load a model. Raises CheckpointError, ConfigError and TokenizerError."""
    args = EngineArgs(
        quantization=options.quantization,
        groups="composed",  # only these change what a model says; a plain base's are of one token
        prefix_cache=False,  # what was computed for one prompt must not round the answer to another
        model=name.model,
        base=name.base,
        device=options.device,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_slots=max(512, options.max_num_seqs),
        max_queue_seconds=1e9,
    )
    core, info = build_core(args, on_progress)
    return Engine(LLM.from_core(core, info, name.tokenizer()), core)


def generate_answers(
    engine: Callable[[], Engine],
    cache: GrowingFile,
    model: str,
    wanted: Sequence[tuple[Prompt, float]],
    max_tokens: int,
) -> list[Answer]:
    """The answer to each (prompt, confidence), from the cache where it is there.

    engine: loads the model, and is only called for answers that are missing. model: its fingerprint.
    """
    # An id whose text has changed since is another prompt.
    rows = (row.values for row in read_rows(cache.path))
    known = {(row["confidence"], row["id"], tuple(row["prompt_ids"])): row for row in rows if row["model"] == model}
    missing = [pair for pair in wanted if _key(*pair) not in known]
    if missing:
        llm = engine().llm
        requests = (
            (prompt.prompt_ids, SamplingParams(temperature=0, max_tokens=max_tokens, confidence=confidence))
            for prompt, confidence in missing
        )
        with token_bar(f"Answers of {llm.info.model}", len(wanted), Console(stderr=True)) as bar:
            bar.advance(len(wanted) - len(missing))
            for index, result in llm.generate_each(requests, lambda update: bar.add_tokens(len(update.token_ids))):
                pair = missing[index]
                known[_key(*pair)] = _row(model, *pair, result)
                cache.append(known[_key(*pair)])
                bar.advance(1)
    return [_answer(*pair, known[_key(*pair)]) for pair in wanted]


def _key(prompt: Prompt, confidence: float) -> tuple[float, str, tuple[int, ...]]:
    return confidence, prompt.id, tuple(prompt.prompt_ids)


def _row(model: str, prompt: Prompt, confidence: float, result: GenerationResult) -> dict[str, Any]:
    return {
        "model": model,
        "confidence": confidence,
        "id": prompt.id,
        "kind": prompt.kind,
        "prompt_ids": prompt.prompt_ids,
        "groups": result.groups,
        "stop_probs": [round(p, _DIGITS) for p in result.stop_probs],
        "finish_reason": result.finish_reason,
        "text": result.text,  # for people
    }


def _answer(prompt: Prompt, confidence: float, row: dict[str, Any]) -> Answer:
    return Answer(prompt, confidence, row["groups"], row["stop_probs"], row["finish_reason"] == "stop")
