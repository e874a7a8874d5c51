"""DecodeGraphs: macro-steps of decoding batches as CUDA graphs, a set of them for each bucket of rows.

    batch ──load──► static tensors ──replay──► logits ──choose 0──► micro-step 1 ──► logits ──choose 1──► ... ──► groups

A bucket's step is cut into pieces, each a graph: the trunk, each micro-step, and each choice of a token. The host
replays as many as the batch's widest group may need, and knows that beforehand. Penalties and log-probabilities are
chosen without a graph, between the graphs of the pieces that compute. With prompts, scores or LoRA adapters in it a
batch's trunk is the eager one, and the pieces after it are replayed. Rows with a grammar are emitted eagerly, after the
replays for the others.

Verified groups: each draft is a row, so a bucket holds sequences and drafts. Every row's micro-steps run: which of them
is read, only the host finds out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from hamburger.model.batch import ForwardBatch, StepOutput
from hamburger.model.emission.narrowing import NarrowingEmission
from hamburger.model.graphs.capture import Capture
from hamburger.model.graphs.pieces import KINDS, BucketStep, Pieces, StepTensors
from hamburger.model.graphs.static_batch import StaticBatch
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.rope_scaling import DynamicRopeScaling
from hamburger.model.steps import EagerSteps


def buckets(max_rows: int) -> list[int]:
    """Numbers of rows that batches are filled up to: 1, 2, 4, 8, 16, 24, 32, ... and max_rows itself."""
    return [rows for rows in (1, 2, 4, *range(8, max_rows, 8)) if rows < max_rows] + [max_rows]


class DecodeGraphs:
    """A Steps (model/steps.py) for one cache. Batches that it cannot take run eagerly."""

    def __init__(
        self,
        eager: EagerSteps,
        cache: PagedKVCache,
        capture: Capture,
        *,
        max_rows: int,
        max_columns: int,
        is_verified: bool = False,
    ) -> None:
        """max_rows: rows of the largest batch that is captured. max_columns: blocks of the longest sequence.
        is_verified: the groups of all batches are.

        Raises ValueError where the backend is not static, or its trunk has experts, which a step's numbers choose.
        """
        backend = eager.backend
        if not backend.static or backend.trunk_config.experts is not None:
            raise ValueError("a backend whose shapes depend on a step's numbers has none that could be captured.")
        self.config, self.trunk_config = backend.config, backend.trunk_config
        self.device, self.state_dtype = backend.device, backend.state_dtype
        self.quantization, self.short_list = backend.quantization, backend.short_list
        self._eager, self._backend, self._cache, self._capture = eager, backend, cache, capture
        self._narrowing, self._is_verified = NarrowingEmission(backend), is_verified
        self._batch = StaticBatch(
            max_rows,
            max_columns,
            backend.config.max_group,
            cache.scratch_block * cache.block_size,
            cache.scratch_block,
            backend.device,
            has_text_lengths=isinstance(backend.config.trunk.rope_scaling, DynamicRopeScaling),
            is_verified=is_verified,
            lends=cache.lends,
        )
        self._buckets = buckets(max_rows)
        self._steps: dict[int, BucketStep] = {}
        self._tensors = StepTensors.empty(backend, max_rows, is_verified=is_verified)

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
        """As of Steps, of the cache and the kind of groups that these graphs were made for: ValueError for others."""
        if cache is not self._cache:
            raise ValueError("these graphs read and write another cache.")
        if (batch.checks is not None) != self._is_verified:
            raise ValueError("these graphs make groups of the other kind.")
        bucket = self._bucket(len(batch.emit))
        if bucket is None or not self._batch.holds_choices(batch):
            return self._eager.step(batch, cache)
        if not self._batch.holds(batch):
            return self._eager.step_with(_ReplayedEmission(self, bucket), batch, cache)
        self._batch.load(free := _unconstrained(batch), bucket)
        self._steps[bucket].trunk()
        return self._emit(batch, free, bucket)

    def emit_behind(self, states: Tensor, features: list[Tensor], batch: ForwardBatch, bucket: int) -> StepOutput:
        """The groups of a batch that no graph holds, whose trunk has run eagerly: states and features [M, D]."""
        self._batch.load_choices(free := _unconstrained(batch), bucket)
        self._steps[bucket].pieces.take_over(states, features)
        return self._emit(batch, free, bucket)

    def _emit(self, batch: ForwardBatch, free: ForwardBatch, bucket: int) -> StepOutput:
        """The groups of a batch whose choices are loaded, and whose trunk has run. free: _unconstrained(batch)."""
        step, constraint, rows = self._steps[bucket], batch.sampling.constraint, len(batch.emit)
        if constraint is None or len(constraint.rows) < rows:
            output = step.groups(free)
            if constraint is None:
                return output
        # After the replays, as it waits for the device: what they compute goes on while the host makes masks.
        of_rows = step.pieces.tensors.first(rows)
        guided = self._narrowing.emit(of_rows.hidden, [*of_rows.features.unbind(1)], batch, constraint.rows)
        return guided if len(constraint.rows) == rows else _with_rows(output, guided, constraint.rows)

    def _bucket(self, rows: int) -> int | None:
        """The smallest that was captured and holds so many rows."""
        return next((bucket for bucket in self._buckets if bucket >= rows and bucket in self._steps), None)

    def _prepared(self, bucket: int) -> BucketStep:
        batches = {kind: self._batch.rows(bucket, any_sampled=kind[0], any_filtered=kind[1]) for kind in KINDS}
        tensors = self._tensors.first(bucket)
        step = BucketStep(Pieces(self._backend, self._cache, batches, tensors, is_verified=self._is_verified))
        step.warm(self._capture)
        step.capture(self._capture)
        return step


class _ReplayedEmission:
    """An Emission that replays the pieces after a trunk that no graph holds."""

    def __init__(self, graphs: DecodeGraphs, bucket: int) -> None:
        self._graphs, self._bucket = graphs, bucket

    def takes(self, batch: ForwardBatch) -> bool:
        return True

    def emit(self, states: Tensor, features: list[Tensor], batch: ForwardBatch) -> StepOutput:
        return self._graphs.emit_behind(states, features, batch, self._bucket)


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
