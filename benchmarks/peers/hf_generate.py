"""Worker of compare.py: transformers with the plain base's weights, by `generate` or by its continuous batching.

generate: `streams` prompts at a time, padded to the longest; a batch ends when its last answer does.
lookup: `generate` with prompt lookup, which takes one prompt at a time.
batching: ContinuousBatchingManager with a paged cache and sdpa; requests come and go.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from peers.wire import Ask, Measure, Timing, serve

if TYPE_CHECKING:
    import torch

PAGE = 32  # tokens of a page, as many as our blocks have slots
NO_END = -1  # an end token that no model has
LOOKED_UP = 10  # tokens at most, which its documentation recommends


def load_model(base: str, dtype: str) -> Any:
    """The trunk that our engine serves, in transformers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from hamburger.model.checkpoints.config.hf import trunk_config_json
    from hamburger.model.checkpoints.load import load_checkpoint
    from hamburger.model.checkpoints.sources import resolve_source

    torch_dtype = getattr(torch, dtype)
    checkpoint = load_checkpoint(resolve_source(base), torch_dtype)
    model: Any = LlamaForCausalLM(LlamaConfig.from_dict(trunk_config_json(checkpoint.config.trunk))).to(torch_dtype)
    missing = model.load_state_dict(checkpoint.tensors, strict=False).missing_keys
    if set(missing) - {"lm_head.weight"}:
        raise ValueError(f"transformers misses {missing}")
    model.tie_weights()
    return model.eval()


class Generate:
    """options: further ones of `generate`."""

    def __init__(self, model: Any, **options: Any) -> None:
        self._model, self._options = model, options

    def answer(self, asks: Sequence[Ask], streams: int) -> list[Timing]:
        batches = [asks[i : i + streams] for i in range(0, len(asks), streams)]
        return [timing for batch in batches for timing in self._batch(batch)]

    def _batch(self, asks: Sequence[Ask]) -> list[Timing]:
        import torch

        timings = [Timing(len(ask.prompt_ids)) for ask in asks]
        width = max(timing.prompt_tokens for timing in timings)
        device = self._model.device
        ids = torch.tensor([[0] * (width - len(ask.prompt_ids)) + ask.prompt_ids for ask in asks], device=device)
        lengths = torch.tensor([timing.prompt_tokens for timing in timings], device=device)
        mask = (torch.arange(width, device=device)[None] >= width - lengths[:, None]).long()

        def note(tokens: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            """Called after each step was launched, with all tokens; returns which rows are done."""
            if device.type == "cuda":  # a token is there when the device is done: as a client would get it
                torch.cuda.synchronize(device)
            now = time.perf_counter()
            for ask, timing in zip(asks, timings, strict=True):
                if (new := min(tokens.shape[1] - width, ask.output_tokens) - timing.tokens) > 0:
                    timing.add(new, now)
            done = [t.tokens >= ask.output_tokens for ask, t in zip(asks, timings, strict=True)]
            return torch.tensor(done, device=device)

        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(ask.output_tokens for ask in asks),
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=[note],
                **self._options,
            )
        return timings


class Batching:
    """Its manager is made for each number of streams, with a cache that is as large as they need."""

    def __init__(self, model: Any, context: int, batched: int) -> None:
        self._model, self._context, self._batched = model, context, batched
        self._manager: Any = None
        self._streams = 0

    def answer(self, asks: Sequence[Ask], streams: int) -> list[Timing]:
        if streams != self._streams:
            self._open(streams)
        waiting = deque(asks)
        running: dict[str, Timing] = {}
        timings = []
        while waiting or running:
            while waiting and len(running) < streams:
                ask = waiting.popleft()
                timing = Timing(len(ask.prompt_ids))
                timings.append(timing)
                number = self._manager.add_request(
                    ask.prompt_ids,
                    max_new_tokens=ask.output_tokens,
                    record_timestamps=True,
                    eos_token_id=NO_END,
                )
                running[number] = timing
            result = self._manager.get_result(timeout=1)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError("transformers' continuous batching ended: its log says why")
            elif result.is_finished():
                if result.error:
                    raise RuntimeError(result.error)
                timing = running.pop(result.request_id)
                for moment in result.timestamps[: len(result.generated_tokens)]:
                    timing.add(1, moment)
        return timings

    def _open(self, streams: int) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        if self._manager is not None:
            self._manager.stop(block=True)
            self._manager.destroy()
        config = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=streams * (math.ceil(self._context / PAGE) + 1),
            max_batch_tokens=max(self._batched, streams),
            max_requests_per_batch=streams,
            allow_block_sharing=False,
            use_cuda_graph=False,
        )
        self._manager = self._model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=NO_END),
            continuous_batching_config=config,
        )
        self._manager.start()
        self._streams = streams


def load(options: dict[str, Any]) -> tuple[Measure, dict[str, Any]]:
    import torch
    import transformers

    torch.set_num_threads(options["threads"])
    model = load_model(options["base"], options["dtype"])
    facts = {"transformers": transformers.__version__, "dtype": options["dtype"]}
    if options["way"] == "generate":
        return Generate(model).answer, facts
    if options["way"] == "lookup":
        return Generate(model, prompt_lookup_num_tokens=LOOKED_UP).answer, facts
    return Batching(model, options["context"], options["batched"]).answer, facts


if __name__ == "__main__":
    serve(load)
