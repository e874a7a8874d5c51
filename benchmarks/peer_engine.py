"""Worker of compare.py: our engine alone, without HTTP: so that what HTTP and streaming cost can be told."""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from hamburger.engine.config import EngineArgs
from hamburger.engine.core import EngineCore
from hamburger.engine.messages import EngineInfo
from hamburger.engine.request import GenerationRequest, admit
from hamburger.engine.sampling_params import SamplingParams
from peer_wire import Ask, Measure, Timing, serve


class Engine:
    def __init__(self, core: EngineCore, info: EngineInfo) -> None:
        self._core, self._info = core, info
        self._numbers = itertools.count()

    def answer(self, asks: Sequence[Ask], streams: int) -> list[Timing]:
        """Answer all, `streams` at a time. Raises RuntimeError where the engine gives a request up."""
        waiting = deque(asks)
        running: dict[str, Timing] = {}
        timings = []
        while waiting or running:
            while waiting and len(running) < streams:
                ask, number = waiting.popleft(), str(next(self._numbers))
                params = SamplingParams(temperature=0, max_tokens=ask.output_tokens, ignore_eos=True)
                request = GenerationRequest(number, ask.prompt_ids, params)
                running[number] = Timing(len(ask.prompt_ids))
                timings.append(running[number])
                self._core.add(admit(request, self._info, time.monotonic()))
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
    from hamburger.engine.build import build_core

    core, info = build_core(
        EngineArgs(
            model=options["model"],
            max_model_len=options["context"],
            kv_cache_memory=options["kv_cache_memory"],
            prefix_cache=False,
            **options.get("engine", {}),
        ),
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    facts = {"model": info.model, "device": info.device, "dtype": info.dtype, "quantization": info.quantization}
    return Engine(core, info).answer, facts


if __name__ == "__main__":
    serve(load)
