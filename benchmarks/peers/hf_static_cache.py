"""Worker of gpu.py: transformers' `generate` with a static cache, whose decoding steps it compiles on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peers.device_memory import free_bytes
from peers.hf_generate import Generate
from peers.wire import Ask, Measure, Timing, serve


class StaticGenerate(Generate):
    """One cache for each number of streams: of one length, so that what was compiled for it serves all answers."""

    def __init__(self, model: Any, context: int, *, compiled: bool) -> None:
        from transformers import CompileConfig

        config = CompileConfig(fullgraph=False, mode="reduce-overhead") if compiled else None
        super().__init__(model, compile_config=config, disable_compile=not compiled)
        self._context = context
        self._caches: dict[int, Any] = {}

    def answer(self, asks: Sequence[Ask], streams: int) -> list[Timing]:
        import torch
        from transformers import StaticCache

        if streams not in self._caches:
            self._caches[streams] = StaticCache(config=self._model.config, max_cache_len=self._context)
        timings = []
        for first in range(0, len(asks), streams):
            with torch.inference_mode():  # in which it was filled
                self._caches[streams].reset()
            self._options["past_key_values"] = self._caches[streams]
            timings += self._batch(asks[first : first + streams])
        return timings


def load(options: dict[str, Any]) -> tuple[Measure, dict[str, Any]]:
    import torch
    import transformers

    free = free_bytes(options["device"])
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        options["folder"], dtype=getattr(torch, options["dtype"])
    )
    facts = {key: options[key] for key in ("device", "dtype", "compiled")}
    generate = StaticGenerate(model.to(options["device"]).eval(), options["context"], compiled=options["compiled"])
    versions = {"transformers": transformers.__version__, "cache": "static", "free_bytes": free}
    return generate.answer, facts | versions


if __name__ == "__main__":
    serve(load)
