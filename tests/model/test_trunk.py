"""The trunk against transformers, on small random configurations of every architecture in float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hamburger.model.assemble import assemble
from hamburger.model.batch import Reads
from hamburger.model.config import ModelConfig
from hamburger.model.execution import Execution
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.modules.rotary import RotaryEmbedding, inverse_frequencies
from peer import greedy, hugging_face
from slow_cases import slow_but
from small_models import CPU, core_of, one_sequence, params, random_tensors, run_core, tokens_of, trunk_config
from trunk_shapes import MIXTURES, SHAPES

ALL = {**SHAPES, **MIXTURES}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", ALL)
def test_logits_equal_transformers(shape: str, packed: bool) -> None:
    config = ModelConfig(trunk=trunk_config(**ALL[shape]))
    tensors = random_tensors(config, seed=3)
    model = assemble(
        config, tensors, dtype=torch.float32, device=CPU, max_positions=512, execution=Execution(packed=packed)
    )
    ids = torch.randint(2, 96, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    batch = one_sequence([[i] for i in ids], list(range(200)), emit=list(range(200)))
    batch = replace(batch, text_lengths=torch.full((200,), 200))
    cache = PagedKVCache(config.trunk, 1, 200, torch.float32, CPU)
    with torch.inference_mode():
        ours = model.backend.head(model.backend.trunk(batch, cache, Reads(batch.emit, 0))[0])
        theirs = hugging_face(config, tensors)(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", slow_but(list(ALL)[::3], ALL))
def test_chunked_paged_greedy_text_equals_transformers(shape: str) -> None:
    """The same weights through scheduler, chunked prefill and paged cache: batched, token for token."""
    config = ModelConfig(trunk=trunk_config(**ALL[shape]))
    tensors = random_tensors(config, seed=4)
    model = assemble(config, tensors, dtype=torch.float32, device=CPU, max_positions=512)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(2, 96, (length,), generator=generator).tolist() for length in (5, 8, 20, 50, 63, 130)]
    sampling = params(max_tokens=24, ignore_eos=True)
    outputs = run_core(core_of(model), {str(i): (prompt, sampling) for i, prompt in enumerate(prompts)})
    peer = hugging_face(config, tensors)
    for i, prompt in enumerate(prompts):
        assert tokens_of(outputs[str(i)]) == greedy(peer, prompt, 24)


@pytest.mark.parametrize("shape", [name for name in SHAPES if "rope" in name or "yarn" in name])
def test_frequencies_equal_transformers(shape: str) -> None:
    config = trunk_config(**{**SHAPES[shape], "head_dim": 64})
    peer = hugging_face(ModelConfig(trunk=config), random_tensors(ModelConfig(trunk=config))).model.rotary_emb
    torch.testing.assert_close(inverse_frequencies(config), peer.inv_freq, atol=0, rtol=1e-5)
    cos, sin = RotaryEmbedding(config, 50, CPU, torch.float32)(torch.arange(50))
    x = torch.zeros(1)
    theirs = peer(x, torch.arange(50)[None])
    torch.testing.assert_close(cos[:, 0], theirs[0][0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(sin[:, 0, 32:], theirs[1][0, :, 32:], atol=1e-5, rtol=1e-4)
