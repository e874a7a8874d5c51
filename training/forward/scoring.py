"""What the base model thinks of given texts: log-probability, entropy and likeliest rivals of every token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hamburger.model.checkpoints.config.folder import read_model_config
from hamburger.model.checkpoints.sources import ModelSource, resolve_source
from hamburger.model.cpu.library import Kernels, load_kernels
from hamburger.model.device.devices import choose_device, choose_dtype
from hamburger.model.kernel_shapes import layers_fit
from hamburger.model.modules.hamburger import HamburgerModel
from hamburger.training.errors import TrainingError
from hamburger.training.forward.loading import load_model
from hamburger.training.forward.readers import KernelReader, PlainReader, Reader, Text

_SLOTS_A_PASS = 2048
_ROWS_A_HEAD = 256  # float32 logits of a 128k vocabulary: 128 MiB
_ROWS_AT_ONCE = 32  # whose logits stay in a processor's cache from one pass over them to the next


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """The base model's view of n tokens, each given everything before it, on the host.

    logprobs, entropies: float32 [n], nats. top_ids: int32 [n, k] and top_logprobs: float16 [n, k], likeliest first.
    states: bfloat16 [n, F, D], the trunk's feature states that give each token; F is 0 unless they were asked for.
    """

    logprobs: Tensor
    entropies: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    states: Tensor


class _Pending(NamedTuple):
    number: int
    token_ids: Sequence[int]
    start: int


class Scorer:
    """Scores texts under a model's trunk, teacher forced, one slot a token: the ordinary causal language model."""

    def __init__(self, model: HamburgerModel, max_length: int, reader: Reader | None = None) -> None:
        """max_length: the longest sequence in tokens; the model has tables for as many positions. reader: None is the
        model's own modules."""
        self.model = model
        self.max_length = max_length
        self._reader = PlainReader(model) if reader is None else reader

    @classmethod
    def load(
        cls,
        model: str | None = None,
        base: str | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        quantization: Literal["none", "auto"] = "none",
        on_progress: Callable[[str], None] = lambda line: None,
    ) -> Scorer:
        """Load any checkpoint's trunk; None is the embedded base. Raises CheckpointError or ConfigError.

        quantization: auto reads with the compiled kernels, as it would be served, where they take the model and dtype
        is not float32.
        """
        source = resolve_source(model, base)
        kernels = _kernels(source, device, dtype) if quantization == "auto" else None
        built = load_model(
            source,
            device=device,
            dtype=dtype,
            packed=kernels is None,
            state_dtype=None if kernels is None else torch.float32,
            on_progress=on_progress,
        )
        reader = None if kernels is None else KernelReader(built, kernels, built.embed_tokens.weight.dtype)
        return cls(built, built.config.trunk.fixed_context_tokens, reader)

    @property
    def is_quantized(self) -> bool:
        """Whether it reads as a model is served, with the compiled kernels."""
        return isinstance(self._reader, KernelReader)

    def score(
        self,
        sequences: Sequence[Sequence[int]],
        starts: Sequence[int],
        top_k: int = 0,
        state_layers: tuple[int, ...] = (),
    ) -> list[TokenScores]:
        """Scores of the tokens from starts[i] to the end of each sequence; starts[i] is at least 1.

        state_layers: the trunk layers, ascending, whose states are kept (GraftConfig.feature_layers).
        Raises TrainingError for a sequence that is longer than the model's context, and a start out of range.
        """
        for i, (ids, start) in enumerate(zip(sequences, starts, strict=True)):
            if not 1 <= start <= len(ids):
                raise TrainingError(f"sequence {i}: start is {start}; it must be in 1..{len(ids)}, its length.")
            if len(ids) > self.max_length:
                raise TrainingError(
                    f"sequence {i} has {len(ids)} tokens, more than the model's {self.max_length}: shorten it."
                )
        scored: dict[int, TokenScores] = {}
        for pack in _packs(sequences, starts, self._reader.slots):
            scored |= self._score_pack(pack, top_k, state_layers)
        return [scored[i] if i in scored else self._nothing(top_k, len(state_layers)) for i in range(len(sequences))]

    def _nothing(self, top_k: int, layers: int) -> TokenScores:
        none, top = torch.zeros(0), torch.zeros(0, top_k)
        states = torch.zeros(0, layers, self.model.config.trunk.hidden_size, dtype=torch.bfloat16)
        return TokenScores(none, none, top.int(), top.half(), states)

    @torch.inference_mode()
    def _score_pack(self, pack: list[_Pending], top_k: int, state_layers: tuple[int, ...]) -> dict[int, TokenScores]:
        reader = self._reader
        # The last token's state would only predict what is not there.
        texts = [Text(p.token_ids[:-1], p.start - 1) for p in pack]
        targets = torch.tensor([i for p in pack for i in p.token_ids[p.start :]], dtype=torch.int64).to(reader.device)
        states, features = reader.states(texts, state_layers)
        parts = [
            _score_rows(logits, t, top_k)
            for s, of in zip(states.split(_ROWS_A_HEAD), targets.split(_ROWS_A_HEAD), strict=True)
            for logits, t in zip(reader.logits(s).split(_ROWS_AT_ONCE), of.split(_ROWS_AT_ONCE), strict=True)
        ]
        columns = [torch.cat(c).cpu() for c in zip(*parts, strict=True)] + [features.bfloat16().cpu()]
        split = [c.split([len(p.token_ids) - p.start for p in pack]) for c in columns]
        return {p.number: TokenScores(*(c[i] for c in split)) for i, p in enumerate(pack)}


def _score_rows(logits: Tensor, targets: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(-1, targets[:, None])[:, 0]
    top, ids = logprobs.topk(top_k, dim=-1)
    # 0 * -inf is not a number where a logit is forbidden outright.
    probabilities, least = logprobs.softmax(-1), torch.finfo(torch.float32).min
    entropies = -probabilities.mul_(logprobs.clamp_(min=least)).sum(-1)
    return chosen, entropies, ids.int(), top.half()


def _kernels(source: ModelSource, device: str, dtype: str) -> Kernels | None:
    where = choose_device(device)
    fits = layers_fit(read_model_config(source).trunk)
    possible = fits and where.type == "cpu" and dtype != "float32" and choose_dtype(dtype, where) != torch.float16
    return load_kernels() if possible else None


def _packs(
    sequences: Sequence[Sequence[int]], starts: Sequence[int], slots: Callable[[int], int]
) -> Iterator[list[_Pending]]:
    """Sequences with something to score, by descending length, in packs of at most _SLOTS_A_PASS slots (or one)."""
    todo = [_Pending(i, ids, start) for i, (ids, start) in enumerate(zip(sequences, starts, strict=True))]
    pack: list[_Pending] = []
    held = 0
    for pending in sorted((p for p in todo if len(p.token_ids) > 1), key=lambda p: -len(p.token_ids)):
        taken = slots(len(pending.token_ids) - 1)
        if pack and held + taken > _SLOTS_A_PASS:
            yield pack
            pack, held = [], 0
        pack.append(pending)
        held += taken
    if pack:
        yield pack
