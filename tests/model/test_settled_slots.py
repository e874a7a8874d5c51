"""Settled slots on real models: logits are those of a plain pass with a mask, and nothing but the answer decides."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from exactness import Answer, answer, asking, numbers
from hamburger.engine.core.core import EngineCore
from hamburger.engine.core.sequence import Sequence
from hamburger.engine.types.messages import SubmitRequest
from hamburger.engine.types.settling import Settling
from hamburger.model.assemble import assemble
from hamburger.model.config import ModelConfig
from hamburger.model.cpu.library import load_kernels
from hamburger.model.execution import Execution
from hamburger.model.hamburger import HamburgerModel
from hamburger.model.slot_scores import NEAREST, middle_layers
from hamburger.model.steps import EagerSteps
from hamburger.model.trunk import run_layers
from native_models import WIDE
from playing import play
from small_models import CPU, core_of, graft_config, params, plain_model, random_tensors, trunk_config
from verified import free_rows

LENGTH = 160
SETTLING = Settling(window=20, keep=1 / 4, growth=1 / 4, chunk=16, apart=8)


def config_of(*, grafted: bool) -> ModelConfig:
    trunk = trunk_config(vocab_size=128, eos_token_ids=(1,), max_position_embeddings=LENGTH, **WIDE)
    return ModelConfig(trunk=trunk, graft=graft_config() if grafted else None)


def steps_of(form: str, *, grafted: bool = True) -> EagerSteps:
    config = config_of(grafted=grafted)
    execution = Execution(kernels=load_kernels()) if form == "kernels" else Execution(static_shapes=False)
    if form == "kernels" and execution.kernels is None:
        pytest.skip("built without a compiler, or for another processor")
    tensors = random_tensors(config, 5)
    return assemble(config, tensors, dtype=torch.float32, device=CPU, max_positions=LENGTH, execution=execution)


def requests(number: int = 8, **fields: Any) -> list[SubmitRequest]:
    draw, found = random.Random(7), []
    for i in range(number):
        prompt = [draw.randrange(2, 128) for _ in range(draw.choice([1, 5, 30]))]
        hot = {"temperature": 0.9, "seed": i} if i % 2 else {}
        asked = params(max_tokens=100 + i, ignore_eos=True, confidence=0.0, **hot, **fields)
        found.append(SubmitRequest(str(i), prompt, asked, 0.0))
    return found


def answers(core: EngineCore, asked: list[SubmitRequest], seen: Counter[str], at_once: int = 4) -> dict[str, Answer]:
    played = play(core, asked, at_once=at_once)
    seen.update(played.seen)
    for outputs in played.outputs.values():
        seen["dropped"] += outputs[-1].dropped_slots
        seen["drafted"] += sum(output.drafts is not None for output in outputs)
    return {name: answer(outputs) for name, outputs in played.outputs.items()}


class Masked:
    """A whole text in one plain pass a chunk: what each token sees of those before it, and who stays, spelled out."""

    def __init__(self, model: HamburgerModel, prompt: list[int], text: list[int], settling: Settling) -> None:
        self._model, self._start, self._ids = model, len(prompt), torch.tensor([*prompt, *text])
        self.dropped_at = torch.full((len(self._ids),), len(self._ids))
        self.kept: list[int] = []
        for place, settled in settling.places(len(text)):
            self._pass()
            first = self._start + settled
            scores = torch.zeros(settling.chunk)
            for query in range(self._start, self._start + place):
                for i in range(settling.chunk):
                    if query - (first + i) >= NEAREST:
                        scores[i] += self._paid[query, first + i]
            order = scores.argsort(stable=True)
            number = settling.chunk - settling.kept
            self.dropped_at[first + order[:number]] = self._start + place
            self.kept += sorted((settled + order[number:]).tolist())
        self.logprobs = self._pass().log_softmax(-1)

    @torch.inference_mode()
    def _pass(self) -> Tensor:
        """Logits [T, V]; leaves what each token paid to each."""
        model, places = self._model, torch.arange(len(self._ids))
        seen = (places <= places[:, None]) & (self.dropped_at > places[:, None])
        counted = middle_layers(len(model.trunk.layers))
        self._paid = torch.zeros(len(places), len(places))
        cos, sin = model.rotary(places)

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            each = q.shape[1] // k.shape[1]
            keys, values = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)
            scores = torch.einsum("qhd,khd->hqk", q, keys) * q.shape[-1] ** -0.5
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            if index in counted:
                self._paid += weights.sum(0)
            return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)

        def layer(index: int, x: Tensor) -> Tensor:
            out: Tensor = model.trunk.layers[index](x, cos, sin, partial(attend, index))
            return out

        x = model.embed_tokens(self._ids)
        states, _ = run_layers(len(model.trunk.layers), x, layer, (), lambda x: x, model.trunk.final)
        return states @ model.head_weight.T


@pytest.mark.parametrize("block_size", [4, 12, 32])
def test_logits_are_those_of_a_pass_with_a_mask(block_size: int) -> None:
    asked = requests(6, logprobs=3)
    core = core_of(
        steps_of("torch"),
        block_size=block_size,
        num_blocks=-(-1000 // block_size),
        max_model_len=LENGTH,
        policy=free_rows(3),
        settling=SETTLING,
    )
    ended: dict[str, Sequence] = {}
    remove = core._scheduler.remove

    def removed(name: str) -> None:
        ended[name] = core._scheduler._sequences[name]
        remove(name)

    core._scheduler.remove = removed  # type: ignore[method-assign, assignment]
    found = answers(core, asked, seen := Counter[str]())
    model = plain_model(config_of(grafted=True), 5)
    for request in asked:
        mine = found[request.request_id]
        masked = Masked(model, request.prompt_ids, mine.token_ids, SETTLING)
        assert ended[request.request_id].kept == masked.kept
        for i, (token_id, entry) in enumerate(zip(mine.token_ids, mine.logprobs, strict=True)):
            row = masked.logprobs[len(request.prompt_ids) + i - 1]
            assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
            assert [p for _, p in entry.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
    assert seen["dropped"] == sum(SETTLING.settled_slots(len(one.token_ids)) for one in found.values())
    assert seen["drafted"] > 50


@pytest.mark.parametrize("form", ["kernels", "torch"])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_neither_batch_nor_drafts_nor_preemption_change_the_answer(form: str, logprobs: int | None) -> None:
    steps, asked, seen = steps_of(form), requests(logprobs=logprobs), Counter[str]()

    def core(**settings: Any) -> EngineCore:
        limits = {"num_blocks": 300, "max_model_len": LENGTH, **settings}
        return core_of(steps, policy=free_rows(3), settling=SETTLING, **limits)

    truth = answers(core(max_num_seqs=1), asking(asked, confidence=1.0), seen)
    assert not seen["drafted"]
    tight: dict[str, Any] = {"num_blocks": 44, "max_num_seqs": 6, "max_num_batched_slots": 24, "prefix_cache": True}
    for settings in ({}, tight):
        for name, mine in answers(core(**settings), asked, seen).items():
            other = truth[name]
            assert (mine.token_ids, mine.end) == (other.token_ids, other.end)
            if form == "kernels":
                assert mine == other
            else:
                assert numbers(mine) == pytest.approx(numbers(other), abs=1e-4)
    assert seen["preemptions"] > 3
    assert seen["drafted"] > 100
    whole = answers(core_of(steps, num_blocks=300, max_model_len=LENGTH, policy=free_rows(3)), asked, Counter())
    assert any(whole[name].token_ids != truth[name].token_ids for name in truth)  # it is another text


@pytest.mark.parametrize("form", ["kernels", "torch"])
def test_a_window_beyond_the_answer_is_the_whole_model(form: str) -> None:
    steps, asked = steps_of(form, grafted=False), requests(4, logprobs=1)
    wide = Settling(window=200, keep=1 / 4, chunk=16, apart=8)
    found = [
        answers(
            core_of(steps, num_blocks=300, max_model_len=LENGTH, policy=free_rows(0), settling=settling),
            asked,
            Counter(),
        )
        for settling in (wide, None)
    ]
    assert found[0] == found[1]


def test_kernels_tell_what_plain_attention_pays() -> None:
    """The same model on both paths; float32 weights of 8 bits differ, so attention does a little."""
    found = []
    for form in ("kernels", "torch"):
        steps = steps_of(form, grafted=False)
        core = core_of(steps, num_blocks=300, max_model_len=LENGTH, policy=free_rows(0), settling=SETTLING)
        core.add(SubmitRequest("a", list(range(2, 40)), params(max_tokens=60, ignore_eos=True, logit_bias=FORCED), 0.0))
        while core.has_work:
            core.step()
        scores = core._runner._cache.scores  # type: ignore[attr-defined]
        found.append(scores.values[: 100 + 4].copy())
    assert found[1].max() > 1
    assert np.corrcoef(found)[0, 1] > 0.99


FORCED = {7: 100.0}  # the same text on both paths
