"""The card holds what is known, and says of everything else that it is unknown."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from hamburger.model.checkpoints.config.folder import Adapter
from hamburger.model.config import GraftConfig, ModelConfig
from hamburger.training.export.model_card import CardFacts, RunFacts, model_card, read_run
from small_models import graft_config, trunk_config

FACTS = CardFacts(
    name="tiny",
    source="run/step-000020",
    base="owner/base",
    is_whole=False,
    dtype="bfloat16",
    config=ModelConfig(trunk=trunk_config(), graft=graft_config()),
    adapter=Adapter(8, 16.0),
    num_adapter_parameters=1_500_000,
    weight_bytes=3_250_000,
)
RUN = RunFacts(
    checkpoint="step-000020",
    recipe="seed: 12\nepochs: 2",
    steps=20,
    response_tokens=123_456.0,
    hours=1.5,
    validation={"loss": 1.25, "dial 0.8 tokens_per_kv": 1.4},
)


def section(card: str, title: str) -> str:
    return card.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_what_is_known_is_told() -> None:
    card = model_card(replace(FACTS, run=RUN, calibration="| after token |", notes="Trained with love.\n"))
    shape = section(card, "What it is")
    for row in ("owner/base", "`run/step-000020`", "graft and adapter, bfloat16, 3.2 MB", "rank 8, alpha 16"):
        assert row in shape
    training = section(card, "Training")
    assert "20 steps over 123,456 answer tokens, 1.5 hours" in training
    assert "```yaml\nseed: 12\nepochs: 2\n```" in training
    assert "| dial 0.8 tokens_per_kv | 1.4 |" in training
    assert "began from" not in training
    began = section(model_card(replace(FACTS, run=replace(RUN, init="runs/stage1/step-000500"))), "Training")
    assert "It began from `runs/stage1/step-000500`, whose own training is not counted here." in began
    assert "| after token |" in section(card, "The dial")
    assert section(card, "Notes").strip() == "Trained with love."
    assert "get 0.8." in section(card, "Serve it")
    assert "is not in this folder" in section(card, "Serve it")


def test_what_is_not_known_is_said_to_be_unknown() -> None:
    card = model_card(replace(FACTS, base=None, is_whole=True, adapter=None))
    assert "base model | unknown" in section(card, "What it is")
    for title in ("Training", "Data", "The dial", "Limits"):
        assert "nknown" in section(card, title), title
    assert "## Notes" not in card
    assert "is not in this folder" not in card


@pytest.mark.parametrize("run", [None, RUN, replace(RUN, recipe=None, steps=0, validation={})])
@pytest.mark.parametrize("graft", [graft_config(), graft_config(stop_scale=(1.0,) * 4, expected_tokens_per_kv=1.6)])
def test_no_placeholder_is_left_in(run: RunFacts | None, graft: GraftConfig) -> None:
    config = replace(FACTS.config, graft=graft)
    card = model_card(replace(FACTS, config=config, run=run))
    assert not re.search(r"TODO|TBD|XXX|\{|\}|<[a-z]|\bNone\b|\bnan\b", card)
    assert card.endswith("\n")
    assert ("1.6, as given to the export" in card) == (graft.stop_scale is not None)


def test_verified_groups_are_told_as_they_are_served() -> None:
    config = replace(FACTS.config, graft=graft_config(groups="verified"))
    facts = replace(FACTS, config=config, adapter=None, calibration="| after token |")
    card = model_card(facts)
    for wrong in ("each in one KV-cache entry", "get 0.8", "Higher is safer", "groups of the data", "eval-quality"):
        assert wrong not in card
    assert "each token has a KV-cache entry of its own" in card.split("\n## ")[0]
    assert "at 0, the default, drafts are made where they pay" in section(card, "Serve it")
    assert "with one token a slot" in section(card, "The dial")
    assert "Tokens per KV: 1," in section(card, "Limits")
    assert "composed" not in card
    measured = replace(config, graft=graft_config(groups="verified", expected_tokens_per_kv=1.6))
    assert "with composed groups: 1.6, as given" in section(model_card(replace(facts, config=measured)), "Limits")
    assert "Quality: the base model's" in section(card, "Limits")
    for trained in (replace(facts, adapter=Adapter(8, 16.0)), replace(facts, is_whole=True)):
        assert "Quality against the base model: unknown" in section(model_card(trained), "Limits")


def test_a_runs_facts_end_at_the_checkpoint(tmp_path: Path) -> None:
    step = tmp_path / "run" / "step-000002"
    step.mkdir(parents=True)
    rows = [
        {"step": 1, "loss": 2.0, "response_tokens": 100.0, "tokens_per_second": 50.0},
        {"step": 2, "loss": 1.5, "response_tokens": 300.0, "tokens_per_second": 100.0},
        {"step": 2, "validation": {"loss": 1.75, "token_accuracy": [0.5, 0.25],
                                   "dial": [{"confidence": 0.8, "tokens_per_kv": 1.2}]}},
        {"step": 3, "loss": 1.0, "response_tokens": 900.0, "tokens_per_second": 1.0},
        {"step": 3, "validation": {"loss": 0.5}},
    ]  # fmt: skip
    (step.parent / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 4, "lo')
    (step.parent / "recipe.yaml").write_text("seed: 5\ninit: runs/stage1/step-000500\n")
    facts = read_run(step)
    assert facts == RunFacts(
        checkpoint="step-000002",
        recipe="seed: 5\ninit: runs/stage1/step-000500\n",
        steps=2,
        response_tokens=400.0,
        hours=5 / 3600,
        validation={"loss": 1.75, "token_accuracy 1": 0.5, "token_accuracy 2": 0.25, "dial 0.8 tokens_per_kv": 1.2},
        init="runs/stage1/step-000500",
    )


def test_what_is_no_checkpoint_of_a_run_has_no_facts(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("")
    assert read_run(tmp_path / "step-000002") is None
    for name in ("exported", "step-000003"):
        (tmp_path / name).mkdir()
    assert read_run(tmp_path / "exported") is None
    facts = read_run(tmp_path / "step-000003")
    assert facts is not None
    assert (facts.steps, facts.validation) == (0, {})
    (tmp_path / "recipe.yaml").unlink()
    assert read_run(tmp_path / "step-000003") is None
