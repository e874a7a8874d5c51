"""The trunk against transformers, on small random Llama configurations in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hamburger.model.assemble import assemble
from hamburger.model.config import Llama3RopeScaling, ModelConfig
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.layers import inverse_frequencies
from peer import greedy, hugging_face
from small_models import CPU, core_of, one_sequence, params, random_tensors, run_core, tokens_of, trunk_config

LLAMA3 = Llama3RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one_kv_head": {"num_kv_heads": 1},
    "as_many_kv_heads": {"num_kv_heads": 4},
    "untied": {"tie_word_embeddings": False},
    "llama3_rope": {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "wide_heads": {"head_dim": 16},
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_transformers(shape: str, packed: bool) -> None:
    config = ModelConfig(trunk=trunk_config(**SHAPES[shape]))
    tensors = random_tensors(config, seed=3)
    model = assemble(config, tensors, dtype=torch.float32, device=CPU, max_positions=512, packed=packed)
    ids = torch.randint(2, 96, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    batch = one_sequence([[i] for i in ids], list(range(200)), emit=list(range(200)))
    cache = PagedKVCache(config.trunk, 1, 200, torch.float32, CPU)
    with torch.inference_mode():
        ours = model.head(model.trunk(model._embed(batch), batch, cache, model.rotary, ())[0])
        theirs = hugging_face(config, tensors)(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_chunked_paged_greedy_text_equals_transformers(shape: str) -> None:
    """The same weights through scheduler, chunked prefill and paged cache: batched, token for token."""
    config = ModelConfig(trunk=trunk_config(**SHAPES[shape]))
    tensors = random_tensors(config, seed=4)
    model = assemble(config, tensors, dtype=torch.float32, device=CPU, max_positions=512)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(2, 96, (5 + 3 * i,), generator=generator).tolist() for i in range(6)]
    sampling = params(max_tokens=24, ignore_eos=True)
    outputs = run_core(core_of(model), {str(i): (prompt, sampling) for i, prompt in enumerate(prompts)})
    peer = hugging_face(config, tensors)
    for i, prompt in enumerate(prompts):
        assert tokens_of(outputs[str(i)]) == greedy(peer, prompt, 24)


def test_llama3_frequencies_equal_transformers() -> None:
    config = trunk_config(rope_scaling=LLAMA3, head_dim=64, rope_theta=500000.0)
    peer = hugging_face(ModelConfig(trunk=config), random_tensors(ModelConfig(trunk=config)))
    torch.testing.assert_close(inverse_frequencies(config), peer.model.rotary_emb.inv_freq, atol=0, rtol=1e-6)
