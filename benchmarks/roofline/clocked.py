"""A core whose steps are clocked by their parts, and what each part has to read and to multiply."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from hamburger.engine.core.core import EngineCore
from hamburger.engine.drafting.costs import MeasuredCosts
from hamburger.model.cpu.library import STAGES, Kernels
from hamburger.model.cpu.weights import PackedWeight
from roofline.rates import Rates

# The rest: scheduler, tensors, results, and all that Python does around the kernels.
PARTS = ("embedding and merge", "linears", "attention", "norms and rounding", "head", "micro-steps", "the rest")
BOUNDED = ("linears", "attention", "head")  # parts with a roofline


@dataclass(frozen=True, slots=True)
class Steps:
    """Of some macro-steps: seconds of all and of each of PARTS, tokens, groups, drafts and micro-steps, rows of the
    trunk, slots of contexts (once for all rows of a sequence), pairs of a row with a slot that it attends, and rows of
    the head."""

    number: int
    seconds: float
    parts: tuple[float, ...]
    tokens: int
    groups: int
    drafts: int
    micro_steps: int
    rows: int
    context_slots: int
    attended: int
    heads: int


class ClockedCore:
    """Only what the compiled kernels run is told apart: without them (quantization none) all but the embedding is the
    rest."""

    def __init__(self, core: EngineCore, prompts: list[list[int]]) -> None:
        self.core, self.prompts = core, prompts
        self.costs: MeasuredCosts | None = None if core._policy is None else core._policy.costs().measured
        runner = cast(Any, core._runner)
        self._cache, steps = runner._cache, runner._steps  # whose methods are replaced
        self._embed_seconds, self._micro_steps = 0.0, 0
        self._backend, embed, step_with = steps.backend, steps.backend.embed, steps.step_with

        def clocked_embed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return embed(*args)
            finally:
                self._embed_seconds += time.perf_counter() - start

        def counted(*args: Any) -> Any:
            self._micro_steps += args[1].max_group_limit - 1
            return step_with(*args)

        steps.backend.embed, steps.step_with = clocked_embed, counted
        self._clock = torch.zeros(len(STAGES), dtype=torch.int64)
        self._kernels: Kernels | None = getattr(getattr(steps.backend, "_trunk", None), "_kernels", None)
        if self._kernels is not None:
            self._kernels.clock = self._clock

    @property
    def vocab_size(self) -> int:
        return int(self._backend.trunk_config.vocab_size)

    def linear_products(self, rows: float) -> dict[str, float]:
        """Of so many rows with the trunk's weights, as Rates.seconds takes them."""
        return products_of(self._backend._trunk._layers.weights, rows)

    def prefill(self, tokens: int) -> Steps:
        """The step of a waiting prompt of so many tokens, which no other request shares."""
        self._reset()
        start = time.perf_counter()
        [output] = self.core.step().outputs
        seconds = time.perf_counter() - start
        pairs = tokens * (tokens + 1) // 2
        return Steps(1, seconds, self._parts(seconds), len(output.token_ids), 1, 0, 0, tokens, tokens, pairs, heads=1)

    def steps(self, number: int) -> Steps:
        self._reset()
        tokens = groups = drafts = context = attended = 0
        start, beside = time.perf_counter(), 0.0
        for _ in range(number):
            before = time.perf_counter()
            slots = [sequence.num_computed_slots + 1 for sequence in self.core._scheduler.running]
            beside += time.perf_counter() - before
            outputs = self.core.step().outputs
            before = time.perf_counter()
            for held, output in zip(slots, outputs, strict=True):
                checked = 0 if output.drafts is None else len(output.drafts.token_ids)
                tokens += len(output.token_ids)
                groups += 1
                drafts += checked
                context += held + checked
                attended += (1 + checked) * (held + checked)
            beside += time.perf_counter() - before
        seconds = time.perf_counter() - start - beside
        parts, rows = self._parts(seconds), groups + drafts
        return Steps(number, seconds, parts, tokens, groups, drafts, self._micro_steps, rows, context, attended, rows)

    def _reset(self) -> None:
        self._clock.zero_()
        self._embed_seconds, self._micro_steps = 0.0, 0

    def _parts(self, seconds: float) -> tuple[float, ...]:
        """Of so many in all, since it was reset."""
        spent = dict(zip(STAGES, (value / 1e9 for value in self._clock.tolist()), strict=True))
        spent["embedding and merge"] = self._embed_seconds
        spent["the rest"] = seconds - sum(spent.values())
        return tuple(spent[part] for part in PARTS)

    def bounds(self, of: Steps, rates: Rates) -> dict[str, float] | None:
        """Seconds that a step's BOUNDED parts take at least; None without the kernels.

        Linears read all weights of the trunk once a step, attention each sequence's context, a head its 4-bit copy
        (what is read of the 8-bit one for a few outputs is left out). Keys and values are multiplied as floats, but for
        a pool in 8 bits, whose keys are bytes, twice for each query's 15 bits.
        """
        if self._kernels is None:
            return None
        backend, config = self._backend, self._backend.trunk_config
        weights, coarse = backend._trunk._layers.weights, backend._head._coarse
        slot_bytes = sum(t[0, 0].numel() * t.element_size() for t in [*self._cache.data, *self._cache.scales])
        multiplied = config.num_heads * config.head_dim * config.num_layers * of.attended / of.number
        in_bytes = bool(self._cache.scales)
        rows = of.rows / of.number
        attention = rates.seconds(
            slot_bytes * of.context_slots / of.number,
            byte_products=2 * multiplied if in_bytes else 0.0,
            float_products=multiplied if in_bytes else 2 * multiplied,
        )
        head = products_of([coarse], of.heads / of.number)
        return {
            "linears": rates.seconds(sum(w.nbytes for w in weights), **products_of(weights, rows)),
            "attention": attention,
            "head": rates.seconds(coarse.nbytes, **head),
        }


def products_of(weights: Sequence[PackedWeight], rows: float) -> dict[str, float]:
    """Of so many rows with each of these weights, as Rates.seconds takes them."""
    products = {"byte_products": 0.0, "code_products": 0.0}
    for weight in weights:
        products["code_products" if weight.bits == 4 else "byte_products"] += rows * weight.outputs * weight.inputs
    return products
