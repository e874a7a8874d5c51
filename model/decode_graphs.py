"""DecodeGraphs: macro-steps of decoding batches as CUDA graphs, a set of them for each bucket of rows.

    batch ──load──► static tensors ──replay──► logits ──choose 0──► micro-step 1 ──► logits ──choose 1──► ... ──► groups

A bucket's step is cut into pieces, each a graph: the trunk, each micro-step, and each choice of a token. The host
replays as many as the batch's widest group may need, and knows that beforehand. Penalties and log-probabilities are
chosen without a graph, between the graphs of the pieces that compute. Other batches (prompts, grammars, scores) take
the model's own way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from hamburger.model.batch import ForwardBatch, StepOutput
from hamburger.model.capture import Capture, Work
from hamburger.model.config import DynamicRopeScaling
from hamburger.model.hamburger import HamburgerModel
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.masked import Groups, MaskedStep
from hamburger.model.micro_cache import StaticMicroCache
from hamburger.model.static_batch import StaticBatch, with_extras

# steps: graphs of the pieces, as many as the widest group needs. early_exit: the host also waits for each choice, and
# stops where no group goes on. whole: one graph with every micro-step there is.
Form = Literal["steps", "early_exit", "whole"]
FORMS: tuple[Form, ...] = get_args(Form)
# (any_sampled, any_filtered): what a choice has to compute.
_Kind = tuple[bool, bool]
_KINDS: tuple[_Kind, ...] = ((False, False), (True, False), (True, True))


def buckets(max_rows: int) -> list[int]:
    """Numbers of rows that batches are filled up to: 1, 2, 4, 8, 16, 24, 32, ... and max_rows itself."""
    return [rows for rows in (1, 2, 4, *range(8, max_rows, 8)) if rows < max_rows] + [max_rows]


class DecodeGraphs:
    """max_rows: rows of the largest decoding batch. max_columns: blocks of the longest sequence."""

    def __init__(
        self,
        model: HamburgerModel,
        cache: PagedKVCache,
        capture: Capture,
        *,
        max_rows: int,
        max_columns: int,
        form: Form = "steps",
    ) -> None:
        if not model.masked:
            raise ValueError("a model that leaves rows out (prepare: masked) has no shape that could be captured.")
        trunk, device = model.config.trunk, model.embed_tokens.weight.device
        self._model, self._cache, self._capture, self._form = model, cache, capture, form
        self._width = model.config.max_group
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
        batches = {kind: self._batch.rows(bucket, any_sampled=kind[0], any_filtered=kind[1]) for kind in _KINDS}
        step = _BucketStep(self._model, self._cache, batches, rows, logits[:bucket], stop[:bucket], self._form)
        step.capture(self._capture)
        return step


class _BucketStep:
    """The macro-step of one number of rows, cut into pieces."""

    def __init__(
        self,
        model: HamburgerModel,
        cache: PagedKVCache,
        batches: dict[_Kind, ForwardBatch],
        groups: Groups,
        logits: Tensor,
        stop: Tensor,
        form: Form,
    ) -> None:
        """batches: the static rows, the same for each kind of choice. logits [B, V] and stop [B]: where pieces leave
        them for the choice."""
        self._model, self._cache, self._form = model, cache, form
        self._batch = batches[False, False]
        self._width = self._batch.max_group_limit
        self._groups, self._logits, self._stop = groups, logits, stop
        self._choices = {
            kind: MaskedStep(groups, b.sampling, b.confidence, b.group_limits) for kind, b in batches.items()
        }
        self._features: list[Tensor] = []
        self._micro: StaticMicroCache | None = None
        self._compute: list[Work] = []
        self._choose: dict[_Kind, list[Work]] = {}
        self._whole: dict[_Kind, Work] = {}
        # What one piece leaves for the next, for as long as there are graphs: it must not become others' memory.
        self._kept: list[object] = []

    def capture(self, capture: Capture) -> None:
        """All pieces in the order of a step."""
        width = range(self._width)
        compute = [self._computing(index) for index in width]
        choose = {kind: [self._choosing(kind, index) for index in width] for kind in self._choices}

        def all_pieces() -> None:
            for index in width:
                compute[index]()
                for kind in choose:
                    choose[kind][index]()

        capture.warm(all_pieces)
        self._choose = {kind: [] for kind in choose}
        for index in width:
            self._compute.append(capture(compute[index]))
            for kind, pieces in choose.items():
                self._choose[kind].append(capture(pieces[index]))
        self._kept += [self._features, self._micro]
        if self._form == "whole" and self._width > 1:
            for kind, pieces in choose.items():
                self._whole[kind] = capture(_in_turn(compute, pieces))
                self._kept += [self._features, self._micro]

    def run(self, batch: ForwardBatch) -> StepOutput:
        """The step of a batch whose numbers were loaded into the static rows."""
        rows, sampling = len(batch.emit), batch.sampling
        kind = (sampling.any_sampled, sampling.any_sampled and sampling.any_filtered)
        special = sampling.adjustments is not None or sampling.max_logprobs >= 0
        width = min(batch.max_group_limit, self._width)
        choice = self._choices[kind]
        if special:
            extended = with_extras(choice.sampling, sampling)
            choice = MaskedStep(self._groups, extended, self._batch.confidence, self._batch.group_limits)
        elif width > 1 and kind in self._whole:
            self._whole[kind]()
            return _first(choice.output(), rows)
        for index in range(width):
            if index and self._form == "early_exit" and not bool(self._groups.going.any()):
                break
            self._compute[index]()
            if special:
                if index == 0:
                    self._groups.begin()
                choice.take(index, self._logits, self._stop)
            else:
                self._choose[kind][index]()
        return _first(choice.output(), rows)

    def _computing(self, index: int) -> Work:
        return self._trunk if index == 0 else lambda: self._micro_step(index)

    def _choosing(self, kind: _Kind, index: int) -> Work:
        def choose() -> None:
            if index == 0:
                self._groups.begin()
            self._choices[kind].take(index, self._logits, self._stop)

        return choose

    def _trunk(self) -> None:
        model, graft = self._model, self._model.config.graft
        layers = graft.feature_layers if graft else ()
        hidden, self._features = model.trunk(model.embed(self._batch), self._batch, self._cache, model.rotary, layers)
        self._leave(hidden, model.head(hidden), 0)

    def _micro_step(self, index: int) -> None:
        if index == 1:
            self._micro = self._model.micro_decoder.start_static(torch.stack(self._features, dim=1), self._width)
        if self._micro is None:
            raise RuntimeError("a group goes on that never began.")
        state, logits = self._model.micro_step(self._groups.newest, self._micro)
        self._leave(state, logits, index)

    def _leave(self, state: Tensor, logits: Tensor, index: int) -> None:
        self._logits.copy_(logits)
        self._stop.copy_(self._model.stop_logit(state, index))


def _in_turn(compute: list[Work], choose: list[Work]) -> Work:
    def work() -> None:
        for first, then in zip(compute, choose, strict=True):
            first()
            then()

    return work


def _first(output: StepOutput, rows: int) -> StepOutput:
    """Copies of the first rows: the next step overwrites what they were made of."""
    return StepOutput(
        output.token_ids[:rows].clone(), output.group_sizes[:rows].clone(), output.stop_probs[:rows].clone(),
        None if output.logprobs is None else output.logprobs.first(rows),
    )  # fmt: skip
