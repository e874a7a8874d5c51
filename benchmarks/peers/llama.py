"""Worker of compare.py: llama.cpp with its own continuous batching, through llama-cpp-python's binding of its C API.

llama-cpp-python's classes and its server module answer one request at a time, so the loop of llama.cpp's own server is
written here: every decode takes the next token of each running sequence, and what is left of `n_batch` for prompts.
"""

from __future__ import annotations

import importlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from peers.wire import Ask, Measure, Timing, serve


@dataclass(slots=True)
class Running:
    """A sequence in a seat. fed: tokens that the cache holds; todo: tokens to feed next."""

    timing: Timing
    wanted: int
    todo: list[int]
    seat: int
    fed: int = 0


class Llama:
    """One GGUF model, and a context for one number of seats at a time."""

    def __init__(self, api: Any, file: str, context: int, threads: int, n_batch: int) -> None:
        self._api, self._context_tokens, self._threads, self._n_batch = api, context, threads, n_batch
        api.llama_backend_init()
        self._model = api.llama_model_load_from_file(file.encode(), api.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {file}")
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._batch = api.llama_batch_init(n_batch, 0, 1)
        self._context: Any = None
        self._seats = 0

    def answer(self, asks: Sequence[Ask], streams: int) -> list[Timing]:
        """Answer all, `streams` at a time."""
        if streams != self._seats:
            self._open(streams)
        memory = self._api.llama_get_memory(self._context)
        self._api.llama_memory_clear(memory, True)
        waiting, free = deque(asks), list(range(streams))
        running: list[Running] = []
        timings = []
        while waiting or running:
            while waiting and free:
                ask = waiting.popleft()
                running.append(Running(Timing(len(ask.prompt_ids)), ask.output_tokens, ask.prompt_ids, free.pop()))
                timings.append(running[-1].timing)
            for sequence in self._step(running):
                self._api.llama_memory_seq_rm(memory, sequence.seat, -1, -1)
                free.append(sequence.seat)
                running.remove(sequence)
        return timings

    def _open(self, seats: int) -> None:
        """A context with that many seats: its cache, like everyone's, is as large as the level needs."""
        if self._context is not None:
            self._api.llama_free(self._context)
        params = self._api.llama_context_default_params()
        params.n_ctx, params.n_seq_max = self._context_tokens * seats, seats
        params.n_batch = params.n_ubatch = self._n_batch
        params.n_threads = params.n_threads_batch = self._threads
        params.kv_unified = False
        self._context = self._api.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot make a context of {params.n_ctx} tokens")
        self._seats = seats

    def _step(self, running: Sequence[Running]) -> list[Running]:
        """Decode one batch; returns the sequences that it finished."""
        ends: list[tuple[int, Running]] = []  # (row whose logits choose the next token, its sequence)
        rows = 0
        for sequence in sorted(running, key=lambda s: len(s.todo)):  # those that decode first, then prompts
            chunk = sequence.todo[: self._n_batch - rows]
            for token in chunk:
                self._fill(rows, token, sequence.fed, sequence.seat, last=False)
                sequence.fed += 1
                rows += 1
            sequence.todo = sequence.todo[len(chunk) :]
            if chunk and not sequence.todo:
                self._batch.logits[rows - 1] = 1
                ends.append((rows - 1, sequence))
        self._batch.n_tokens = rows
        if code := self._api.llama_decode(self._context, self._batch):
            raise RuntimeError(f"llama_decode returned {code}")
        tokens = [self._likeliest(row) for row, _ in ends]
        now = time.perf_counter()
        for token, (_, sequence) in zip(tokens, ends, strict=True):
            sequence.timing.add(1, now)
            sequence.todo = [token]
        return [sequence for _, sequence in ends if sequence.timing.tokens >= sequence.wanted]

    def _fill(self, row: int, token: int, position: int, seat: int, *, last: bool) -> None:
        batch = self._batch
        batch.token[row], batch.pos[row], batch.logits[row] = token, position, last
        batch.n_seq_id[row], batch.seq_id[row][0] = 1, seat

    def _likeliest(self, row: int) -> int:
        import numpy as np

        logits = self._api.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())


def load(options: dict[str, Any]) -> tuple[Measure, dict[str, Any]]:
    package = importlib.import_module("llama_cpp")
    llama = Llama(
        importlib.import_module("llama_cpp.llama_cpp"),
        options["gguf"],
        options["context"],
        options["threads"],
        options["batched"],
    )
    return llama.answer, {"llama-cpp-python": package.__version__}


if __name__ == "__main__":
    serve(load)
