"""What test_kinds.py and test_relatives.py ask of every kind: logits and greedy answers as transformers' are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hamburger.model.assemble import assemble
from hamburger.model.checkpoints.load import load_checkpoint
from hamburger.model.checkpoints.sources import resolve_source
from hamburger.model.execution import Execution
from hamburger.model.steps import EagerSteps
from peer import greedy
from small_models import CPU, core_of, params, run_core, tokens_of

PROMPT: list[int] = torch.randint(3, 96, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def served(folder: Path, *, packed: bool | None = False) -> EagerSteps:
    """The model of a folder, in torch and float32; packed: as in Execution."""
    checkpoint = load_checkpoint(resolve_source(str(folder)), torch.float32)
    return assemble(
        checkpoint.config, checkpoint.tensors, dtype=torch.float32, device=CPU, max_positions=256,
        execution=Execution(packed=packed),
    )  # fmt: skip


def assert_answers_are(peer: Any, model: EagerSteps) -> None:
    """The 20 likeliest log-probabilities at each place of PROMPT within 1e-4, and 24 greedy tokens behind it."""
    asked = params(prompt_logprobs=20, max_tokens=24, ignore_eos=True)
    outputs = run_core(core_of(model), {"r": (PROMPT, asked)})["r"]
    with torch.inference_mode():
        expected = peer(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    told = outputs[0].prompt_logprobs
    assert told is not None
    for row, entry in zip(expected, told[1:], strict=True):
        assert entry is not None
        ids, found = zip(*entry.top, strict=True)
        torch.testing.assert_close(torch.tensor(found), row[list(ids)], atol=1e-4, rtol=0)
    assert tokens_of(outputs) == greedy(peer, PROMPT, 24)
