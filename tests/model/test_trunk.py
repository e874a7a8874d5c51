"""The trunk against transformers, on small random Llama configurations in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hamburger.model.assemble import assemble
from hamburger.model.config import Llama3RopeScaling, ModelConfig
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.layers import inverse_frequencies
from small_models import CPU, core_of, one_sequence, params, random_tensors, run_core, tokens_of, trunk_config
from transformers import LlamaConfig, LlamaForCausalLM

LLAMA3 = Llama3RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one_kv_head": {"num_kv_heads": 1},
    "as_many_kv_heads": {"num_kv_heads": 4},
    "untied": {"tie_word_embeddings": False},
    "llama3_rope": {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "wide_heads": {"head_dim": 16},
}


def hugging_face(config: ModelConfig, tensors: dict[str, torch.Tensor]) -> LlamaForCausalLM:
    t = config.trunk
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": t.rope_theta}
    if t.rope_scaling is not None:
        s = t.rope_scaling
        rope |= {"rope_type": "llama3", "factor": s.factor, "low_freq_factor": s.low_freq_factor}
        rope |= {"high_freq_factor": s.high_freq_factor}
        rope |= {"original_max_position_embeddings": s.original_max_position_embeddings}
    peer = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=t.vocab_size,
            hidden_size=t.hidden_size,
            intermediate_size=t.intermediate_size,
            num_hidden_layers=t.num_layers,
            num_attention_heads=t.num_heads,
            num_key_value_heads=t.num_kv_heads,
            head_dim=t.head_dim,
            rms_norm_eps=t.rms_norm_eps,
            rope_parameters=rope,
            tie_word_embeddings=t.tie_word_embeddings,
            max_position_embeddings=t.max_position_embeddings,
        )
    ).eval()
    if t.tie_word_embeddings:
        tensors = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    peer.load_state_dict(tensors, strict=True)
    return peer


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
    """The same weights through scheduler, chunked prefill and paged cache: 20 prompts, batched, token for token."""
    config = ModelConfig(trunk=trunk_config(**SHAPES[shape]))
    tensors = random_tensors(config, seed=4)
    model = assemble(config, tensors, dtype=torch.float32, device=CPU, max_positions=512)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(2, 96, (5 + 3 * i,), generator=generator).tolist() for i in range(20)]
    sampling = params(max_tokens=24, ignore_eos=True)
    outputs = run_core(core_of(model), {str(i): (prompt, sampling) for i, prompt in enumerate(prompts)})
    peer = hugging_face(config, tensors)
    for i, prompt in enumerate(prompts):
        expected = peer.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert tokens_of(outputs[str(i)]) == expected[0, len(prompt) :].tolist()


def test_llama3_frequencies_equal_transformers() -> None:
    config = trunk_config(rope_scaling=LLAMA3, head_dim=64, rope_theta=500000.0)
    peer = hugging_face(ModelConfig(trunk=config), random_tensors(ModelConfig(trunk=config)))
    torch.testing.assert_close(inverse_frequencies(config), peer.model.rotary_emb.inv_freq, atol=0, rtol=1e-6)
