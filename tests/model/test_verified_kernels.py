"""Verified groups on the compiled kernels, and on trunks of every kind: the bits of confidence 1, by any way."""

from __future__ import annotations

import random
from collections import Counter
from typing import cast

import pytest
import torch
from torch import Tensor

from exactness import (
    CONTEXT,
    GRAMMARS,
    Answer,
    answer,
    answers,
    asking,
    assert_same,
    foretold,
    requests,
    steps_of,
    unaided,
)
from fakes import EOS, VOCAB_SIZE
from hamburger.engine.drafting.policy import DraftPolicy
from hamburger.engine.types.messages import SubmitRequest
from hamburger.model.assemble import assemble
from hamburger.model.batch import ForwardBatch, StepOutput
from hamburger.model.config import ModelConfig
from hamburger.model.cpu.emission import CpuEmission
from hamburger.model.cpu.library import InstructionSet, load_kernels
from hamburger.model.execution import Execution
from native_models import SETS, WIDE
from playing import play
from slow_cases import slow_but
from small_models import CPU, core_of, graft_config, params, random_tensors, trunk_config
from trunk_shapes import SHAPES as TRUNKS
from verified import free_rows


@pytest.mark.parametrize("name", ["hamburger", "short_list"])
@pytest.mark.usefixtures("meddling")
def test_one_call_of_the_kernels_and_its_parts_check_and_draft_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, seen, calls = steps_of(name, "kernels"), Counter[str](), Counter[bool]()
    plain = [
        request
        for request in requests("one call")
        if not request.params.grammar and request.params.logprobs is None and not request.params.logit_bias
        if request.params.repetition_penalty == 1 and not request.params.presence_penalty and request.params.max_tokens
        if not request.params.min_tokens and request.params.prompt_logprobs is None
        if not request.params.allowed_token_ids and not request.params.bad_words and request.params.thinking is None
    ]
    emit = CpuEmission.emit

    def counted(self: CpuEmission, states: Tensor, features: list[Tensor], batch: ForwardBatch) -> StepOutput:
        calls[batch.checks is not None and bool((batch.checks >= 0).any()) and batch.max_group_limit > 1] += 1
        return emit(self, states, features, batch)

    monkeypatch.setattr(CpuEmission, "emit", counted)
    truth = unaided(steps, plain)
    told = foretold(plain, truth)
    found = []
    for asked in (told, asking(told, logprobs=1)):
        core = core_of(steps, max_model_len=CONTEXT, policy=free_rows(3))
        outputs = play(core, asked, at_once=3).outputs
        found.append({name: [o.drafts for o in groups if o.drafts is not None] for name, groups in outputs.items()})
        if asked is told:
            assert_same({name: answer(groups) for name, groups in outputs.items()}, truth, to_the_bit=True)
            assert calls[True] > 10
            calls.clear()
    assert not calls  # log-probabilities: such batches go by parts
    for name, drafts in found[0].items():
        # Chances are rounded otherwise, and decide how many drafts there are; the first ones come from the same state.
        for one, other in zip(drafts[:1], found[1][name][:1], strict=True):
            both = min(len(one.token_ids), len(other.token_ids))
            assert one.token_ids[:both] == other.token_ids[:both]
            assert one.chances[:both] == pytest.approx(other.chances[:both], abs=0.01)
            seen[one.drafter] += 1
    assert min(seen["micro"], seen["prediction"]) > 1


SHAPES = TRUNKS | {"many_heads_a_kv_head": {"num_heads": 12, "num_kv_heads": 1}}
QUICK = [
    ("qwen3_sliding_yarn", "avx512", torch.bfloat16),
    ("qwen3_sliding_yarn", "avx512bf16", torch.bfloat16),
    ("many_heads_a_kv_head", "avx512bf16", torch.bfloat16),
    ("many_heads_a_kv_head", "avx2", torch.bfloat16),
    ("dynamic_rope", "torch", torch.float32),
    ("mistral", "avx512", torch.float32),
    ("qwen3_sliding_yarn", "avx512", torch.int8),
    ("many_heads_a_kv_head", "avx2", torch.int8),
]
KV_DTYPES = torch.bfloat16, torch.float32, torch.int8
WAYS = [*((form, dtype) for form in SETS for dtype in KV_DTYPES), ("torch", torch.float32)]
DEEP = [(shape, *way) for shape in SHAPES for way in WAYS]


@pytest.mark.parametrize(("shape", "form", "kv_dtype"), slow_but(QUICK, DEEP))
@pytest.mark.usefixtures("meddling")
def test_trunks_of_every_kind_over_several_tiles_of_slots(shape: str, form: str, kv_dtype: torch.dtype) -> None:
    """Rows of a sequence read their context together on the kernels, and each other as the pool rounds them."""
    vocabulary = {"vocab_size": VOCAB_SIZE, "eos_token_ids": (EOS,)}
    config = ModelConfig(trunk=trunk_config(**{**SHAPES[shape], **WIDE, **vocabulary}), graft=graft_config())
    kernels = None if form == "torch" else load_kernels(cast("InstructionSet", form))
    if kernels is None and form != "torch":
        pytest.skip(f"this processor has no {form}")
    execution = Execution(kernels=kernels, bits=4 if shape == "grouped" and kernels is not None else None)
    tensors = random_tensors(config, 7)
    steps = assemble(config, tensors, dtype=torch.float32, device=CPU, max_positions=200, execution=execution)
    draw, asked = random.Random(shape), []
    for i, length in enumerate((1, 20, 28, 31, 60, 90, 150, 12)):
        sampling = params(max_tokens=36, confidence=0.0, temperature=0.8 * (i % 2), seed=i, logprobs=i % 3 or None)
        asked.append(SubmitRequest(str(i), [draw.randrange(2, 96) for _ in range(length)], sampling, 0.0))

    def found(requests: list[SubmitRequest], policy: DraftPolicy | None, seen: Counter[str]) -> dict[str, Answer]:
        core = core_of(steps, max_model_len=200, policy=policy, kv_dtype=kv_dtype)
        return answers(core, requests, seen)

    seen = Counter[str]()
    truth = found(asking(asked, confidence=1.0), None, Counter())
    assert_same(found(foretold(asked, truth), free_rows(3), seen), truth, to_the_bit=form != "torch")
    assert min(seen["accepted"], seen["rejected"]) > 10


@pytest.mark.usefixtures("meddling")
def test_the_number_of_threads_changes_no_bit() -> None:
    steps, asked = steps_of("hamburger", "kernels"), requests("threads")[:12]
    truth, before = unaided(steps, asked), torch.get_num_threads()
    try:
        for number in (2, 3):
            torch.set_num_threads(number)
            core = core_of(steps, max_model_len=CONTEXT, grammars=GRAMMARS, policy=free_rows(3))
            assert_same(answers(core, foretold(asked, truth), Counter()), truth, to_the_bit=True)
    finally:
        torch.set_num_threads(before)
