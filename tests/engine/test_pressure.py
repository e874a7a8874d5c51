"""A KV pool for two sequences, and fifty that arrive: all finish, with the texts of a large pool (float32)."""

from __future__ import annotations

import random

import pytest

from hamburger.engine.types.messages import SubmitRequest
from hamburger.model.config import ModelConfig
from playing import play
from slow_cases import slow_but
from small_models import core_of, graft_config, params, random_model, trunk_config

CONTEXT = 96
CONFIDENCES = (0.0, 0.3, 0.5, 0.8, 1.0)


def requests(confidence: float | None) -> list[SubmitRequest]:
    """Fifty: greedy and sampled, long and short, alike and different; at one confidence, or None: all mixed."""
    draw = random.Random(7)
    beginnings = [[draw.randrange(2, 96) for _ in range(20)] for _ in range(3)]
    asked = []
    for i in range(50):
        prompt = draw.choice(beginnings)[: draw.randint(1, 20)]
        prompt += [draw.randrange(2, 96) for _ in range(draw.randint(1, 12))]
        sampling = params(
            confidence=draw.choice(CONFIDENCES) if confidence is None else confidence,
            temperature=draw.choice([0.0, 0.8]),
            top_p=draw.choice([1.0, 0.9]),
            repetition_penalty=draw.choice([1.0, 1.0, 1.1]),
            seed=i,
            max_tokens=draw.randint(1, CONTEXT - len(prompt)),
            ignore_eos=draw.random() < 0.7,
        )
        asked.append(SubmitRequest(str(i), prompt, sampling, 0.0, priority=draw.choice([0, 0, 1])))
    return asked


@pytest.mark.parametrize(
    ("confidence", "prefix_cache"),
    slow_but([(0.3, True)], [*((c, True) for c in CONFIDENCES), (None, False)]),
)
def test_fifty_finish_in_a_pool_for_two_with_the_texts_of_a_large_one(
    confidence: float | None, prefix_cache: bool
) -> None:
    model = random_model(ModelConfig(trunk=trunk_config(), graft=graft_config()), seed=5)
    asked = requests(confidence)
    large = play(core_of(model, num_blocks=2000, max_num_seqs=50), asked)
    small = core_of(
        model, num_blocks=2 * CONTEXT // 4, max_num_seqs=16, max_model_len=CONTEXT, prefix_cache=prefix_cache
    )
    tight = play(small, asked)
    assert large.ended == tight.ended == {request.request_id for request in asked}
    assert large.seen["preemptions"] == 0
    assert tight.seen["preemptions"] >= 3  # each puts a sequence back that has emitted groups
    assert tight.groups == large.groups
