"""DecodeGraphs: macro-steps of decoding batches as CUDA graphs, a set of them for each bucket of rows.

    batch ──load──► static tensors ──replay──► logits ──choose 0──► micro-step 1 ──► logits ──choose 1──► ... ──► groups

A bucket's step is cut into pieces, each a graph: the trunk, each micro-step, and each choice of a token. The host
replays as many as the batch's widest group may need, and knows that beforehand. Penalties and log-probabilities are
chosen without a graph, between the graphs of the pieces that compute. Other batches (prompts, grammars, scores) take
the model's own way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, get_args

import torch

from hamburger.model.backends import Backend
from hamburger.model.batch import ForwardBatch, StepOutput
from hamburger.model.capture import Capture, Work
from hamburger.model.compiled_pieces import CompiledPieces, Compiler, inductor, while_compiling
from hamburger.model.config import DynamicRopeScaling
from hamburger.model.decode_pieces import KINDS, Kind, Pieces
from hamburger.model.hamburger import HamburgerModel
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.masked import Groups, MaskedStep
from hamburger.model.static_batch import StaticBatch, with_extras

# steps: graphs of the pieces, as many as the widest group needs. early_exit: the host also waits for each choice, and
# stops where no group goes on. whole: one graph with every micro-step there is.
Form = Literal["steps", "early_exit", "whole"]
FORMS: tuple[Form, ...] = get_args(Form)


@dataclass(slots=True)
class Compiling:
    """That the pieces of some buckets go through torch.compile (compiled_pieces.py), and how long that took.

    rows: the largest such bucket. backend: of their attention. seconds: of each bucket that was compiled, by its rows,
    with the first run of its pieces.
    """

    rows: int
    backend: Backend
    compiler: Compiler = inductor
    seconds: dict[int, float] = field(default_factory=dict)


def buckets(max_rows: int) -> list[int]:
    """Numbers of rows that batches are filled up to: 1, 2, 4, 8, 16, 24, 32, ... and max_rows itself."""
    return [rows for rows in (1, 2, 4, *range(8, max_rows, 8)) if rows < max_rows] + [max_rows]


class DecodeGraphs:
    """max_rows: rows of the largest decoding batch. max_columns: blocks of the longest sequence.

    compiling: which buckets are compiled; None for none. The others compute by the model's own modules.
    """

    def __init__(
        self,
        model: HamburgerModel,
        cache: PagedKVCache,
        capture: Capture,
        *,
        max_rows: int,
        max_columns: int,
        form: Form = "steps",
        compiling: Compiling | None = None,
    ) -> None:
        if not model.masked:
            raise ValueError("a model that leaves rows out (prepare: masked) has no shape that could be captured.")
        trunk, device = model.config.trunk, model.embed_tokens.weight.device
        self._model, self._cache, self._capture, self._form = model, cache, capture, form
        self._width, self._compiling = model.config.max_group, compiling
        self._batch = StaticBatch(
            max_rows,
            max_columns,
            self._width,
            cache.scratch_block * cache.block_size,
            cache.scratch_block,
            device,
            has_text_lengths=isinstance(trunk.rope_scaling, DynamicRopeScaling),
        )
        self._buckets = buckets(max_rows)
        self._steps: dict[int, _BucketStep] = {}
        groups = Groups.empty(max_rows, self._width, device)
        shared = torch.empty(max_rows, trunk.vocab_size, dtype=model.state_dtype, device=device)
        stop = torch.empty(max_rows, device=device)
        self._shared = groups, shared, stop

    @torch.inference_mode()
    def prepare(self, on_progress: Callable[[int, int], None] = lambda done, total: None, only: int = 0) -> None:
        """Capture every bucket, or `only` one, the largest first: its memory serves the others. on_progress: buckets
        that are done, and of how many."""
        wanted = [only] if only else self._buckets[::-1]
        for done, bucket in enumerate(wanted):
            on_progress(done, len(wanted))
            if bucket not in self._steps:
                self._steps[bucket] = self._prepared(bucket)

    @torch.inference_mode()
    def step(self, batch: ForwardBatch, cache: PagedKVCache) -> StepOutput:
        """As HamburgerModel.step, of the cache that these graphs were made for."""
        if cache is not self._cache:
            raise ValueError("these graphs read and write another cache.")
        bucket = next((size for size in self._steps_in_order() if size >= len(batch.emit)), None)
        if bucket is None or not self._batch.holds(batch):
            return self._model.step(batch, cache)
        self._batch.load(batch, bucket)
        return self._steps[bucket].run(batch)

    def _steps_in_order(self) -> list[int]:
        return [bucket for bucket in self._buckets if bucket in self._steps]

    def _prepared(self, bucket: int) -> _BucketStep:
        groups, logits, stop = self._shared
        rows = Groups(**{name: getattr(groups, name)[:bucket] for name in Groups.__dataclass_fields__})
        batches = {kind: self._batch.rows(bucket, any_sampled=kind[0], any_filtered=kind[1]) for kind in KINDS}
        given = self._model, self._cache, batches, rows, logits[:bucket], stop[:bucket]
        compiling = self._compiling if self._compiling and bucket <= self._compiling.rows else None
        if compiling is None:
            step = _BucketStep(Pieces(*given), self._form)
        else:
            pieces = CompiledPieces(*given, backend=compiling.backend, compiler=compiling.compiler)
            step = _BucketStep(pieces, self._form)
        started = time.perf_counter()
        with while_compiling() if compiling else nullcontext():
            step.warm(self._capture)
        if compiling is not None:
            before = compiling.seconds.get(bucket, 0.0)
            compiling.seconds[bucket] = before + time.perf_counter() - started
        step.capture(self._capture)
        return step


class _BucketStep:
    """The macro-step of one number of rows: its pieces, captured, in the order that a batch needs."""

    def __init__(self, pieces: Pieces, form: Form) -> None:
        self._pieces, self._form = pieces, form
        self._compute: list[Work] = []
        self._choose: dict[Kind, list[Work]] = {kind: [] for kind in KINDS}
        self._whole: dict[Kind, Work] = {}
        # What one piece leaves for the next, for as long as there are graphs: it must not become others' memory.
        self._kept: list[object] = []

    def warm(self, capture: Capture) -> None:
        """All pieces once."""

        def all_pieces() -> None:
            for index in range(self._pieces.width):
                self._pieces.compute(index)
                for kind in KINDS:
                    self._pieces.choose(kind, index)

        capture.warm(all_pieces)

    def capture(self, capture: Capture) -> None:
        """All pieces in the order of a step."""
        pieces = self._pieces
        for index in range(pieces.width):
            self._compute.append(capture(partial(pieces.compute, index)))
            for kind in KINDS:
                self._choose[kind].append(capture(partial(pieces.choose, kind, index)))
        self._kept += pieces.left()
        if self._form == "whole" and pieces.width > 1:
            for kind in KINDS:
                self._whole[kind] = capture(partial(_all_in_turn, pieces, kind))
                self._kept += pieces.left()

    def run(self, batch: ForwardBatch) -> StepOutput:
        """The step of a batch whose numbers were loaded into the static rows."""
        rows, sampling, pieces = len(batch.emit), batch.sampling, self._pieces
        kind = (sampling.any_sampled, sampling.any_sampled and sampling.any_filtered)
        special = sampling.adjustments is not None or sampling.max_logprobs >= 0
        width = min(batch.max_group_limit, pieces.width)
        choice = pieces.choices[kind]
        if special:
            extended = with_extras(choice.sampling, sampling)
            choice = MaskedStep(pieces.groups, extended, pieces.batch.confidence, pieces.batch.group_limits)
        elif width > 1 and kind in self._whole:
            self._whole[kind]()
            return _first(choice.output(), rows)
        for index in range(width):
            if index and self._form == "early_exit" and not bool(pieces.groups.going.any()):
                break
            self._compute[index]()
            if special:
                if index == 0:
                    pieces.groups.begin()
                choice.take(index, pieces.logits, pieces.stop)
            else:
                self._choose[kind][index]()
        return _first(choice.output(), rows)


def _all_in_turn(pieces: Pieces, kind: Kind) -> None:
    for index in range(pieces.width):
        pieces.compute(index)
        pieces.choose(kind, index)


def _first(output: StepOutput, rows: int) -> StepOutput:
    """Copies of the first rows: the next step overwrites what they were made of."""
    return StepOutput(
        output.token_ids[:rows].clone(), output.group_sizes[:rows].clone(), output.stop_probs[:rows].clone(),
        None if output.logprobs is None else output.logprobs.first(rows),
    )  # fmt: skip
