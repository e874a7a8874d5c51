"""The reference's own numbers (tests/data/golden-tiny), loaded from the published checkpoint format, in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hamburger.model.assemble import assemble
from hamburger.model.checkpoint import load_checkpoint
from hamburger.model.hamburger import HamburgerModel
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.sources import ModelSource
from small_models import CPU, core_of, one_sequence, params, run_core

DATA = Path(__file__).parent.parent / "data" / "golden-tiny"
GOLDEN: dict[str, list[dict[str, Any]]] = json.loads((DATA / "golden.json").read_text())


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "packed"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HamburgerModel:
    base = tmp_path_factory.mktemp("base")
    (base / "config.json").write_text((DATA / "base_config.json").read_text())
    source = ModelSource("lightning", "tiny", DATA / "reference-tiny.ckpt", base, base)
    checkpoint = load_checkpoint(source, torch.float32)
    return assemble(
        checkpoint.config,
        checkpoint.tensors,
        dtype=torch.float32,
        device=CPU,
        max_positions=checkpoint.config.trunk.max_position_embeddings,
        packed=request.param,
    )


@pytest.mark.parametrize("case", GOLDEN["forward"])
def test_teacher_forced_pass_gives_the_reference_numbers(model: HamburgerModel, case: dict[str, Any]) -> None:
    logits, stops = teacher_forced(model, case["input_ids"], case["inst_len"], case["steps"])
    torch.testing.assert_close(stops, torch.tensor(case["stop_logits"]), atol=1e-3, rtol=0)
    torch.testing.assert_close(logits.logsumexp(-1), torch.tensor(case["logsumexp"]), atol=1e-3, rtol=0)
    top = torch.tensor(case["top5_logits"])
    torch.testing.assert_close(logits.gather(1, torch.tensor(case["top5_ids"])), top, atol=1e-3, rtol=0)
    torch.testing.assert_close(logits.topk(5).values, top, atol=1e-3, rtol=0)


@pytest.mark.parametrize("case", GOLDEN["generate"])
def test_greedy_groups_are_the_reference_groups(model: HamburgerModel, case: dict[str, Any]) -> None:
    # The reference neither ends nor trims at EOS, so its end tokens are ordinary tokens here.
    sampling = params(confidence=case["confidence"], ignore_eos=True, max_tokens=100)
    outputs = run_core(core_of(model), {"r": (case["prompt_ids"], sampling)}, max_groups=len(case["groups"]))
    assert [output.token_ids for output in outputs["r"]] == case["groups"]


def teacher_forced(
    model: HamburgerModel, input_ids: list[int], num_prompt: int, group_sizes: list[int]
) -> tuple[Tensor, Tensor]:
    """Logits [n, V] and stop logits [n] of every response token, with the given groups as input."""
    groups, start = [], num_prompt
    for size in group_sizes:
        groups.append(input_ids[start : start + size])
        start += size
    ends = [num_prompt - 1 + sum(group_sizes[: i + 1]) for i in range(len(groups))]
    slots = [[token_id] for token_id in input_ids[:num_prompt]] + groups[:-1]
    positions = list(range(num_prompt)) + ends[:-1]
    batch = one_sequence(slots, positions, emit=list(range(num_prompt - 1, len(slots))))
    cache = PagedKVCache(model.config.trunk, 1, len(slots), torch.float32, CPU)
    graft = model.config.graft
    assert graft is not None
    with torch.inference_mode():
        hidden, features = model.trunk(model._embed(batch), batch, cache, model.rotary, graft.feature_layers)
        logits, stops = [], []
        for row, group in enumerate(groups):
            state = hidden[row : row + 1]
            micro = model.micro_decoder.start(torch.stack(features, dim=1)[row : row + 1])
            for index, token_id in enumerate(group):
                logits.append(model.head(state)[0])
                stops.append(model._stop_logit(state)[0])
                if index + 1 < len(group):
                    state = model.micro_decoder(model.embed_tokens(torch.tensor([token_id])), micro, model.rotary)
    return torch.stack(logits), torch.stack(stops)
