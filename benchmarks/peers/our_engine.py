"""Worker of compare.py and gpu.py: our engine alone, without HTTP: so that what HTTP and streaming cost can be told."""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hamburger.engine.core.core import EngineCore
from hamburger.engine.request import GenerationRequest, resolve_request
from hamburger.engine.types.config import EngineArgs
from hamburger.engine.types.messages import EngineInfo
from hamburger.engine.types.sampling_params import SamplingParams
from peers.device_memory import fitting_pool, free_bytes
from peers.wire import Ask, Measure, Timing, serve

if TYPE_CHECKING:
    from hamburger.model.batch import ForwardBatch, StepOutput
from hamburger.model.kv_cache import PagedKVCache


@dataclass(slots=True)
class ShortGroups:
    """A model's step whose groups end after `group` tokens, as if the model had ended them: only the device knows. So
    the host launches the micro-steps of whole groups, as it does where it cannot know. None: groups are what they are.
    """

    step: Callable[[ForwardBatch, PagedKVCache], StepOutput]
    group: int | None = None

    def __call__(self, batch: ForwardBatch, cache: PagedKVCache) -> StepOutput:
        if self.group is not None:
            batch = replace(batch, group_limits=batch.group_limits.clamp(max=self.group))
        return self.step(batch, cache)


class Engine:
    def __init__(self, core: EngineCore, info: EngineInfo, groups: ShortGroups) -> None:
        self._core, self._info, self._groups = core, info, groups
        self._numbers = itertools.count()

    def answer(self, asks: Sequence[Ask], streams: int) -> list[Timing]:
        """Answer all, `streams` at a time. Raises RuntimeError where the engine gives a request up."""
        waiting = deque(asks)
        self._groups.group = asks[0].group if asks else None
        running: dict[str, Timing] = {}
        timings = []
        while waiting or running:
            while waiting and len(running) < streams:
                ask, number = waiting.popleft(), str(next(self._numbers))
                params = SamplingParams(temperature=0, max_tokens=ask.output_tokens, ignore_eos=True)
                request = GenerationRequest(number, ask.prompt_ids, params)
                running[number] = Timing(len(ask.prompt_ids))
                timings.append(running[number])
                self._core.add(resolve_request(request, self._info, time.monotonic()))
            step = self._core.step()
            now = time.perf_counter()
            if step.failures:
                raise RuntimeError(step.failures[0].message)
            for output in step.outputs:
                running[output.request_id].add(len(output.token_ids), now)
                if output.finish_reason is not None:
                    del running[output.request_id]
        return timings


def load(options: dict[str, Any]) -> tuple[Measure, dict[str, Any]]:
    """beside_pool: bytes of the device that the process takes beside its KV pool, which is smaller where both do not
    fit; without it the pool is what it is asked to be."""
    from hamburger.engine.build import build_core

    engine = options.get("engine", {})
    asked, free = options["kv_cache_memory"], free_bytes(engine.get("device", "auto"))
    pool = fitting_pool(asked, free, options["beside_pool"]) if "beside_pool" in options else asked
    core, info = build_core(
        EngineArgs(
            model=options["model"],
            max_model_len=options["context"],
            kv_cache_memory=pool,
            prefix_cache=False,
            **{"groups": "composed", **engine},
        ),
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    # The engine has no such setting, and should have none: a server's groups end when the model says so.
    runner: Any = core._runner
    runner._steps.step = groups = ShortGroups(runner._steps.step)
    facts = {"model": info.model, "device": info.device, "dtype": info.dtype, "quantization": info.quantization}
    memory = {"pool_slots": info.total_slots, "pool_bytes": pool, "asked_bytes": asked, "free_bytes": free}
    return Engine(core, info, groups).answer, facts | memory


if __name__ == "__main__":
    serve(load)
