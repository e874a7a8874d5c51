"""`hamburger eval-settle`: what an answer loses when its old tokens keep fewer slots, by who stays, how many and when.

Nothing is generated: each answer is read again by masks, as if its tokens had settled while it was written. Every
figure is kept in the folder, so a call that was cut off goes on where it was.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console

from hamburger.engine.text.tokenizer import Tokenizer
from hamburger.engine.types.settling import Settling
from hamburger.model.checkpoints.settle_probe import equal_shares, load_probe, read_probe
from hamburger.model.checkpoints.settle_settings import read_settings, settle_settings
from hamburger.model.checkpoints.sources import PROBE_FILE, ModelSource, resolve_source
from hamburger.model.device.devices import choose_device, choose_dtype
from hamburger.model.modules.hamburger import HamburgerModel
from hamburger.model.modules.rotary import RotaryEmbedding
from hamburger.model.slot_choice import SlotChoice
from hamburger.training.corpus.answers import read_answers
from hamburger.training.corpus.jsonl import GrowingFile, check_own, read_rows, text_of
from hamburger.training.errors import TrainingError
from hamburger.training.forward.fingerprint import fingerprint
from hamburger.training.forward.loading import load_model
from hamburger.training.progress import token_bar
from hamburger.training.settling.choice import BY_HEAD, EQUAL, KEYS, PROBE, SCORE_NAMES, Chooser, Policy
from hamburger.training.settling.observed import Observed, check_text, is_measured, observe, settled_states
from hamburger.training.settling.report import write_report

BUCKET = 256  # answer tokens: places are told apart by it
_ROWS_A_HEAD = 256
_CACHE = "measured.jsonl"


@dataclass(frozen=True, slots=True)
class Text:
    """key: of the cache, the same in every call. kind: what figures are told apart by. place: for messages."""

    key: str
    kind: str
    place: str
    prompt_ids: list[int]
    answer_ids: list[int]


def run(args: argparse.Namespace) -> int:
    """Evaluate and write the results. Raises TrainingError, CheckpointError, ConfigError or OSError."""
    console = Console(stderr=True, highlight=False)
    source = resolve_source(args.model, args.base)
    # Whoever is named twice counts once: intervals are of so many texts.
    policies = list(dict.fromkeys(_policies(args, source)))
    books = _books(args, Tokenizer.load(source.tokenizer_path))
    texts = list({text.key: text for text in (*_answers(args), *books)}.values())
    if not texts:
        raise TrainingError("no answer is as long as --min-tokens, and there are no texts: give more --answers.")
    longest = max(len(text.answer_ids) for text in texts)
    without = {policy.name: why for policy in policies if (why := _why_none_settles(policy.settling, longest))}
    if len(without) == len(policies):
        raise TrainingError(
            f"nothing settles, so there is nothing to measure: {'; '.join(dict.fromkeys(without.values()))}."
        )
    for name, why in without.items():
        console.print(f"{name}: not in the table, as {why}.", markup=False, soft_wrap=True)
    check_own(args.out / _CACHE, ("key", "policy", "sums"), "eval-settle")
    args.out.mkdir(parents=True, exist_ok=True)
    model = load_model(
        source, device=args.device, dtype=args.dtype, on_progress=lambda line: console.print(line, markup=False)
    )
    for text in texts:
        check_text(model.config.trunk, text.place, text.prompt_ids, text.answer_ids)
    choices, probe = _choices(args, source, model)
    policies = [replace(policy, probe=probe) if policy.score in (PROBE, EQUAL) else policy for policy in policies]
    told = _model_print(args, source)
    with GrowingFile(args.out / _CACHE) as cache:
        found = [row.values for row in read_rows(cache.path)]
        known = {(row["key"], row["policy"]): row for row in found if row.get("model") == told}
        if others := sum(row.get("model") != told for row in found):
            console.print(
                f"{cache.path}: {others} of {len(found)} rows are not of this model, device and dtype, or do not say "
                "of which: they are left out.",
                markup=False,
                soft_wrap=True,
            )
        with token_bar("Texts", len(texts), console) as bar:
            for text in texts:
                for row in _measured(model, text, [p for p in policies if (text.key, p.name) not in known], choices):
                    known[text.key, row["policy"]] = row
                    cache.append({"model": told, **row})
                bar.add_tokens(len(text.answer_ids))
                bar.advance(1)
    rows = [known[text.key, policy.name] for text in texts for policy in policies if (text.key, policy.name) in known]
    Console(highlight=False).print(write_report(args.out, rows, policies, args.seed), markup=False, soft_wrap=True)
    return 0


def _model_print(args: argparse.Namespace, source: ModelSource) -> str:
    """Tells the model as it is run from others; which probe it is a policy's name tells."""
    device = choose_device(args.device)
    return fingerprint(source, str(device), str(choose_dtype(args.dtype, device)), without=(PROBE_FILE,))


def _policies(args: argparse.Namespace, source: ModelSource) -> Iterator[Policy]:
    suits = Settling.of_model(settle_settings(source) if args.probe is None else read_settings(args.probe))
    windows, growths, keeps = args.windows or [suits.window], args.growths or [suits.growth], args.keeps or [suits.keep]
    for score, window, growth, keep in product(args.scores, windows, growths, keeps):
        if score not in SCORE_NAMES:
            raise TrainingError(f"score {score!r}: choose from {'; '.join(SCORE_NAMES)}.")
        yield Policy(score, Settling(window, keep, growth, args.chunk, limit=args.limit), seed=args.seed)


def _why_none_settles(settling: Settling, longest: int) -> str | None:
    """Of texts of at most so many answer tokens; None where something does."""
    if is_measured(settling, longest):
        return None
    if settling.kept == settling.chunk:
        return f"--keeps {settling.keep:g} keeps every slot of a chunk of {settling.chunk}: name a lower one"
    first = settling.next_place(0, 0)
    return (
        f"by a window of {settling.window}, a growth of {settling.growth:g} and a chunk of {settling.chunk} tokens the "
        f"first settle behind token {first}, which others must follow, and the longest text has {longest}: give longer "
        "ones (--max-tokens cuts them), or lower --windows, --growths or --chunk"
    )


def _answers(args: argparse.Namespace) -> Iterator[Text]:
    """Of each file the first --per-kind answers of each kind that are long enough."""
    for file in args.answers:
        number: dict[str, int] = {}
        for answer in read_answers([file]):
            if answer.token_ids is None or answer.prompt_ids is None:
                raise TrainingError(f"{answer.place}: it needs token_ids and prompt_ids, as `distill` writes them.")
            kind = answer.category or "answers"
            found, number[kind] = number.get(kind, 0), number.get(kind, 0)
            ids = answer.token_ids[: args.max_tokens]
            if len(ids) < args.min_tokens or found == args.per_kind:
                continue
            number[kind] += 1
            name = file.name.removesuffix(".gz").removesuffix(".jsonl")
            # A file may hold several answers of one id, by other settings.
            key = f"{name} {answer.id} {_digest(answer.prompt_ids, ids)}"
            yield Text(key, f"{name}: {kind}", answer.place, answer.prompt_ids, ids)


def _books(args: argparse.Namespace, tokenizer: Tokenizer) -> Iterator[Text]:
    """The beginnings of whole texts, all of which settles but the first token."""
    for file in args.texts:
        for row in read_rows(file):
            ids = tokenizer.encode(text_of(row, "text")[: 8 * args.max_tokens])[: args.max_tokens]
            if len(ids) > args.min_tokens:
                name = file.name.removesuffix(".gz").removesuffix(".jsonl")
                key = f"{name} {row.line} {_digest(ids)}"
                yield Text(key, f"{name} (by people)", row.place, ids[:1], ids[1:])


def _digest(*token_ids: list[int]) -> str:
    """Tells texts apart whose files have one name, or were cut at another length."""
    return blake2b(repr(token_ids).encode(), digest_size=8).hexdigest()


def _choices(args: argparse.Namespace, source: ModelSource, model: HamburgerModel) -> tuple[dict[str, Chooser], str]:
    """And what tells the probe from others. Raises TrainingError where one is asked for and there is none."""
    trunk, device = model.config.trunk, model.embed_tokens.weight.device
    rotary = RotaryEmbedding(trunk, trunk.context_tokens, device, torch.float32)
    choices = {KEYS: Chooser(SlotChoice(rotary), equal_shares(trunk))}
    if PROBE in args.scores or EQUAL in args.scores:
        probe = load_probe(source, trunk) if args.probe is None else read_probe(args.probe, trunk)
        if probe is None:
            raise TrainingError(
                f"{source.name} has no probe: make one with `hamburger fit-settle`, and name it (--probe)."
            )
        choice = SlotChoice(rotary, probe.weights)
        choices |= {PROBE: Chooser(choice, probe.shares), EQUAL: Chooser(choice, equal_shares(trunk))}
        return choices, blake2b(b"".join(part.numpy().tobytes() for part in probe), digest_size=4).hexdigest()
    return choices, ""


def _measured(
    model: HamburgerModel, text: Text, policies: Sequence[Policy], choices: Mapping[str, Chooser]
) -> Iterator[dict[str, Any]]:
    """A row a policy that settles anything of this text: sums over the tokens after the first place, by bucket."""
    length = len(text.answer_ids)
    policies = [policy for policy in policies if is_measured(policy.settling, length)]
    if not policies:
        return
    by_head = any(policy.score in BY_HEAD and policy.score not in choices for policy in policies)
    seen = observe(model, text.prompt_ids, text.answer_ids, by_head=by_head)
    for policy in policies:
        first = next(policy.settling.places(length))[0]
        dropped = policy.dropped_at(seen, choices)
        states = settled_states(model, seen, dropped, first)
        yield {
            "key": text.key,
            "kind": text.kind,
            "policy": policy.name,
            "tokens": length,
            "slots": policy.settling.slots(length),
            "first": first,
            "sums": _sums(model, seen, states, first),
        }


@torch.inference_mode()
def _sums(model: HamburgerModel, seen: Observed, states: torch.Tensor, first: int) -> dict[str, list[float]]:
    """By bucket of the place in the answer: number of tokens, KL (nats) from the whole to the settled distribution,
    tokens with the same likeliest, nats of the text's own next token beyond those of the whole."""
    whole, length = seen.states[seen.num_prompt + first :], len(seen.surprise)
    sums: dict[str, list[float]] = {}
    targets = seen.token_ids[seen.num_prompt + first + 1 :]
    for at in range(0, len(targets), _ROWS_A_HEAD):
        rows = slice(at, min(at + _ROWS_A_HEAD, len(targets)))
        p = F.linear(whole[rows], model.head_weight).float().log_softmax(-1)
        q = F.linear(states[rows], model.head_weight).float().log_softmax(-1)
        kl = (p.exp() * (p - q)).sum(-1)
        same = (p.argmax(-1) == q.argmax(-1)).float()
        nats = (p - q).gather(-1, targets[rows, None])[:, 0]
        place = torch.arange(first + rows.start + 1, first + rows.stop + 1, device=seen.device) // BUCKET
        for bucket in place.unique().tolist():
            here = place == bucket
            found = sums.setdefault(str(bucket), [0.0] * 4)
            for i, value in enumerate((torch.ones_like(kl), kl, same, nats)):
                found[i] += value[here].sum().item()
    assert sum(values[0] for values in sums.values()) == length - first - 1
    return sums
