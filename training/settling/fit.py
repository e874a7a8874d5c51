"""`hamburger fit-settle`: the probe by which each layer and KV head of a model chooses which old slots stay.

Features of an answer token are its key without its position, and the logarithm of its value's norm; what is to be
foretold is the share that it will get of what tokens far behind pay to its chunk. One linear score for each layer and
KV head, by cross-entropy of the softmax over a chunk: minutes on a CPU, and no weight of the model changes. Then which
heads lend their places to which (shares.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hamburger.engine.text.tokenizer import Tokenizer
from hamburger.engine.types.settling import Settling
from hamburger.model.checkpoints.settle_probe import SettleProbe, equal_shares, read_probe, save_probe
from hamburger.model.checkpoints.settle_settings import SETTINGS
from hamburger.model.checkpoints.sources import resolve_source
from hamburger.model.modules.hamburger import HamburgerModel
from hamburger.model.modules.rotary import RotaryEmbedding
from hamburger.model.settled_places import SettledPlaces
from hamburger.model.slot_choice import SlotChoice
from hamburger.training.corpus.answers import check_written_with, read_answers
from hamburger.training.errors import TrainingError
from hamburger.training.forward.loading import load_model
from hamburger.training.progress import token_bar
from hamburger.training.settling.choice import dropped_by_head
from hamburger.training.settling.observed import Observed, check_text, is_measured, observe
from hamburger.training.settling.shares import allot, costs_of_shares, losses

CHUNK = 64  # tokens, as the engine looks at them together
FAR = 64  # tokens behind a chunk, from which on attention to it counts: those before see it whole
_LEAST_LATER = 64  # tokens that must be there to pay
_HELD_OUT = 8  # the answers to every so-manieth prompt tell how others do
_BATCH, _LEARNING_RATE, _WEIGHT_DECAY = 24, 1e-2, 1e-3
_KEEP = 1 / 8  # of a chunk: the share by which a probe's fit is told
# Lose less of the embedded model, at fewer slots, than DEFAULTS where no place is lent (docs/log.md).
_LENT: Mapping[str, float] = {"settle_window": 64, "settle_growth": 0, "settle_keep": 0.33}


class _Text(NamedTuple):
    """place: file and line, for messages. is_held_out: nothing is fitted to it, as to no other answer of its prompt."""

    place: str
    prompt_ids: list[int]
    answer_ids: list[int]
    is_held_out: bool


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """Of N chunks. features: float16 [N, layers, C, kv_heads, head_dim + 1]. shares: float32 [N, layers, C, kv_heads],
    of all attention to come each token's."""

    features: Tensor
    shares: Tensor


def run(args: argparse.Namespace) -> int:
    """Fit and write the probe. Raises TrainingError, CheckpointError, ConfigError or OSError."""
    console = Console(stderr=True, highlight=False)

    def tell(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    _check_out(args.out)
    texts = list(_texts(args))
    if len({text.is_held_out for text in texts}) < 2:
        raise TrainingError(
            f"fewer than two prompts have answers as long as --min-tokens {args.min_tokens}: give more --answers."
        )
    source = resolve_source(args.model, args.base)
    check_written_with(Tokenizer.load(source.tokenizer_path), args.answers)
    model = load_model(source, device=args.device, dtype=args.dtype, on_progress=tell)
    trunk = model.config.trunk
    for text in texts:
        check_text(trunk, text.place, text.prompt_ids, text.answer_ids)
    rotary = RotaryEmbedding(trunk, trunk.context_tokens, _device(model), torch.float32)
    if args.probe is None:
        weights = _fit_weights(args, model, SlotChoice(rotary), texts, console)
    else:
        weights = read_probe(args.probe, trunk).weights
    shares, settings = _fit_shares(args, model, SlotChoice(rotary, weights), texts, console)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save_probe(args.out, SettleProbe(weights, shares), settings)
    tell(f"wrote {args.out}")
    return 0


def _check_out(file: Path) -> None:
    """An older probe may be replaced; the model's weights lie in the same folder."""
    if not file.is_file() or not file.stat().st_size:
        return
    try:
        with safe_open(file, "pt") as tensors:
            is_probe = "probe" in tensors.keys()  # noqa: SIM118  (it is no mapping)
    except SafetensorError:
        is_probe = False
    if not is_probe:
        raise TrainingError(f"--out {file} holds no probe, so it is not replaced: name another file.")


def _fit_weights(
    args: argparse.Namespace, model: HamburgerModel, choice: SlotChoice, texts: Sequence[_Text], console: Console
) -> Tensor:
    """float32 [layers, kv_heads, head_dim + 1]."""
    found: dict[bool, list[Chunks]] = {True: [], False: []}
    for text, seen in zip(texts, _observed(model, texts, console, "Texts", by_head=True), strict=True):
        found[text.is_held_out] += chunks_of(seen, choice)
    held_out, fitted = together(found[True]), together(found[False])
    probe = fit(fitted, args.steps, args.seed)
    for name, chunks in (("fitted", fitted), ("held-out", held_out)):
        probed, unlike, most = (kept(chunks, s) for s in (scored(probe, chunks), _unlike(chunks), chunks.shares))
        console.print(
            f"{name}: {len(chunks.shares)} chunks; the eighth that stays gets {probed:.3f} of the attention to come, "
            f"by keys alone {unlike:.3f}, at most {most:.3f}",
            markup=False,
            soft_wrap=True,
        )
    return probe


def _fit_shares(
    args: argparse.Namespace, model: HamburgerModel, choice: SlotChoice, texts: Sequence[_Text], console: Console
) -> tuple[Tensor, dict[str, float]]:
    """int64 [layers, kv_heads], and the settings that they suit.

    Equal ones where lending does not help, no settings where DEFAULTS lose no more: told by texts not fitted to.
    """
    settling = Settling.of_model(_LENT, args.window, args.growth, args.keep)
    usual, equal = Settling.of_model({}), equal_shares(model.config.trunk)

    def settles(length: int) -> bool:
        return all(is_measured(s, length) for s in (settling, usual))

    long = [text for text in texts if settles(len(text.answer_ids))]
    held_out = [text for text in long if text.is_held_out][: args.share_texts // _HELD_OUT + 1]
    fitted = [text for text in long if not text.is_held_out][: args.share_texts]
    if not fitted or not held_out:
        console.print(
            "no place is lent, and the file names no settings: too few answers are long enough to settle.",
            markup=False,
            soft_wrap=True,
        )
        return equal, {}
    shares, costs = equal, torch.zeros(())
    for name in ("Shares", "Again"):
        of_texts = _observed(model, fitted, console, name)
        costs = costs + costs_of_shares(model, choice, settling, of_texts, shares)
        shares = allot(costs)
    ways = {"lent": (settling, shares), "equal": (settling, equal), "usual": (usual, equal)}
    lost = _lost(model, choice, _observed(model, held_out, console, "Held-out"), ways)
    lends, most = int((shares == 0).sum()), int(shares.max())
    lengths = [len(text.answer_ids) for text in held_out]
    tokens_a_slot = {way: sum(lengths) / sum(map(ways[way][0].slots, lengths)) for way in ways}
    console.print(
        f"{lends} of {shares.numel()} heads lend places, to heads with those of up to {most}; held-out, at "
        f"{tokens_a_slot['lent']:.2f} tokens a slot: KL {lost['lent']:.4f}, with equal places {lost['equal']:.4f}; "
        f"as any model settles, at {tokens_a_slot['usual']:.2f}: {lost['usual']:.4f}",
        markup=False,
        soft_wrap=True,
    )
    best = min(("usual", "equal", "lent"), key=lambda way: lost[way])  # of equal ones the simplest
    if best == "usual":
        console.print("the file names no settings: those of any model lose no more.", markup=False, soft_wrap=True)
        return equal, {}
    settings = dict(zip(SETTINGS, (settling.window, settling.growth, settling.keep), strict=True))
    told = ", ".join(f"{name} {value:g}" for name, value in settings.items())
    lent = "shares" if best == "lent" else "equal places"
    console.print(f"the file names {told}, and {lent}.", markup=False, soft_wrap=True)
    return ways[best][1], settings


def _lost(
    model: HamburgerModel, choice: SlotChoice, texts: Iterable[Observed], ways: Mapping[str, tuple[Settling, Tensor]]
) -> dict[str, float]:
    """KL (nats a token) of each way to settle: when, and with which shares."""
    sums, tokens = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0)
    for seen in texts:
        for way, (settling, shares) in ways.items():
            numbers = SettledPlaces(shares, settling.chunk, settling.kept).numbers
            kl, number = losses(model, seen, dropped_by_head(seen, settling, choice, numbers), settling)
            sums[way] += kl
            tokens[way] += number
    return {way: sums[way] / tokens[way] for way in ways}


def _observed(
    model: HamburgerModel, texts: Sequence[_Text], console: Console, name: str, *, by_head: bool = False
) -> Iterator[Observed]:
    with token_bar(name, len(texts), console) as bar:
        for text in texts:
            yield observe(model, text.prompt_ids, text.answer_ids, by_head=by_head)
            bar.add_tokens(len(text.answer_ids))
            bar.advance(1)


def _texts(args: argparse.Namespace) -> Iterator[_Text]:
    """Of every so-manieth prompt the answers are held out, by their length, so that long ones are on both sides."""
    found: list[tuple[str, list[int], list[int]]] = []
    longest: dict[tuple[int, ...], int] = {}
    for answer in read_answers(args.answers):
        if answer.token_ids is None or answer.prompt_ids is None:
            raise TrainingError(f"{answer.place}: it needs token_ids and prompt_ids, as `distill` writes them.")
        if len(answer.token_ids) >= args.min_tokens:
            prompt, ids = tuple(answer.prompt_ids), answer.token_ids[: args.max_tokens]
            longest[prompt] = max(longest.get(prompt, 0), len(ids))
            found.append((answer.place, answer.prompt_ids, ids))
    held_out = set(sorted(longest, key=lambda prompt: -longest[prompt])[::_HELD_OUT])
    for place, prompt_ids, ids in found:
        yield _Text(place, prompt_ids, ids, tuple(prompt_ids) in held_out)


@torch.inference_mode()
def chunks_of(seen: Observed, choice: SlotChoice) -> Iterator[Chunks]:
    """Of each chunk of an answer that enough tokens follow, N is 1."""
    assert seen.by_head is not None
    length = len(seen.surprise)
    for first in range(0, length - CHUNK - FAR - _LEAST_LATER + 1, CHUNK):
        later = seen.by_head[:, :, first + CHUNK + FAR :, first : first + CHUNK].float().mean(2)
        shares = (later / later.sum(2, keepdim=True).clamp(min=1e-12)).transpose(1, 2)
        yield Chunks(choice.features(*seen.chunk(first, first + CHUNK)).half()[None].cpu(), shares[None].cpu())


def together(chunks: Sequence[Chunks]) -> Chunks:
    """Raises TrainingError where there is none."""
    if not chunks:
        raise TrainingError("the answers are too short to fit on: give more --answers, or raise --max-tokens.")
    return Chunks(torch.cat([c.features for c in chunks]), torch.cat([c.shares for c in chunks]))


def fit(chunks: Chunks, steps: int, seed: int) -> Tensor:
    """float32 [layers, kv_heads, head_dim + 1]."""
    number, layers, _, heads, width = chunks.features.shape
    # Each dimension as it varies, so that one learning rate suits all; in parts, as all in float32 are large.
    parts = chunks.features.split(64)
    mean = sum((part.float().mean(2).sum(0) for part in parts), torch.zeros(layers, heads, width)) / number
    squares = sum(((part.float() - mean[:, None]).square().mean(2).sum(0) for part in parts), torch.zeros_like(mean))
    deviation = (squares / number).sqrt().clamp(min=1e-6)
    weights = torch.zeros(layers, heads, width, requires_grad=True)
    optimizer = torch.optim.AdamW([weights], lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, total_steps=steps)
    generator = torch.Generator().manual_seed(seed % 2**63)
    for _ in range(steps):
        of = torch.randint(number, (_BATCH,), generator=generator)
        features = (chunks.features[of].float() - mean[:, None]) / deviation[:, None]
        scores = torch.einsum("nlchw,lhw->nlch", features, weights)
        loss = -(chunks.shares[of] * scores.log_softmax(2)).sum(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return weights.detach() / deviation  # what the mean adds is the same for a whole chunk


def scored(probe: Tensor, chunks: Chunks) -> Tensor:
    """float32 [N, layers, C, kv_heads]."""
    return torch.cat([torch.einsum("nlchw,lhw->nlch", part.float(), probe) for part in chunks.features.split(64)])


def kept(chunks: Chunks, scores: Tensor) -> float:
    """The share of attention to come that the best of each chunk get."""
    best = scores.topk(max(1, round(_KEEP * scores.shape[2])), dim=2).indices
    return float(chunks.shares.gather(2, best).sum(2).mean())


def _unlike(chunks: Chunks) -> Tensor:
    return torch.stack([SlotChoice.unlike(features[..., :-1].float()) for features in chunks.features])


def _device(model: HamburgerModel) -> torch.device:
    device: torch.device = model.embed_tokens.weight.device
    return device
