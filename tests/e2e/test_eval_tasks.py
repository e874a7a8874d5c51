"""`hamburger eval-tasks` on a real server: its log-likelihoods are those of transformers on the same weights."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from hamburger.clients.evaluation import command
from hamburger.clients.evaluation.items import TASKS, Question, read_items
from hamburger.model.checkpoints.load import load_checkpoint
from hamburger.model.checkpoints.sources import resolve_source
from hamburger.model.config import ModelConfig
from peer import hugging_face
from real_server import RealServer

DATA = Path(__file__).parents[1] / "data" / "eval"


def evaluate(server: RealServer, out: Path, *arguments: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    options = ["--base-url", server.url, "--data", str(DATA), "--out", str(out), *arguments]
    assert command.run(parser.parse_args(options)) == 0
    found: dict[str, Any] = json.loads(out.read_text())["tasks"]
    return found


def test_choices_have_the_likelihoods_of_transformers(
    grafted: RealServer, grafted_folder: Path, tmp_path: Path
) -> None:
    found = evaluate(grafted, tmp_path / "r.json", "--tasks", "arc_easy,piqa", "--concurrency", "4")
    lines = (tmp_path / "r.answers.jsonl").read_text().splitlines()
    answers = {row["id"]: row["loglikelihoods"] for row in map(json.loads, lines)}
    checkpoint = load_checkpoint(resolve_source(str(grafted_folder)), torch.float32)
    of_trunk = {n: t for n, t in checkpoint.tensors.items() if n.startswith(("model.", "lm_head."))}
    peer = hugging_face(ModelConfig(trunk=checkpoint.config.trunk), of_trunk)
    tokenizer = Tokenizer.from_file(str(grafted_folder / "tokenizer.json"))
    for name in ("arc_easy", "piqa"):
        for item in read_items(DATA, TASKS[name]):
            assert isinstance(item, Question)
            expected = []
            for choice in item.choices:
                context, ids = (tokenizer.encode(text).ids for text in (item.context, f"{item.context} {choice}"))
                with torch.inference_mode():
                    rows = peer(torch.tensor([ids])).logits[0].log_softmax(-1)
                expected.append(sum(float(rows[i - 1, ids[i]]) for i in range(len(context), len(ids))))
            assert answers[item.id] == pytest.approx(expected, abs=1e-2)
            assert found[name]["scores"]["a"][item.id]["acc"] == (expected.index(max(expected)) == item.gold)


def test_two_confidences_of_a_server_are_compared(grafted: RealServer, tmp_path: Path) -> None:
    options = ("--tasks", "ifeval,gsm8k", "--limit", "3", "--max-tokens", "12", "--confidence", "0")
    for task in evaluate(grafted, tmp_path / "r.json", *options, "--confidence-b", "1").values():
        assert task["usage"]["a"]["tokens_per_kv"] > task["usage"]["b"]["tokens_per_kv"] == 1.0
        assert all(side["tokens_per_second"] > 0 for side in task["usage"].values())
        [metric] = task["metrics"].values()
        assert metric["difference"]["low"] <= metric["difference"]["value"] <= metric["difference"]["high"]
