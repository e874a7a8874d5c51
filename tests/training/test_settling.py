"""`hamburger eval-settle` on a small random model: what masks say, against what the engine's settling says."""

from __future__ import annotations

import argparse
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hamburger.training.settling.evaluate as evaluation
from hamburger.engine.types.settling import Settling
from hamburger.model.checkpoints.load import save_checkpoint
from hamburger.model.checkpoints.settle_probe import SettleProbe, equal_shares, save_probe
from hamburger.model.checkpoints.sources import BUILTIN
from hamburger.model.config import ModelConfig
from hamburger.model.modules.rotary import RotaryEmbedding
from hamburger.model.slot_choice import SlotChoice
from hamburger.training.cli.settle import add_eval_settle_arguments
from hamburger.training.errors import TrainingError
from hamburger.training.settling.choice import BY_HEAD, EQUAL, KEYS, PROBE, SCORE_NAMES, Chooser, Policy
from hamburger.training.settling.observed import Observed, middle_layers, observe, settled_states
from small_models import CPU, plain_model, random_tensors, trunk_config

SETTLING = Settling(window=20, keep=1 / 4, growth=1 / 4, chunk=16, apart=8)
LENGTH = 120


TRUNK = trunk_config(vocab_size=64, max_position_embeddings=256)
ROTARY = RotaryEmbedding(TRUNK, 256, CPU, torch.float32)
PROBE_OF = torch.randn(TRUNK.num_layers, TRUNK.num_kv_heads, TRUNK.head_dim + 1)
SHARES = torch.tensor([[1, 0], [3, 2], [0, 0], [1, 1]])
FITTED, EQUAL_SHARES = SlotChoice(ROTARY, PROBE_OF), equal_shares(TRUNK)
CHOICES = {
    KEYS: Chooser(SlotChoice(ROTARY), EQUAL_SHARES),
    PROBE: Chooser(FITTED, SHARES),
    EQUAL: Chooser(FITTED, EQUAL_SHARES),
}


@pytest.fixture(scope="module")
def seen() -> tuple[Any, Observed]:
    model = plain_model(ModelConfig(trunk=TRUNK), 3)
    draw = random.Random(2)
    prompt, answer = ([draw.randrange(2, 64) for _ in range(number)] for number in (7, LENGTH))
    return model, observe(model, prompt, answer, by_head=True)


def test_what_nobody_lost_is_seen_as_before(seen: tuple[Any, Observed]) -> None:
    model, observed = seen
    for first in (1, 40):
        states = settled_states(model, observed, torch.full((LENGTH,), LENGTH), first)
        assert torch.allclose(states, observed.states[7 + first :], atol=1e-5)


def test_a_dropped_token_is_missed_from_its_place_on(seen: tuple[Any, Observed]) -> None:
    model, observed = seen
    dropped = torch.full((LENGTH,), LENGTH)
    dropped[5] = 60
    states = settled_states(model, observed, dropped, 20)
    whole = observed.states[27:]
    assert torch.allclose(states[:40], whole[:40], atol=1e-5)
    assert not torch.allclose(states[40:], whole[40:], atol=1e-3)


def test_a_head_misses_what_it_alone_has_dropped(seen: tuple[Any, Observed]) -> None:
    """Dropped in every head is dropped; a head's own choice changes what follows, and by less."""
    model, observed = seen
    dropped = torch.full((LENGTH,), LENGTH)
    dropped[:20] = 60
    shape = (len(observed.heads), observed.heads[0][0].shape[1], LENGTH)
    alike = settled_states(model, observed, dropped, 20)
    assert torch.allclose(settled_states(model, observed, dropped.expand(shape), 20), alike, atol=1e-5)
    one = torch.full(shape, LENGTH)
    one[0, 1, :20] = 60
    states = settled_states(model, observed, one, 20)
    whole = observed.states[27:]
    assert torch.allclose(states[:40], whole[:40], atol=1e-5)
    assert 0 < (states - whole)[40:].norm() < (alike - whole)[40:].norm()


def test_attention_by_head_adds_up(seen: tuple[Any, Observed]) -> None:
    _, observed = seen
    assert observed.by_head is not None
    few = list(middle_layers(len(observed.heads)))
    assert torch.allclose(observed.by_head[few].float().sum((0, 1)), observed.attention, atol=0.02)


@pytest.mark.parametrize("score", SCORE_NAMES)
def test_as_many_lose_their_slots_as_the_engine_takes(seen: tuple[Any, Observed], score: str) -> None:
    _, observed = seen
    dropped = Policy(score, SETTLING, seed=1).dropped_at(observed, CHOICES)
    assert dropped.dim() == (3 if score in BY_HEAD else 1)
    if score == PROBE:  # of a chunk of 16 each head with a place for 4 lends 3, or borrows them once or twice
        number = torch.tensor([[4, 1], [10, 7], [1, 1], [4, 4]]) * sum(1 for _ in SETTLING.places(LENGTH))
        settled = SETTLING.chunk * sum(1 for _ in SETTLING.places(LENGTH))
        assert torch.equal((dropped < LENGTH).sum(-1), settled - number)
    for of_head in dropped.reshape(-1, LENGTH):
        if score != PROBE:
            assert int((of_head < LENGTH).sum()) == SETTLING.settled_slots(LENGTH)
        for place, settled in SETTLING.places(LENGTH):
            here = (of_head == place).nonzero().flatten().tolist()
            assert max(here) < settled + SETTLING.chunk  # the window is whole
    assert torch.equal(dropped, Policy(score, SETTLING, seed=1).dropped_at(observed, CHOICES))


@pytest.mark.parametrize("score", ["newest", "recency"])
def test_all_hold_as_many_slots_at_a_limit(seen: tuple[Any, Observed], score: str) -> None:
    _, observed = seen
    limited = replace(SETTLING, growth=0, limit=SETTLING.window + 2 * SETTLING.chunk + SETTLING.apart)
    dropped = Policy(score, limited).dropped_at(observed, CHOICES)
    assert limited.slots(LENGTH) < replace(limited, limit=None).slots(LENGTH)  # the limit is reached
    assert int((dropped < LENGTH).sum()) == limited.settled_slots(LENGTH)


def test_who_gets_no_attention_goes_first(seen: tuple[Any, Observed]) -> None:
    _, observed = seen
    dropped = Policy("attention", SETTLING).dropped_at(observed, CHOICES)
    place, first = next(SETTLING.places(LENGTH))
    paid = observed.attention
    scores = [float(sum(paid[query, j] for query in range(j + 9, place))) for j in range(first, first + SETTLING.chunk)]
    order = sorted(range(SETTLING.chunk), key=lambda j: scores[j])
    gone = sorted(order[: SETTLING.chunk - SETTLING.kept])
    assert (dropped[first : first + SETTLING.chunk] == place).nonzero().flatten().tolist() == gone


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = ModelConfig(trunk=trunk_config(vocab_size=49152, hidden_size=32, eos_token_ids=(2,)))
    save_checkpoint(folder / "base", config, random_tensors(config, seed=1))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN / name, folder / "base" / name)
    draw, rows = random.Random(1), []
    for i in range(6):
        ids = [draw.randrange(3, 49152) for _ in range(150 if i < 5 else 20)]
        rows.append({"id": str(i // 2), "sample": 0, "category": ("a", "b")[i % 2], "model": "m", "sampling": "greedy",
                     "messages": [{"role": "user", "content": "Hi"}], "prompt_ids": [5, 6],
                     "response": "", "token_ids": ids, "finish_reason": "length"})  # fmt: skip
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "books.jsonl").write_text(json.dumps({"text": "Once upon a time there was a king. " * 40}) + "\n")
    return folder


def arguments(folder: Path, out: Path, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_eval_settle_arguments(parser)
    given = ["--model", folder / "base", "--answers", folder / "answers.jsonl", "--texts", folder / "books.jsonl"]
    given += ["--min-tokens", "100", "--max-tokens", "150", "--per-kind", "2", "--windows", "32", "--chunk", "32"]
    given += ["--dtype", "float32", "--device", "cpu", "--out", out]
    return parser.parse_args([*map(str, given), *more])


def test_results_hold_every_policy_and_a_second_call_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert evaluation.run(arguments(folder, tmp_path, "--scores", "attention;recency")) == 0
    attention, recency = json.loads((tmp_path / "results.json").read_text())
    assert [attention["score"], recency["score"]] == ["attention", "recency"]
    assert attention["texts"] == 5  # two of each kind, and the book; the short one is left out
    assert attention["tokens_per_slot"] == recency["tokens_per_slot"] > 1.2
    value, low, high = attention["all"]["kl"]
    assert 0 < low <= value <= high
    assert list(attention["places"]) == ["0 to 512"]
    assert set(attention["kinds"]) == {"answers: a", "answers: b", "books (by people)"}
    assert "| attention | 32 | 0.333 | 0.125 | 5 |" in (tmp_path / "results.md").read_text()
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
    asked = []

    def counted(*args: Any) -> torch.Tensor:
        asked.append(args)
        return settled_states(*args)

    monkeypatch.setattr(evaluation, "settled_states", counted)
    assert evaluation.run(arguments(folder, tmp_path, "--scores", "attention;recency;random")) == 0
    assert len(asked) == 5  # of the new policy alone
    assert len(json.loads((tmp_path / "results.json").read_text())) == 3


def test_a_text_and_a_policy_count_once_and_their_figures_are_those_of_their_tokens(
    folder: Path, tmp_path: Path
) -> None:
    def figures(out: str, *more: str) -> Any:
        assert evaluation.run(arguments(folder, tmp_path / out, *more)) == 0
        [found] = json.loads((tmp_path / out / "results.json").read_text())
        return found

    books = folder / "books.jsonl"
    other = tmp_path / "others" / "books.jsonl"  # of the same name
    other.parent.mkdir()
    other.write_text(json.dumps({"text": " ".join(reversed(json.loads(books.read_text())["text"].split()))}) + "\n")
    once = figures("out", "--scores", "keys")
    answers = str(folder / "answers.jsonl")
    assert figures("out", "--scores", "keys;keys", "--keeps", "1/8,0.125", "--answers", answers, answers) == once
    two = figures("out", "--scores", "keys", "--texts", str(books), str(other))
    assert (once["texts"], two["texts"]) == (5, 6)
    alone = figures("out", "--scores", "keys", "--texts", str(other))
    assert alone == figures("fresh", "--scores", "keys", "--texts", str(other)) != once
    shorter = ("--scores", "keys", "--max-tokens", "140")
    assert figures("out", *shorter) == figures("fresh", *shorter) != once


def test_another_probe_is_measured_anew(folder: Path, tmp_path: Path) -> None:
    trunk = trunk_config(vocab_size=49152, hidden_size=32)
    files = [tmp_path / f"{i}.safetensors" for i in range(2)]
    for file in files:
        weights = torch.randn(trunk.num_layers, trunk.num_kv_heads, trunk.head_dim + 1)
        save_probe(file, SettleProbe(weights, equal_shares(trunk)))
        assert evaluation.run(arguments(folder, tmp_path, "--scores", "probe;keys", "--probe", str(file))) == 0
    rows = [json.loads(line) for line in (tmp_path / "measured.jsonl").read_text().splitlines()]
    of_probes = [row for row in rows if row["policy"].startswith("probe")]
    assert (len(of_probes), len(rows)) == (10, 15)
    with pytest.raises(TrainingError, match="base has no probe: make one with `hamburger fit-settle`"):
        evaluation.run(arguments(folder, tmp_path, "--scores", "probe"))


def test_another_model_in_the_same_folder_is_measured_anew(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "base"  # of the same name
    shutil.copytree(folder / "base", other)
    config = ModelConfig(trunk=trunk_config(vocab_size=49152, hidden_size=32, eos_token_ids=(2,)))
    save_checkpoint(other, config, random_tensors(config, seed=2))
    found = []
    for out, model in (("both", folder / "base"), ("both", other), ("alone", other)):
        more = ("--scores", "recency", "--per-kind", "1", "--model", str(model))
        assert evaluation.run(arguments(folder, tmp_path / out, *more)) == 0
        found.append(json.loads((tmp_path / out / "results.json").read_text()))
    assert found[1] == found[2] != found[0]
    assert "measured.jsonl: 3 of 3 rows are not of this model" in capsys.readouterr().err.replace("\n", "")
    cache = tmp_path / "both" / "measured.jsonl"
    rows = [json.loads(line) for line in cache.read_text().splitlines()]
    old = [{name: value for name, value in row.items() if name != "model"} for row in rows[:3]]  # of before
    cache.write_text("".join(json.dumps(row) + "\n" for row in old))
    more = ("--scores", "recency", "--per-kind", "1", "--model", str(other))
    assert evaluation.run(arguments(folder, tmp_path / "both", *more)) == 0
    assert json.loads((tmp_path / "both" / "results.json").read_text()) == found[2]
    cache.write_text('{"id": "x", "response": "mine"}\n')
    with pytest.raises(TrainingError, match=r"measured.jsonl was not written by eval-settle: .* --out"):
        evaluation.run(arguments(folder, tmp_path / "both", *more))


def test_random_choice_follows_the_seed(folder: Path, tmp_path: Path) -> None:
    for seed in ("0", "0", "5"):
        more = ("--scores", "random;newest", "--per-kind", "1", "--seed", seed)
        assert evaluation.run(arguments(folder, tmp_path, *more)) == 0
    rows = [json.loads(line) for line in (tmp_path / "measured.jsonl").read_text().splitlines()]
    drawn = {row["policy"]: row["sums"] for row in rows if row["policy"].startswith("random")}
    assert len(rows) == 9  # three texts: newest once, random by both seeds
    assert len({json.dumps(sums) for sums in drawn.values()}) == 2


@pytest.mark.parametrize(
    ("prompt", "ids", "message"),
    [
        ([5] * 4000, [7] * 150, r"answers.jsonl, line 1 has 4000 prompt tokens and 150 .* context of \d+: lower --max"),
        ([5], [7] * 149 + [49152], r"answers.jsonl, line 1 has the token id 49152, .* 0\.\.49151: .* --model"),
        ([], [7] * 150, "answers.jsonl, line 1: prompt_ids are empty, so"),
    ],
)
def test_texts_that_the_model_cannot_read_are_named(
    folder: Path, tmp_path: Path, prompt: list[int], ids: list[int], message: str
) -> None:
    row = {"id": "a", "messages": [{"role": "user", "content": "Hi"}], "response": "", "prompt_ids": prompt}
    (tmp_path / "answers.jsonl").write_text(json.dumps(row | {"token_ids": ids}) + "\n")
    with pytest.raises(TrainingError, match=message):
        evaluation.run(arguments(folder, tmp_path / "out", "--answers", str(tmp_path / "answers.jsonl")))


def test_mistakes_are_named(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TrainingError, match="score 'attentoin': choose from keys; probe; probe, equal places; "):
        evaluation.run(arguments(folder, tmp_path, "--scores", "attentoin"))
    out = tmp_path / "out"
    with pytest.raises(
        TrainingError,
        match=r"nothing settles, .* chunk of 32 .* behind token \d+, which .* follow, and the longest text has 150: ",
    ):
        evaluation.run(arguments(folder, out, "--windows", "128,256"))
    with pytest.raises(
        TrainingError, match=r"nothing settles, .* --keeps 1 keeps every slot of a chunk of 32: name a low"
    ):
        evaluation.run(arguments(folder, out, "--keeps", "1", "--scores", "keys;keys"))
    assert not out.exists()
    none = arguments(folder, tmp_path, "--min-tokens", "9000", "--max-tokens", "9001")
    with pytest.raises(TrainingError, match="no answer is as long as --min-tokens"):
        evaluation.run(none)
    wrong = {"2": "shares are in [0, 1]", "1/0": "'1/0': shares are", "x": "'x': shares are", "1e999": "shares are"}
    for value, problem in wrong.items():
        with pytest.raises(SystemExit):
            arguments(folder, tmp_path, "--keeps", value)
        assert problem in capsys.readouterr().err
    with pytest.raises(SystemExit):
        arguments(folder, tmp_path, "--growths", "0,1")  # of which no place would ever come
    assert "--growths: a growth of 1 keeps the whole answer" in capsys.readouterr().err


def test_a_policy_by_which_nothing_settles_is_said_to_be_missing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluation.run(arguments(folder, tmp_path, "--scores", "recency", "--windows", "32,500")) == 0
    out, err = capsys.readouterr()
    assert "recency | 500 | 0.333" in err
    assert "not in the table, as by a window of 500, " in err
    assert "recency | 32 | 0.333" not in err
    assert "| recency | 32 |" in out
