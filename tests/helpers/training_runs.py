"""A small base model on disk, a text that it can learn, and recipes that take seconds, for tests of training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from torch import Tensor

from examples import MadeExample, example, random_example
from hamburger.model.checkpoints.config.hf import trunk_config_json
from hamburger.model.config import ModelConfig
from hamburger.training.corpus.dataset import DatasetMeta
from hamburger.training.recipe import Recipe
from peer import as_its_kind_has_them
from small_models import random_tensors, trunk_config

GRAFT: dict[str, Any] = {"max_group": 4, "merger_heads": 4, "micro_layers": 1, "feature_layers": 2}
FUSED: dict[str, Any] = {**GRAFT, "features": "fused", "micro_norm": True}
# Merger and merge adapter alone, held to the base's states.
MERGES: dict[str, Any] = {
    "graft": FUSED,
    "trunk": {"mode": "merges", "rank": 32},
    "objective": {"cross_entropy": 0.0, "distillation": 1.0, "stop": 0.0, "stop_target": "agreement",
                  "micro_weight": 0.0, "matching": 2.0},
    "groups": {"kind": "jitter"},
}  # fmt: skip


def dataset_meta(**changes: Any) -> DatasetMeta:
    """How a small data set says that it was made."""
    fields: dict[str, Any] = {"model": "tiny", "model_argument": None, "base": None, "vocab_size": 96}
    fields |= {"strategy": "decreasing_v2", "ratio": 0.3, "floor": 0.05, "max_group": 4, "top_k": 2, "max_length": 64}
    fields |= {"train_on": "last", "loops": "drop", "held_out": 0.0}
    return DatasetMeta(**fields | changes)


@dataclass(frozen=True, slots=True, eq=False)
class MadeRecord:
    """An example as a data set holds it."""

    id: str
    token_ids: Tensor
    response: Tensor
    group_sizes: Tensor
    entropy: Tensor
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None
    states: Tensor | None = None


class MadeSource:
    """A data set in memory."""

    def __init__(self, records: Sequence[MadeRecord], state_layers: tuple[int, ...] = ()) -> None:
        self.records = list(records)
        self.state_layers = state_layers

    def __len__(self) -> int:
        return len(self.records)

    def example(self, index: int) -> MadeRecord:
        return self.records[index]


def write_base(folder: Path, **changes: Any) -> Path:
    """A random base model as a Hugging Face folder."""
    config = trunk_config(**{"num_layers": 2, **changes})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(trunk_config_json(config)))
    model = ModelConfig(trunk=config)
    save_file(as_its_kind_has_them(model, random_tensors(model)), folder / "model.safetensors")
    return folder


def words_tokenizer(vocab_size: int) -> tokenizers.Tokenizer:
    """Words w0, w1, ... as ids."""
    words = {f"w{i}": i for i in range(vocab_size)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return backend


def record(made: MadeExample, id: str) -> MadeRecord:
    """With an entropy that is drawn from the id, 0 where nothing is trained."""
    draw = torch.Generator().manual_seed(sum(map(ord, id)))
    entropy = torch.rand(len(made.token_ids), generator=draw) * made.response
    return MadeRecord(
        id, made.token_ids, made.response, made.group_sizes, entropy, made.top_ids, made.top_logprobs, made.states
    )


def random_source(number: int, teacher_k: int = 4) -> MadeSource:
    return MadeSource([record(random_example(i, teacher_k), f"r{i}") for i in range(number)])


def repetitive_source(number: int, period: int = 6, groups: int = 5) -> MadeSource:
    """Answers that count in a circle from the prompt's last token on, in groups of four; the teacher knows it."""
    records = []
    for i in range(number):
        ids = [2 + (i + j) % period for j in range(4 * groups + 2)]
        made = example([(ids[:2], [ids[k : k + 4] for k in range(2, len(ids), 4)])])
        rows = torch.tensor(ids[2:], dtype=torch.int32)
        # Its second choice is a token that never comes.
        top_ids = torch.stack((rows, torch.full_like(rows, 90)), dim=1)
        top = torch.tensor([0.99, 0.01]).log().half().expand(len(rows), 2)
        records.append(record(replace(made, top_ids=top_ids, top_logprobs=top), f"c{i}"))
    return MadeSource(records)


def recipe(base: Path, **changes: Any) -> Recipe:
    """A short full fine-tune in float32 with the published objective."""
    values: dict[str, Any] = {
        "base": str(base),
        "graft": GRAFT,
        "trunk_lr": 1e-3,
        "graft_lr": 2e-3,
        "warmup_steps": 2,
        "max_steps": 4,
        "slots_per_pack": 40,
        "packs_per_step": 2,
        "validation_share": 0.0,
        "checkpoint_every": 2,
        "precision": "float32",
        "threads": 1,
    }
    return Recipe.model_validate({**values, **changes})


AGREEMENT: dict[str, Any] = {
    "cross_entropy": 0.3,
    "distillation": 1.0,
    "lookahead": "dense",
    "stop_target": "agreement",
    "micro_weight": 1.5,
}


def losses(run: Path, name: str = "loss") -> list[float]:
    """The training losses of metrics.jsonl, or another number, one a step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    if [line["step"] for line in steps] != list(range(1, len(steps) + 1)):
        raise ValueError("a step is missing or there twice")
    return [line[name] for line in steps]


def validations(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["validation"] for line in lines if "validation" in line]
