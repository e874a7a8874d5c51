"""`hamburger fit-settle`, and where the probe that it writes is looked for."""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import hamburger.training.settling.fit as fitting
from hamburger.engine.device.load import resolve, slot_choice
from hamburger.engine.types.config import EngineArgs
from hamburger.engine.types.settling import Settling
from hamburger.model.checkpoints.config.hf import trunk_config_json
from hamburger.model.checkpoints.load import save_checkpoint
from hamburger.model.checkpoints.settle_probe import SettleProbe, equal_shares, load_probe, read_probe, save_probe
from hamburger.model.checkpoints.sources import BUILTIN, PROBE_FILE, CheckpointError, resolve_source
from hamburger.model.config import ConfigError, ModelConfig
from hamburger.model.modules.rotary import RotaryEmbedding
from hamburger.model.settled_places import SettledPlaces
from hamburger.model.slot_choice import SlotChoice
from hamburger.training.cli.settle import add_fit_settle_arguments
from hamburger.training.errors import TrainingError
from hamburger.training.settling.choice import dropped_by_head
from hamburger.training.settling.fit import Chunks, fit, kept, scored
from hamburger.training.settling.observed import observe
from hamburger.training.settling.shares import allot, costs_of_shares, losses, numbers_of_shares
from small_models import graft_config, plain_model, random_tensors, trunk_config

TRUNK = trunk_config(vocab_size=49152, hidden_size=32, eos_token_ids=(2,), max_position_embeddings=512)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A base, and answers that are said to be its own."""
    folder = tmp_path / "base"
    config = ModelConfig(trunk=TRUNK)
    save_checkpoint(folder, config, random_tensors(config, seed=1))
    (folder / "config.json").write_text(json.dumps(trunk_config_json(TRUNK)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN / name, folder / name)
    draw = random.Random(1)
    rows = [
        {"id": str(i), "sample": 0, "category": "a", "model": "m", "sampling": "greedy", "finish_reason": "length",
         "messages": [{"role": "user", "content": "Hi"}], "prompt_ids": [5, 6 + i], "response": "",
         "token_ids": [draw.randrange(3, 49152) for _ in range(260)]}
        for i in range(3)
    ]  # fmt: skip
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def arguments(folder: Path, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_fit_settle_arguments(parser)
    given = ["--model", folder, "--answers", folder.parent / "answers.jsonl", "--min-tokens", "200", "--steps", "5"]
    return parser.parse_args([*map(str, given), "--device", "cpu", "--out", str(folder / PROBE_FILE), *more])


def test_serve_finds_what_was_fitted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = EngineArgs(model=str(folder), device="cpu", dtype="float32", settle=True, groups="verified")
    settling = Settling(192, 1 / 8)
    assert resolve(args).settling == settling
    choice, places = slot_choice(resolve(args), settling)
    assert not choice.is_fitted
    assert not places.lent
    assert fitting.run(arguments(folder, "--window", "400")) == 0
    told = capsys.readouterr().err
    assert "fitted: 4 chunks" in told
    assert "held-out: 2 chunks" in told
    assert "no place is lent, and the file names no settings: too few answers are long enough to settle." in told
    assert slot_choice(resolve(args), settling)[0].is_fitted
    assert resolve(args).settling == settling  # which the file says nothing of
    weights, shares = read_probe(folder / PROBE_FILE, TRUNK)
    assert weights.shape == (TRUNK.num_layers, TRUNK.num_kv_heads, TRUNK.head_dim + 1)
    assert weights.abs().min() > 0
    assert shares.tolist() == [[1, 1]] * TRUNK.num_layers


def test_texts_that_the_model_cannot_read_are_named(folder: Path) -> None:
    answers = folder.parent / "answers.jsonl"
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    for wrong, message in (
        ({"prompt_ids": [5] * 300}, r"line 2 has 300 prompt tokens and 260 .* context of 512: lower --max-tokens"),
        ({"token_ids": [49152] * 260}, r"line 2 has the token id 49152, .* --model"),
    ):
        answers.write_text("".join(json.dumps(row) + "\n" for row in (rows[0], rows[1] | wrong, rows[2])))
        with pytest.raises(TrainingError, match=message):
            fitting.run(arguments(folder))


def test_shares_are_fitted_to_a_probe_and_serve(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where answers are long enough; with weights that are there, which stay."""
    own = SettleProbe(torch.randn(TRUNK.num_layers, TRUNK.num_kv_heads, TRUNK.head_dim + 1), equal_shares(TRUNK))
    save_probe(folder / "own", own)
    assert fitting.run(arguments(folder, "--probe", str(folder / "own"), "--window", "32")) == 0
    told = capsys.readouterr().err
    assert "heads lend places, to heads with those of up to" in told
    weights, shares = read_probe(folder / PROBE_FILE, TRUNK)
    assert torch.equal(weights, own.weights)
    assert int(shares.sum()) == shares.numel()
    found = re.findall(r"KL (\S+), with equal places (\S+); as any model settles, at \S+: (\S+)", told)[0]
    after, equal, usual = map(float, found)
    lends = after < min(equal, usual)
    assert torch.equal(shares, equal_shares(TRUNK)) != lends
    serves = resolve(EngineArgs(model=str(folder), device="cpu", settle=True))
    names_settings = lends or equal < usual
    assert serves.settling == (Settling(32, 0.33, 0) if names_settings else Settling(192, 1 / 8))
    assert ("the file names settle_window 32, settle_growth 0, settle_keep 0.33" in told) == names_settings
    _, places = slot_choice(serves, Settling(64, 1 / 8))
    assert torch.equal(places.lends == 1, shares == 0)


@pytest.mark.parametrize(
    ("lost", "names", "lends"),
    [
        ({"lent": 0.3, "equal": 0.2, "usual": 0.6}, True, False),
        ({"lent": 0.2, "equal": 0.2, "usual": 0.6}, True, False),
        ({"lent": 0.1, "equal": 0.2, "usual": 0.6}, True, True),
        ({"lent": 0.1, "equal": 0.2, "usual": 0.05}, False, False),
        ({"lent": 0.1, "equal": 0.1, "usual": 0.1}, False, False),
    ],
)
def test_the_file_has_what_loses_least(
    lost: dict[str, float], names: bool, lends: bool, folder: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    shares = torch.tensor([[2, 0]] * TRUNK.num_layers)
    monkeypatch.setattr(fitting, "allot", lambda costs: shares)
    monkeypatch.setattr(fitting, "_lost", lambda *_: lost)
    save_probe(folder / "own", SettleProbe(torch.randn(TRUNK.num_layers, 2, TRUNK.head_dim + 1), equal_shares(TRUNK)))
    assert fitting.run(arguments(folder, "--probe", str(folder / "own"), "--window", "64", "--keep", "0.5")) == 0
    assert torch.equal(read_probe(folder / PROBE_FILE, TRUNK).shares, shares if lends else equal_shares(TRUNK))
    settling = resolve(EngineArgs(model=str(folder), device="cpu", settle=True)).settling
    assert settling == (Settling(64, 0.5, 0) if names else Settling(192, 1 / 8))
    told = capsys.readouterr().err
    assert ("the file names settle_window 64, settle_growth 0, settle_keep 0.5" in told) == names
    assert ("the file names no settings" in told) != names


def test_answers_that_end_where_something_settles_tell_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By DEFAULTS something does at 256 tokens: a token must come behind the one whose slot is made then."""
    save_probe(folder / "own", SettleProbe(torch.randn(TRUNK.num_layers, 2, TRUNK.head_dim + 1), equal_shares(TRUNK)))
    for length, tells in ((257, False), (258, True)):
        more = ("--probe", str(folder / "own"), "--max-tokens", str(length))
        assert fitting.run(arguments(folder, *more)) == 0
        assert ("heads lend places" in capsys.readouterr().err) == tells


def test_a_share_that_keeps_all_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(folder, "--keep", "1")
    assert "--keep: a share of 1 keeps every slot" in capsys.readouterr().err


def test_the_file_s_folder_need_not_be_there(folder: Path) -> None:
    save_probe(
        folder / "own",
        SettleProbe(torch.randn(TRUNK.num_layers, TRUNK.num_kv_heads, TRUNK.head_dim + 1), equal_shares(TRUNK)),
    )
    new = folder / "new" / "folder" / PROBE_FILE
    assert fitting.run(arguments(folder, "--probe", str(folder / "own"), "--window", "400", "--out", str(new))) == 0
    assert torch.equal(read_probe(new, TRUNK).weights, read_probe(folder / "own", TRUNK).weights)


def test_only_a_probe_is_replaced(folder: Path) -> None:
    mine = folder.parent / "notes.txt"
    mine.write_text("mine")
    for file in (next(f for f in folder.glob("*.safetensors")), mine):
        before = file.read_bytes()
        with pytest.raises(TrainingError, match=rf"--out {file} holds no probe, so it is not replaced: name another"):
            fitting.run(arguments(folder, "--out", str(file)))
        assert file.read_bytes() == before
    probe = SettleProbe(torch.randn(TRUNK.num_layers, TRUNK.num_kv_heads, TRUNK.head_dim + 1), equal_shares(TRUNK))
    save_probe(folder / "own", probe)
    save_probe(folder / PROBE_FILE, SettleProbe(torch.zeros_like(probe.weights), probe.shares))
    assert fitting.run(arguments(folder, "--probe", str(folder / "own"), "--window", "400")) == 0
    assert torch.equal(read_probe(folder / PROBE_FILE, TRUNK).weights, probe.weights)


def test_settings_that_were_fitted_serve_where_the_user_says_nothing(folder: Path) -> None:
    probe = SettleProbe(torch.randn(TRUNK.num_layers, TRUNK.num_kv_heads, TRUNK.head_dim + 1), equal_shares(TRUNK))

    def serves(**given: Any) -> Settling | None:
        return resolve(EngineArgs(model=str(folder), device="cpu", **given)).settling

    for settings in ({"settle_window": 64, "settle_growth": 1 / 3, "settle_keep": 0.33}, {"settle_keep": 0.25}):
        save_probe(folder / PROBE_FILE, probe, settings)
        fitted = Settling(int(settings.get("settle_window", 192)), settings["settle_keep"], 1 / 3)
        assert serves(settle=True) == fitted
        assert serves(settle=True, settle_growth=0.0, settle_limit=600) == replace(fitted, growth=0.0, limit=600)
        assert serves(settle=True, settle_window=96, settle_keep=0.5) == replace(fitted, window=96, keep=0.5)
        assert serves() is None
    with pytest.raises(ConfigError, match=r"settle_limit is 300, but a window of 192 with a settle_keep of 0.25 needs"):
        serves(settle=True, settle_limit=300)
    save_probe(folder / PROBE_FILE, probe, {"settle_window": 8})
    with pytest.raises(
        CheckpointError, match=r"names a settle_window of 8, which must be in \[32, inf\): make it anew"
    ):
        serves(settle=True)
    (folder / PROBE_FILE).write_bytes(b"what?")
    with pytest.raises(CheckpointError, match=r"settle.safetensors cannot be read"):
        serves(settle=True)
    assert serves() is None


def test_places_go_where_they_are_worth_most() -> None:
    costs = torch.zeros(5, 2, 2)
    costs[:, 0, 0] = torch.tensor([4.0, 0, -0.5, -1, -1])  # needs its own
    costs[:, 0, 1] = torch.tensor([0.5, 0, -6, -7, -7])  # one more is worth much, a third one little
    costs[:, 1, 0] = torch.tensor([0.1, 0, 0, 0, 0])
    costs[:, 1, 1] = torch.tensor([-0.2, 0, 0.3, 0, 0])  # of nothing
    assert allot(costs).tolist() == [[1, 3], [0, 0]]
    costs[2:, 0, 0] = torch.tensor([0.0, -9, -9])  # two more: only together
    assert allot(costs).tolist() == [[3, 1], [0, 0]]
    assert allot(torch.zeros(5, 3, 2)).tolist() == [[1, 1]] * 3
    assert numbers_of_shares(Settling(64, 0.33)) == [7, 21, 35, 49, 63]
    assert numbers_of_shares(Settling(64, 1 / 4)) == [4, 16, 28, 40, 52, 64]
    assert numbers_of_shares(Settling(64, 1 / 2)) == [16, 32, 48, 64]
    settling = Settling(192, 1 / 8)
    shares = torch.tensor([[4, 0, 0, 0, 1]])
    assert SettledPlaces(shares, settling.chunk, settling.kept).numbers.tolist() == [[26, 2, 2, 2, 8]]


def test_a_share_costs_what_it_changes() -> None:
    """To first order: of small changes the real loss is what was foretold."""
    config = trunk_config(vocab_size=128, hidden_size=64, max_position_embeddings=512)
    model = plain_model(ModelConfig(trunk=config), 5)
    draw = random.Random(2)
    seen = observe(model, [5, 6], [draw.randrange(2, 128) for _ in range(300)])
    choice = SlotChoice(RotaryEmbedding(config, 512, torch.device("cpu"), torch.float32))
    settling = Settling(64, 1 / 4)
    for shares in (equal_shares(config), torch.tensor([[1, 1], [0, 1], [1, 2], [1, 1]])):
        costs = costs_of_shares(model, choice, settling, [seen], shares)
        assert costs.gather(0, shares[None]).abs().max() < 1e-9
        numbers = SettledPlaces(shares, settling.chunk, settling.kept).numbers
        before, tokens = losses(model, seen, dropped_by_head(seen, settling, choice, numbers), settling)
        foretold, found = [], []
        for share, number in enumerate(numbers_of_shares(settling)[:3]):
            for layer in range(config.num_layers):
                changed = numbers.clone()
                changed[layer, 1] = number
                after, _ = losses(model, seen, dropped_by_head(seen, settling, choice, changed), settling)
                found.append((after - before) / tokens)
                foretold.append(float(costs[share, layer, 1]))
        assert torch.corrcoef(torch.tensor([foretold, found]))[0, 1] > 0.9


def test_a_probe_is_no_weight_of_a_checkpoint_of_ours_and_that_of_its_base_serves(folder: Path) -> None:
    assert fitting.run(arguments(folder)) == 0
    config = ModelConfig(trunk=TRUNK, graft=graft_config())
    own = {
        name: t
        for name, t in random_tensors(config, 1).items()
        if name not in random_tensors(ModelConfig(trunk=TRUNK), 1)
    }
    save_checkpoint(folder.parent / "burger", config, own, base="../base")
    source = resolve_source(str(folder.parent / "burger"))
    of_base = load_probe(source, TRUNK)
    assert of_base is not None
    other = {"probe": torch.ones(TRUNK.num_layers, TRUNK.num_kv_heads, TRUNK.head_dim + 1)}  # a file without shares
    save_file(other, folder.parent / "burger" / PROBE_FILE)
    nearest = load_probe(source, TRUNK)
    assert nearest is not None
    assert torch.equal(nearest.weights, other["probe"])
    assert torch.equal(nearest.shares, equal_shares(TRUNK))
    resolve(EngineArgs(model=str(folder.parent / "burger"), device="cpu"))  # which reads the weights


def test_a_probe_of_another_model_is_named(folder: Path) -> None:
    file = folder / PROBE_FILE
    for tensors in (
        {"probe": torch.ones(1, 1, 3)},
        {"other": torch.ones(1)},
        {"probe": torch.full((2, 2, 9), torch.nan)},
    ):
        save_file(tensors, file)
        with pytest.raises(CheckpointError, match=r"settle.safetensors is no probe of this model, which is `probe` \["):
            read_probe(file, TRUNK)
    weights = torch.ones(TRUNK.num_layers, TRUNK.num_kv_heads, TRUNK.head_dim + 1)
    for shares in (torch.ones(1, 1), torch.full((4, 2), -1), torch.tensor([[2, 1]] * 4), torch.ones(4, 2)):
        save_file({"probe": weights, "shares": shares}, file)
        with pytest.raises(CheckpointError, match=r"settle.safetensors has `shares` that are not those of this model"):
            read_probe(file, TRUNK)


def test_answers_to_one_prompt_are_fitted_to_or_held_out_together(folder: Path) -> None:
    answers = folder.parent / "answers.jsonl"
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    more = [row | {"id": f"{row['id']} again"} for row in rows]
    answers.write_text("".join(json.dumps(row) + "\n" for row in [*rows[:1], *more, *rows[1:]]))
    texts = [*fitting._texts(arguments(folder))]
    assert [text.is_held_out for text in texts] == [True, True, False, False, False, False]
    rows[0]["token_ids"] = rows[0]["token_ids"][:230]  # of others there are longer ones
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [text.is_held_out for text in fitting._texts(arguments(folder))] == [False, True, False]


def test_mistakes_are_named(folder: Path) -> None:
    with pytest.raises(TrainingError, match="fewer than two prompts have answers as long as --min-tokens 400"):
        fitting.run(arguments(folder, "--min-tokens", "400"))
    answers = (folder.parent / "answers.jsonl").read_text()
    (folder.parent / "answers.jsonl").write_text(answers.replace('"response": ""', '"response": "Hi"'))
    with pytest.raises(TrainingError, match=r"line 1: token_ids are not those of .* name the model that wrote"):
        fitting.run(arguments(folder))
    rows = (folder.parent / "answers.jsonl").read_text().replace('"token_ids"', '"ids"')
    (folder.parent / "answers.jsonl").write_text(rows)
    with pytest.raises(TrainingError, match="it needs token_ids and prompt_ids"):
        fitting.run(arguments(folder))


def test_a_fit_finds_what_decides() -> None:
    """Attention goes where the first dimension of a key is large, in one head, and where a value is, in the other."""
    draw = torch.Generator().manual_seed(1)
    features = torch.randn(80, 1, 64, 2, 9, generator=draw)
    features[..., 3] *= 50  # a dimension that varies much must not drown the others
    deciding = torch.stack((features[:, :, :, 0, 0], features[:, :, :, 1, 8]), dim=-1)
    chunks = Chunks(features.half(), (2 * deciding).softmax(2))
    probe = fit(chunks, steps=300, seed=0)
    assert probe[0, 0].abs().argmax() == 0
    assert probe[0, 1].abs().argmax() == 8
    assert kept(chunks, scored(probe, chunks)) > 0.95 * kept(chunks, chunks.shares)
    assert torch.equal(probe, fit(chunks, steps=300, seed=0))
