"""Peers of compare.py: what is timed of transformers, with a tiny model of random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from peers.hf_generate import Generate
from peers.wire import Ask


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=128, eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_each_answer_of_a_batch_is_timed_token_by_token(model: Any) -> None:
    long, short = Generate(model).answer([Ask([1, 2, 3], 7), Ask([4, 5], 3)], 2)
    assert [tokens for _, tokens in long.arrivals] == [1] * 7
    assert [tokens for _, tokens in short.arrivals] == [1] * 3
    assert short.ended < long.ended


def test_what_prompt_lookup_gives_at_once_arrives_at_once(model: Any) -> None:
    # A model of random weights soon goes round in a circle, which is looked up.
    [timing] = Generate(model, prompt_lookup_num_tokens=4).answer([Ask([1, 2, 3], 60)], 1)
    assert timing.tokens == 60
    assert max(tokens for _, tokens in timing.arrivals) > 1
    assert timing.ended == timing.arrivals[-1][0]
