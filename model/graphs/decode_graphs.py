"""DecodeGraphs: macro-steps of decoding batches as CUDA graphs, a set of them for each bucket of rows.

    batch ──load──► static tensors ──replay──► logits ──choose 0──► micro-step 1 ──► logits ──choose 1──► ... ──► groups

A bucket's step is cut into pieces, each a graph: the trunk, each micro-step, and each choice of a token. The host
replays as many as the batch's widest group may need, and knows that beforehand. Penalties and log-probabilities are
chosen without a graph, between the graphs of the pieces that compute. With prompts or scores in it a batch's trunk is
the model's own, and the pieces after it are replayed. Rows with a grammar are emitted the model's own way, after the
replays for the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from hamburger.model.batch import ForwardBatch, StepOutput
from hamburger.model.config import DynamicRopeScaling
from hamburger.model.graphs.bucket_step import BucketStep
from hamburger.model.graphs.capture import Capture
from hamburger.model.graphs.pieces import KINDS, Handover, Pieces
from hamburger.model.graphs.static_batch import StaticBatch
from hamburger.model.hamburger import HamburgerModel
from hamburger.model.kv_cache import PagedKVCache


def buckets(max_rows: int) -> list[int]:
    """Numbers of rows that batches are filled up to: 1, 2, 4, 8, 16, 24, 32, ... and max_rows itself."""
    return [rows for rows in (1, 2, 4, *range(8, max_rows, 8)) if rows < max_rows] + [max_rows]


class DecodeGraphs:
    """max_rows: rows of the largest decoding batch. max_columns: blocks of the longest sequence."""

    def __init__(
        self, model: HamburgerModel, cache: PagedKVCache, capture: Capture, *, max_rows: int, max_columns: int
    ) -> None:
        if not model.masked:
            raise ValueError("a model that leaves rows out (prepare: masked) has no shape that could be captured.")
        trunk, device = model.config.trunk, model.embed_tokens.weight.device
        self._model, self._cache, self._capture = model, cache, capture
        self._batch = StaticBatch(
            max_rows,
            max_columns,
            model.config.max_group,
            cache.scratch_block * cache.block_size,
            cache.scratch_block,
            device,
            has_text_lengths=isinstance(trunk.rope_scaling, DynamicRopeScaling),
        )
        self._buckets = buckets(max_rows)
        self._steps: dict[int, BucketStep] = {}
        self._handover = Handover.empty(model, max_rows)

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
        bucket = self._bucket(len(batch.emit))
        if bucket is None or not self._batch.holds_choices(batch):
            return self._model.step(batch, cache)
        pieces = self._steps[bucket].pieces
        if not self._batch.holds(batch):

            def emit(hidden: Tensor, features: list[Tensor], batch: ForwardBatch) -> StepOutput:
                self._batch.load_choices(free := _unconstrained(batch), bucket)
                pieces.take_over(hidden, features)
                return self._emit(batch, free, bucket)

            return self._model.step_with(emit, batch, cache)
        self._batch.load(free := _unconstrained(batch), bucket)
        self._steps[bucket].trunk()
        return self._emit(batch, free, bucket)

    def _emit(self, batch: ForwardBatch, free: ForwardBatch, bucket: int) -> StepOutput:
        """The groups of a batch whose choices are loaded, and whose trunk has run. free: _unconstrained(batch)."""
        step, constraint, rows = self._steps[bucket], batch.sampling.constraint, len(batch.emit)
        if constraint is None or len(constraint.rows) < rows:
            output = step.groups(free)
            if constraint is None:
                return output
        # After the replays, as it waits for the device: what they compute goes on while the host makes masks.
        of_rows = step.pieces.handover.first(rows)
        guided = self._model.emit_narrowing(of_rows.hidden, [*of_rows.features.unbind(1)], batch, constraint.rows)
        return guided if len(constraint.rows) == rows else _with_rows(output, guided, constraint.rows)

    def _bucket(self, rows: int) -> int | None:
        """The smallest that was captured and holds so many rows."""
        return next((bucket for bucket in self._buckets if bucket >= rows and bucket in self._steps), None)

    def _prepared(self, bucket: int) -> BucketStep:
        batches = {kind: self._batch.rows(bucket, any_sampled=kind[0], any_filtered=kind[1]) for kind in KINDS}
        step = BucketStep(Pieces(self._model, self._cache, batches, self._handover.first(bucket)))
        step.warm(self._capture)
        step.capture(self._capture)
        return step


def _unconstrained(batch: ForwardBatch) -> ForwardBatch:
    """Its rows with a grammar ask for no second token: what the graphs choose for them is not read."""
    constraint = batch.sampling.constraint
    if constraint is None:
        return batch
    most = batch.max_group_limit if batch.max_free_limit is None else batch.max_free_limit
    single = batch.confidence.index_fill(0, constraint.rows, 1.0)
    return replace(batch, confidence=single, max_group_limit=most)


def _with_rows(output: StepOutput, other: StepOutput, rows: Tensor) -> StepOutput:
    """`output` with some rows of `other`, whose groups may be narrower; it is changed."""

    def put(into: Tensor, values: Tensor) -> None:
        into[:, : values.shape[1]].index_copy_(0, rows, values.index_select(0, rows))

    output.group_sizes.index_copy_(0, rows, other.group_sizes.index_select(0, rows))
    put(output.token_ids, other.token_ids)
    put(output.stop_probs, other.stop_probs)
    if output.logprobs is not None and other.logprobs is not None:
        put(output.logprobs.chosen, other.logprobs.chosen)
        put(output.logprobs.top_ids, other.logprobs.top_ids)
        put(output.logprobs.top, other.logprobs.top)
    return output
