"""The reference's own numbers (tests/data/golden-tiny), loaded from the published checkpoint format, in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hamburger.model.assemble import assemble
from hamburger.model.checkpoints.load import load_checkpoint
from hamburger.model.checkpoints.sources import ModelSource
from hamburger.model.execution import Execution
from hamburger.model.steps import EagerSteps
from slow_cases import slow_but
from small_models import CPU, core_of, params, run_core, teacher_forced

DATA = Path(__file__).parent.parent / "data" / "golden-tiny"
GOLDEN: dict[str, list[dict[str, Any]]] = json.loads((DATA / "golden.json").read_text())


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "packed"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EagerSteps:
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
        execution=Execution(packed=request.param),
    )


@pytest.mark.parametrize("case", GOLDEN["forward"])
def test_teacher_forced_pass_gives_the_reference_numbers(model: EagerSteps, case: dict[str, Any]) -> None:
    logits, stops = teacher_forced(model, case["input_ids"], case["inst_len"], case["steps"])
    torch.testing.assert_close(stops, torch.tensor(case["stop_logits"]), atol=1e-3, rtol=0)
    torch.testing.assert_close(logits.logsumexp(-1), torch.tensor(case["logsumexp"]), atol=1e-3, rtol=0)
    top = torch.tensor(case["top5_logits"])
    torch.testing.assert_close(logits.gather(1, torch.tensor(case["top5_ids"])), top, atol=1e-3, rtol=0)
    torch.testing.assert_close(logits.topk(5).values, top, atol=1e-3, rtol=0)


@pytest.mark.parametrize("case", slow_but(GOLDEN["generate"][::3], GOLDEN["generate"]))
def test_greedy_groups_are_the_reference_groups(model: EagerSteps, case: dict[str, Any]) -> None:
    # The reference neither ends nor trims at EOS, so its end tokens are ordinary tokens here.
    sampling = params(confidence=case["confidence"], ignore_eos=True, max_tokens=100)
    outputs = run_core(core_of(model), {"r": (case["prompt_ids"], sampling)}, max_groups=len(case["groups"]))
    assert [output.token_ids for output in outputs["r"]] == case["groups"]
