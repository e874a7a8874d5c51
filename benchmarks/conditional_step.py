"""A decoding step as one CUDA graph that stops by itself: each micro-step lies in a conditional node of the one before.

    trunk ─► choose 0 ─► if any group goes on: micro-step 1 ─► choose 1 ─► if any goes on: ...

The fourth form that decode_step.py times, for greedy choices; the engine has no such form. torch captures conditional
nodes from 2.12 on, through functions of its CUDA graphs that it does not document.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hamburger.model.batch import ForwardBatch, StepOutput
from hamburger.model.graphs.capture import CudaCapture, EagerCapture
from hamburger.model.graphs.pieces import GREEDY, KINDS, Handover, Pieces
from hamburger.model.graphs.static_batch import StaticBatch
from hamburger.model.hamburger import HamburgerModel
from hamburger.model.kv_cache import PagedKVCache

If = Callable[[Tensor, Callable[[], None]], None]  # (bool [], what is done where it is True)
_NEEDED = ("get_currently_capturing_graph", "begin_capture_to_if_node", "end_capture_to_conditional_node")
_LEAST_CUDA = (12, 4)


def why_not(device: torch.device) -> str | None:
    """What keeps this form from being captured on `device`; None where nothing is known to. On a CPU it is replayed."""
    if device.type != "cuda":
        return None
    if not all(hasattr(torch.cuda.CUDAGraph, name) for name in _NEEDED):
        return f"torch {torch.__version__} captures no conditional nodes, which it does from 2.12 on"
    cuda = torch.version.cuda
    if cuda is None or tuple(map(int, cuda.split(".")[:2])) < _LEAST_CUDA:
        return f"conditional nodes came with CUDA 12.4, and torch was built for {cuda}"
    return None


class ConditionalStep:
    """For exactly `rows` rows. max_columns: blocks of the longest sequence.

    Raises RuntimeError where the driver or torch refuses the capture.
    """

    @torch.inference_mode()
    def __init__(self, model: HamburgerModel, cache: PagedKVCache, rows: int, max_columns: int) -> None:
        device, width = model.embed_tokens.weight.device, model.config.max_group
        self._rows = rows
        scratch_slot = cache.scratch_block * cache.block_size
        self._static = StaticBatch(
            rows, max_columns, width, scratch_slot, cache.scratch_block, device, has_text_lengths=False
        )
        batch = self._static.rows(rows, any_sampled=False, any_filtered=False)
        self._pieces = pieces = Pieces(
            model,
            cache,
            dict.fromkeys(KINDS, batch),
            Handover.empty(model, rows),
        )
        on_gpu = device.type == "cuda"
        capture = CudaCapture(device) if on_gpu else EagerCapture()

        def all_pieces() -> None:
            in_turn(pieces, lambda going, then: then())

        capture.warm(all_pieces)
        self._replay = capture(lambda: in_turn(pieces, _captured if on_gpu else _asked))
        self._kept = pieces.left()

    @torch.inference_mode()
    def step(self, batch: ForwardBatch, cache: PagedKVCache) -> StepOutput:
        """As HamburgerModel.step, of greedy rows and the cache that this was made for."""
        self._static.load(batch, self._rows)
        self._replay()
        return self._pieces.choices[GREEDY].output()


def in_turn(pieces: Pieces, only_if: If, index: int = 0) -> None:
    """The pieces from token `index` on, each micro-step only if any group goes on."""
    pieces.compute(index)
    pieces.choose(GREEDY, index)
    if index + 1 < pieces.width:
        only_if(pieces.groups.going.any(), lambda: in_turn(pieces, only_if, index + 1))


def _captured(going: Tensor, then: Callable[[], None]) -> None:
    """As a conditional node of the graph that is being captured: the device reads `going` when it comes there."""
    graph = torch.cuda.CUDAGraph.get_currently_capturing_graph()
    graph.begin_capture_to_if_node(going)
    try:
        then()
    finally:
        graph.end_capture_to_conditional_node()


def _asked(going: Tensor, then: Callable[[], None]) -> None:
    if bool(going):
        then()
