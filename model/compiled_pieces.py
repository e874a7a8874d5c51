"""A decoding macro-step's pieces compiled by torch.compile, instead of the Triton kernels between the matrices.

    begin ──► attention ──► between ──► attention ──► ... ──► end ──► choose 0 ──► micro-step 1 ──► choose 1 ──► ...
    embed,    layer 0's     layer 0's   layer 1's            norm,
    q, k, v   pages         rest and                         head,
    of layer 0              layer 1's q, k, v                stop head

The trunk is cut at its attention, which stays the backend's: so no compiled function writes the KV pool, and what
lies between two attentions is one function for all layers, compiled once a number of rows. Sampled choices sort and
sum in an order that decides, so they are left as they are.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from hamburger.model.adapter import ComposedSlots
from hamburger.model.batch import ForwardBatch
from hamburger.model.config import ConfigError
from hamburger.model.emission.masked import Groups, MaskedStep
from hamburger.model.gpu.availability import Backend
from hamburger.model.graphs.pieces import GREEDY, Handover, Kind, Pieces
from hamburger.model.hamburger import HamburgerModel
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.layers import DecoderLayer
from hamburger.model.micro_cache import StaticMicroCache
from hamburger.model.micro_decoder import MicroStepDecoder
from hamburger.model.static_attention import StaticAttention

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_Function = TypeVar("_Function", bound=Callable[..., object])


class Compiler(Protocol):
    """Makes a function of tensors faster, or leaves it as it is."""

    def __call__(self, function: _Function, /) -> _Function: ...


def inductor(function: _Function) -> _Function:
    """As torch.compile does for shapes that never change; a function that it cannot take whole is an error."""
    # With it a product with a single row becomes a reduction, which reaches a GPU's bandwidth more often than cuBLAS.
    options: dict[str, str | int | bool | Callable[..., object]] = {"coordinate_descent_tuning": True}
    return cast(_Function, torch.compile(function, fullgraph=True, dynamic=False, options=options))


def while_compiling() -> AbstractContextManager[None]:
    """Within it a function may have any number of shapes: beyond 8 torch would give it up."""
    import torch._dynamo

    limits = {"recompile_limit": 4096, "accumulated_recompile_limit": 4096}
    patched: AbstractContextManager[None] = torch._dynamo.config.patch(limits)
    return patched


def compile_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder that what was compiled is kept in: TORCHINDUCTOR_CACHE_DIR, or else one in the user's own cache.

    It is made where it is missing, and only its owner may look into it: torch unpickles what it finds there. Raises
    ConfigError where it cannot be.
    """
    named = environment.get(CACHE_VARIABLE)
    if named:
        folder = Path(named)
    else:
        folder = Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hamburger" / "compiled"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"compile_num_seqs is given, but {folder} cannot keep what is compiled ({error}): name another folder in "
            f"{CACHE_VARIABLE}."
        ) from error
    return folder


def is_of_compiler(error: Exception) -> bool:
    """Whether torch.compile itself, or what it compiles with, raised this."""
    import torch._dynamo.exc

    return isinstance(error, torch._dynamo.exc.TorchDynamoException)


def release_compilers() -> None:
    """End the processes that torch started to compile, if any: each holds its own copy of torch."""
    if loaded := sys.modules.get("torch._inductor.async_compile"):
        loaded.shutdown_compile_workers()


class CompiledPieces(Pieces):
    """Pieces, those of the model's modules that are plain put through `compiler`."""

    def __init__(
        self,
        model: HamburgerModel,
        cache: PagedKVCache,
        batches: dict[Kind, ForwardBatch],
        handover: Handover,
        *,
        backend: Backend,
        compiler: Compiler,
    ) -> None:
        super().__init__(model, cache, batches, handover)
        self._backend: Backend = backend
        self._begin, self._between, self._end = compiler(_begin), compiler(_between), compiler(_end)
        self._first_micro, self._further_micro = compiler(_first_micro), compiler(_further_micro)
        self._choose = compiler(_choose)
        self._context: Tensor | None = None
        if model.config.graft:
            self._decoder = _plain(model.micro_decoder)
            features = handover.features
            shape = self._decoder.cache_shape(len(features), features.shape[1], self.width)
            self._kv = torch.zeros(shape, dtype=features.dtype, device=features.device)

    def left(self) -> list[object]:
        return [self._context]

    def choose(self, kind: Kind, index: int) -> None:
        if kind == GREEDY:
            self._choose(self.choices[kind], self.groups, index, self.handover.logits, self.handover.stop)
        else:
            super().choose(kind, index)

    def _trunk(self) -> None:
        model, batch = self._model, self.batch
        graft = model.config.graft
        feature_layers = graft.feature_layers if graft else ()
        attend = self._attention()
        layers = [layer for layer in model.trunk.layers if isinstance(layer, DecoderLayer)]
        features: list[Tensor] = []
        x, cos, sin, q, kv, merged = self._begin(model, layers[0], batch)
        for i, (layer, following) in enumerate(pairwise(layers)):
            x, q, kv = self._between(layer, following, merged, x, attend(i, q, kv), cos, sin)
            if i in feature_layers:
                features.append(x)  # every static row emits, in its order
        last = len(layers) - 1
        to = self.handover
        out = to.logits, to.stop
        hidden = self._end(model, layers[-1], model.trunk.norm, merged, x, attend(last, q, kv), *out)
        if last in feature_layers:
            features.append(hidden)
        to.hidden.copy_(hidden)
        if features:
            torch.stack(features, dim=1, out=to.features)

    def _micro_step(self, index: int) -> None:
        model, tokens, leave = self._model, self.groups.newest, (self.handover.logits, self.handover.stop)
        if index == 1:
            self._context = self._first_micro(model, self._decoder, tokens, self.handover.features, self._kv, *leave)
            return
        if self._context is None:
            raise RuntimeError("a group goes on that never began.")
        self._further_micro(model, self._decoder, tokens, self._context, self._kv, index, *leave)

    def _attention(self) -> Callable[[int, Tensor, Tensor], Tensor]:
        """(layer, q [B, num_heads, head_dim], its keys and values [B, 2, kv_heads, head_dim]) -> [B, heads * hd]."""
        config, batch, cache = self._model.config.trunk, self.batch, self._cache
        if self._backend != "torch":  # FlashInfer attends prompts only
            from hamburger.model.gpu.modules import SinglesAttention

            return SinglesAttention(config, batch, cache)
        attention = StaticAttention(batch, cache, self._model.state_dtype, config.sliding_window, config.sliding_layers)
        return lambda layer, q, kv: attention(layer, q, kv[:, 0], kv[:, 1])


# The functions that are compiled. They are made of the plain modules, and hold nothing themselves.


def _begin(
    model: HamburgerModel, layer: DecoderLayer, batch: ForwardBatch
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, ComposedSlots | None]:
    """x [B, D], cos and sin, the first layer's q and kv, and which slots pass adapters."""
    embedded = model.embed(batch)
    x, merged = embedded.x, embedded.merged
    cos, sin = model.rotary(batch.positions, batch.text_lengths)
    return x, cos, sin, *_heads(layer, merged, x, cos, sin), merged


def _between(
    layer: DecoderLayer,
    following: DecoderLayer,
    merged: ComposedSlots | None,
    x: Tensor,
    attended: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, D] after a layer, of x before it and of what its heads saw; the following layer's q and kv."""
    x = layer.finish(x, attended, merged)
    return x, *_heads(following, merged, x, cos, sin)


def _heads(
    layer: DecoderLayer, merged: ComposedSlots | None, x: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    q, k, v = layer.heads(x, cos, sin, merged)
    return q.contiguous(), torch.stack((k, v), dim=1)


def _end(
    model: HamburgerModel,
    layer: DecoderLayer,
    norm: nn.Module,
    merged: ComposedSlots | None,
    x: Tensor,
    attended: Tensor,
    logits: Tensor,
    stop: Tensor,
) -> Tensor:
    """The final normed state [B, D]; logits and stop are written."""
    hidden: Tensor = norm(layer.finish(x, attended, merged))
    logits.copy_(model.head(hidden))
    stop.copy_(model.stop_logit(hidden, 0))
    return hidden


def _first_micro(
    model: HamburgerModel,
    decoder: MicroStepDecoder,
    tokens: Tensor,
    features: Tensor,
    kv: Tensor,
    logits: Tensor,
    stop: Tensor,
) -> Tensor:
    """Micro-step 1, of features [B, F, D]; returns the context that the further ones read."""
    context = decoder.context_of(features)
    state, scores = model.micro_step(tokens, StaticMicroCache(context, kv), decoder)
    logits.copy_(scores)
    stop.copy_(model.stop_logit(state, 1))
    return context


def _further_micro(
    model: HamburgerModel,
    decoder: MicroStepDecoder,
    tokens: Tensor,
    context: Tensor,
    kv: Tensor,
    index: int,
    logits: Tensor,
    stop: Tensor,
) -> None:
    held = index - 1 if decoder.fused else context.shape[1] + index - 1
    state, scores = model.micro_step(tokens, StaticMicroCache(context, kv, held), decoder)
    logits.copy_(scores)
    stop.copy_(model.stop_logit(state, index))


def _choose(choice: MaskedStep, groups: Groups, index: int, logits: Tensor, stop: Tensor) -> None:
    if index == 0:
        groups.begin()
    choice.take(index, logits, stop)


def _plain(decoder: nn.Module) -> MicroStepDecoder:
    """A micro decoder as it is without the Triton kernels."""
    plain = decoder if isinstance(decoder, MicroStepDecoder) else decoder.plain
    if not isinstance(plain, MicroStepDecoder):
        raise TypeError(f"{type(plain).__name__} is not the plain micro decoder.")
    return plain
