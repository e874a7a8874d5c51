"""Scores are those of the ordinary causal language model: transformers on the same weights."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from hamburger.engine.types.messages import SubmitRequest
from hamburger.model.config import ModelConfig
from hamburger.model.cpu.library import load_kernels
from hamburger.model.cpu.onednn import packed_linear
from hamburger.model.modules.linear import plain_linear
from hamburger.training.errors import TrainingError
from hamburger.training.forward.network import Slots, trunk_states
from hamburger.training.forward.readers import KernelReader
from hamburger.training.forward.scoring import Scorer
from native_models import WIDE, models
from peer import hugging_face
from small_models import core_of, graft_config, params, plain_model, random_tensors, trunk_config

TEXTS = [[3, 4, 5, 6, 7, 8], [9, 10], [11], list(range(2, 80)), [12, 13, 14]]
STARTS = [2, 1, 1, 1, 3]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("grafted", [False, True], ids=["base", "hamburger"])
def test_scores_are_those_of_transformers(packed: bool, grafted: bool) -> None:
    config = ModelConfig(trunk=trunk_config(), graft=graft_config() if grafted else None)
    linear = packed_linear if packed else plain_linear
    scorer = Scorer(plain_model(config, linear=linear), 512)
    plain = ModelConfig(trunk=trunk_config())
    tensors = random_tensors(config)
    peer = hugging_face(plain, {n: t for n, t in tensors.items() if n.startswith("model.")})
    scores = scorer.score(TEXTS, STARTS, top_k=3)
    assert [len(s.logprobs) for s in scores] == [4, 1, 0, 77, 0]
    for ids, start, score in zip(TEXTS, STARTS, scores, strict=True):
        with torch.inference_mode():
            logprobs = peer(torch.tensor([ids])).logits[0].log_softmax(-1)[start - 1 : len(ids) - 1]
        chosen = logprobs.gather(1, torch.tensor(ids[start:], dtype=torch.int64)[:, None])[:, 0]
        torch.testing.assert_close(score.logprobs, chosen, atol=1e-3, rtol=0)
        torch.testing.assert_close(score.entropies, -(logprobs.exp() * logprobs).sum(-1), atol=1e-3, rtol=0)
        assert torch.equal(score.top_ids.long(), logprobs.topk(3).indices)
        torch.testing.assert_close(score.top_logprobs, logprobs.topk(3).values.half(), atol=2e-3, rtol=2e-3)


def test_states_are_those_that_give_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model = plain_model(ModelConfig(trunk=trunk_config()))
    scores = Scorer(model, 512).score(TEXTS, STARTS, state_layers=(1, 3))
    assert [tuple(s.states.shape) for s in scores] == [(4, 2, 32), (1, 2, 32), (0, 2, 32), (77, 2, 32), (0, 2, 32)]
    ids = torch.tensor(TEXTS[0][:-1])[:, None]
    slots = Slots(ids, torch.ones(5, dtype=torch.int64), torch.arange(5), [5])
    with torch.inference_mode():
        _, states = trunk_states(model, slots, (1, 3))
    torch.testing.assert_close(scores[0].states, states[1:].bfloat16())


def test_packs_of_any_size_give_the_same_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = Scorer(plain_model(ModelConfig(trunk=trunk_config())), 512)
    whole = scorer.score(TEXTS, STARTS)
    monkeypatch.setattr("hamburger.training.forward.scoring._SLOTS_A_PASS", 5)
    monkeypatch.setattr("hamburger.training.forward.scoring._ROWS_A_HEAD", 2)
    for a, b in zip(scorer.score(TEXTS, STARTS), whole, strict=True):
        torch.testing.assert_close(a.logprobs, b.logprobs)


def test_what_cannot_be_scored_is_named() -> None:
    scorer = Scorer(plain_model(ModelConfig(trunk=trunk_config())), 8)
    with pytest.raises(TrainingError, match=r"sequence 1: start is 0; it must be in 1\.\.2"):
        scorer.score([[3, 4], [3, 4]], [1, 0])
    with pytest.raises(TrainingError, match="sequence 0 has 9 tokens, more than the model's 8"):
        scorer.score([list(range(2, 11))], [1])


@pytest.mark.skipif(load_kernels() is None, reason="the kernels were not built, or cannot run here")
@pytest.mark.parametrize("sliding", [None, 5])
def test_the_kernels_score_as_the_engine_that_serves_does(sliding: int | None) -> None:
    layers = {} if sliding is None else {"sliding_window": sliding, "sliding_layers": (1,)}
    config = ModelConfig(trunk=trunk_config(**WIDE, **layers))
    kernels = load_kernels()
    assert kernels is not None
    reader = KernelReader(plain_model(config, seed=3), kernels, torch.float32)
    scores = Scorer(plain_model(config, seed=3), 512, reader).score(TEXTS, STARTS, top_k=3, state_layers=(1, 3))
    plain = Scorer(plain_model(config, seed=3), 512).score(TEXTS, STARTS, top_k=3, state_layers=(1, 3))
    core = core_of(models(config)[1], max_num_batched_slots=80)
    for ids, start, score, of_plain in zip(TEXTS, STARTS, scores, plain, strict=True):
        core.add(SubmitRequest("text", ids, params(prompt_logprobs=3, max_tokens=1), 0.0))
        [output] = core.step().outputs
        assert output.prompt_logprobs is not None
        served = [entry for entry in output.prompt_logprobs[start:] if entry is not None]
        assert score.logprobs.tolist() == pytest.approx([entry.logprob for entry in served], abs=1e-5)
        assert score.top_ids.tolist() == [[token_id for token_id, _ in entry.top] for entry in served]
        assert score.states.shape == of_plain.states.shape
        off, of = (score.states - of_plain.states).float().norm(), of_plain.states.float().norm()
        assert off <= 0.05 * of
        assert (score.entropies - of_plain.entropies).abs().sum() <= 0.1 * len(served)


@pytest.mark.skipif(load_kernels() is None, reason="the kernels were not built, or cannot run here")
def test_who_wants_float32_digits_or_none_of_the_kernels_gets_the_plain_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []
    monkeypatch.setattr("hamburger.training.forward.scoring.load_model", lambda source, **options: made.append(options))
    asked: list[tuple[Literal["none", "auto"], str]] = [("auto", "float32"), ("none", "auto"), ("auto", "bfloat16")]
    for quantization, dtype in asked:
        with pytest.raises(AttributeError):  # no model was loaded
            Scorer.load("builtin", device="cpu", dtype=dtype, quantization=quantization)
    assert [options["packed"] for options in made] == [True, True, False]
