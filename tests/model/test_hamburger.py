"""One macro-step and whole answers of grafted models: every graft shape, batch invariance, the dial, group limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hamburger.engine.types.messages import SubmitRequest
from hamburger.model.assemble import assemble, parts_of
from hamburger.model.backend import TorchBackend
from hamburger.model.config import ModelConfig
from hamburger.model.cpu.onednn import PackedLinear, can_pack, compiled_rows
from hamburger.model.modules.embedder import CompositionalEmbedder
from slow_cases import slow_but
from small_models import (
    CPU,
    core_of,
    graft_config,
    grafted,
    params,
    random_model,
    random_tensors,
    run_core,
    tokens_of,
    trunk_config,
)

SHAPES: dict[str, dict[str, Any]] = {
    "positions": {},
    "positions_normed": {"micro_norm": True, "micro_layers": 3},
    "fused": {"features": "fused", "micro_norm": True},
    "fused_one_layer": {"features": "fused", "micro_layers": 1, "feature_layers": (3,)},
    "short_list": {"features": "fused", "short_list_size": 40},
    "wide_groups": {"max_group": 6, "feature_layers": (0, 2)},
    "merge_adapter": {"adapter_rank": 32, "features": "fused", "max_group": 3},
}


def config_of(shape: str) -> ModelConfig:
    return grafted(**SHAPES[shape])


def prompts(n: int, seed: int = 5) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 96, (3 + 7 * i % 40,), generator=generator).tolist() for i in range(n)]


@pytest.mark.parametrize("shape", slow_but(["positions", "short_list", "merge_adapter"], SHAPES))
def test_a_request_alone_and_among_31_others_gives_the_same_groups(shape: str) -> None:
    model = random_model(config_of(shape), seed=1)
    sampling = [params(confidence=0.2 * (i % 6), max_tokens=20) for i in range(32)]
    requests = {str(i): (prompt, sampling[i]) for i, prompt in enumerate(prompts(32))}
    together = run_core(core_of(model), requests)
    for i in range(0, 32, 5):
        alone = run_core(core_of(model), {str(i): requests[str(i)]})[str(i)]
        assert [output.token_ids for output in alone] == [output.token_ids for output in together[str(i)]]


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_weights_give_the_groups_of_plain_weights(shape: str) -> None:
    requests = {str(i): (prompt, params(confidence=0.0)) for i, prompt in enumerate(prompts(6))}
    plain, packed = (run_core(core_of(random_model(config_of(shape), 2, packed=p)), requests) for p in (False, True))
    for i in requests:
        assert [output.token_ids for output in plain[i]] == [output.token_ids for output in packed[i]]
        for a, b in zip(plain[i], packed[i], strict=True):
            assert a.stop_probs == pytest.approx(b.stop_probs, abs=1e-4)


@pytest.mark.parametrize("shape", slow_but(list(SHAPES)[:3], SHAPES))
def test_preempted_answers_are_replayed_to_the_same_groups(shape: str) -> None:
    model = random_model(config_of(shape), seed=3)
    requests = {
        str(i): (prompt, params(confidence=0.8, max_tokens=50, ignore_eos=True, temperature=0.7 * (i % 2), seed=i))
        for i, prompt in enumerate(prompts(8))
    }
    roomy = run_core(core_of(model, num_blocks=256), requests)
    core = core_of(model, num_blocks=25, max_model_len=100)
    tight: dict[str, list[list[int]]] = {i: [] for i in requests}
    preemptions = 0
    for i, (prompt, sampling) in requests.items():
        core.add(SubmitRequest(i, prompt, sampling, 0.0))
    while core.has_work:
        step = core.step()
        core.check_integrity()
        preemptions += step.stats.num_preemptions if step.stats else 0
        for output in step.outputs:
            tight[output.request_id].append(output.token_ids)
    assert preemptions > 0
    assert tight == {i: [output.token_ids for output in outputs] for i, outputs in roomy.items()}


def test_confidence_is_a_dial_from_full_groups_to_single_tokens() -> None:
    model = random_model(config_of("positions"), seed=6)
    sizes = {}
    for confidence in (0.0, 0.5, 1.0):
        requests = {
            str(i): (prompt, params(confidence=confidence, ignore_eos=True, max_tokens=24))
            for i, prompt in enumerate(prompts(6))
        }
        groups = [output for outputs in run_core(core_of(model), requests).values() for output in outputs]
        sizes[confidence] = [len(output.token_ids) for output in groups]
    assert set(sizes[0.0]) == {4}
    assert set(sizes[1.0]) == {1}
    assert 1 < sum(sizes[0.5]) / len(sizes[0.5]) < 4


def test_a_group_goes_on_exactly_while_the_stop_probability_allows() -> None:
    model = random_model(config_of("fused"), seed=7)
    confidence = 0.55
    requests = {
        str(i): (prompt, params(confidence=confidence, ignore_eos=True, max_tokens=30))
        for i, prompt in enumerate(prompts(8))
    }
    for outputs in run_core(core_of(model), requests).values():
        for output in outputs[:-1]:
            *inner, last = output.stop_probs
            assert all(1 - p >= confidence for p in inner)
            assert len(output.token_ids) == 4 or 1 - last < confidence


def test_the_dial_is_calibrated_token_by_token() -> None:
    scale, bias = (0.5, 2.0, 1.5, 1.0), (0.3, -0.4, 0.0, 0.7)
    prompt_ids = prompts(1)[0]
    whole = params(confidence=0.0, ignore_eos=True, max_tokens=4)  # at 0 every group is full, whatever the dial says
    logits = []
    for graft in (graft_config(), graft_config(stop_scale=scale, stop_bias=bias)):
        model = random_model(ModelConfig(trunk=trunk_config(), graft=graft), seed=7)
        [output] = run_core(core_of(model), {"r": (prompt_ids, whole)})["r"]
        logits.append(torch.tensor(output.stop_probs).logit())
    raw, calibrated = logits
    torch.testing.assert_close(calibrated, raw * torch.tensor(scale) + torch.tensor(bias), atol=1e-4, rtol=0)


@pytest.mark.parametrize("ends_after", [0, 1, 2])
def test_the_calibrated_dial_decides_where_a_group_ends(ends_after: int) -> None:
    bias = tuple(50.0 if index == ends_after else -50.0 for index in range(4))
    model = random_model(ModelConfig(trunk=trunk_config(), graft=graft_config(stop_bias=bias)), seed=7)
    sampling = params(confidence=0.5, ignore_eos=True, max_tokens=12)
    outputs = run_core(core_of(model), {"r": (prompts(1)[0], sampling)})["r"]
    assert {len(output.token_ids) for output in outputs} == {ends_after + 1}


def test_groups_never_run_past_max_tokens_or_an_end_token() -> None:
    model = random_model(config_of("positions"), seed=8)
    for max_tokens in (1, 2, 3, 5, 8):
        requests = {
            str(i): (prompt, params(confidence=0.0, max_tokens=max_tokens)) for i, prompt in enumerate(prompts(12))
        }
        for outputs in run_core(core_of(model), requests).values():
            tokens = tokens_of(outputs)
            assert len(tokens) <= max_tokens
            if outputs[-1].finish_reason == "length":
                assert len(tokens) == max_tokens
            assert 1 not in tokens[:-1]


def test_a_sampled_token_off_the_argmax_ends_its_group() -> None:
    """Its stop value was read before the token was chosen (docs/architecture.md), so it is not trusted."""
    model = random_model(config_of("positions"), seed=9)
    cold = params(confidence=0.0, ignore_eos=True, max_tokens=40, logprobs=1)
    hot = params(confidence=0.0, ignore_eos=True, max_tokens=40, temperature=1.5, seed=11, logprobs=1)
    requests = {f"{name}{i}": (p, how) for name, how in (("c", cold), ("h", hot)) for i, p in enumerate(prompts(4))}
    shorter = 0
    for request_id, outputs in run_core(core_of(model), requests).items():
        for output in outputs[:-1]:
            assert output.logprobs is not None
            likeliest = [entry.top[0][0] for entry in output.logprobs]
            moved = [a != b for a, b in zip(output.token_ids, likeliest, strict=True)]
            assert not any(moved[:-1])
            assert len(output.token_ids) == 4 or moved[-1]
            shorter += request_id.startswith("h") and len(output.token_ids) < 4
    assert shorter > 10


def test_a_context_shorter_than_a_groups_own_positions_is_served() -> None:
    config = config_of("positions")
    tensors = random_tensors(config)
    model = assemble(config, tensors, dtype=torch.float32, device=CPU, max_positions=4)
    requests = {"r": ([5, 6], params(confidence=0.0, ignore_eos=True, max_tokens=2))}
    assert len(tokens_of(run_core(core_of(model, max_model_len=4), requests)["r"])) == 2


def test_a_parameter_without_a_tensor_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("positions")
    parts = {name: found for name, found in parts_of(config).items() if name != "trunk.norm.weight"}
    monkeypatch.setattr("hamburger.model.assemble.parts_of", lambda config: parts)
    with pytest.raises(RuntimeError, match=r"no tensors for trunk\.norm\.weight"):
        random_model(config)


def test_an_untied_head_is_packed_once() -> None:
    model = random_model(ModelConfig(trunk=trunk_config(tie_word_embeddings=False)), packed=True)
    backend = model.backend
    assert isinstance(backend, TorchBackend)
    assert backend.heads.first is backend.heads.micro
    assert not hasattr(backend.model, "lm_head")  # nor is it kept in another form


def test_off_the_short_list_no_micro_step_goes() -> None:
    model = random_model(config_of("short_list"), seed=10)
    assert model.short_list is not None
    allowed = set(model.short_list.tolist())
    requests = {str(i): (p, params(confidence=0.0, ignore_eos=True, max_tokens=32)) for i, p in enumerate(prompts(6))}
    outputs = [output for stream in run_core(core_of(model), requests).values() for output in stream]
    assert all(token_id in allowed for output in outputs for token_id in output.token_ids[1:])
    assert any(output.token_ids[0] not in allowed for output in outputs)


def test_a_bias_towards_a_token_off_the_short_list_is_not_lost() -> None:
    model = random_model(config_of("short_list"), seed=10)
    assert model.short_list is not None
    off = next(token_id for token_id in range(2, 96) if token_id not in model.short_list.tolist())
    on = int(model.short_list[5])
    for token_id in (off, on):
        sampling = params(confidence=0.0, ignore_eos=True, max_tokens=16, logit_bias={token_id: 100.0})
        outputs = run_core(core_of(model), {"r": (prompts(1)[0], sampling)})["r"]
        assert set(tokens_of(outputs)) == {token_id}


def test_merging_a_batch_equals_merging_each_group() -> None:
    torch.manual_seed(0)
    embedder = CompositionalEmbedder(hidden_size=16, max_group=4, heads=8)
    nn.init.normal_(embedder.pos)
    embeddings, sizes = torch.randn(9, 4, 16), torch.tensor([1, 2, 3, 4, 1, 4, 2, 2, 3])
    with torch.no_grad():
        together = embedder(embeddings, sizes, (sizes > 1).nonzero().squeeze(-1))
        for row, size in enumerate(sizes.tolist()):
            rows = torch.arange(int(size > 1))
            alone = embedder(embeddings[row : row + 1, :size], sizes[row : row + 1], rows)
            torch.testing.assert_close(together[row], alone[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(together[0], embeddings[0, 0], atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 16, 65, 100, 257])
def test_packed_linear_equals_linear(dtype: torch.dtype, rows: int) -> None:
    if not can_pack(dtype, CPU):
        pytest.skip("this build of torch has no blocked weights")
    torch.manual_seed(1)
    linear = nn.Linear(72, 40).to(dtype)
    x = torch.randn(rows, 72).to(dtype)
    with torch.inference_mode():
        packed = PackedLinear.of(linear.weight, linear.bias)(x)
        exact = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
        error = (packed.double() - exact).norm() / exact.norm()
        several = PackedLinear.of(linear.weight, linear.bias)(x.expand(3, -1, -1))
    assert packed.shape == (rows, 40)
    assert error < {torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]
    for part in several:
        torch.testing.assert_close(part, packed, atol=0.05, rtol=0.01)


def test_kernels_are_compiled_for_few_numbers_of_rows() -> None:
    sizes = {rows: compiled_rows(rows) for rows in range(1025)}
    assert all(rows <= size <= max(rows, 1.25 * rows) for rows, size in sizes.items())
    assert all(sizes[rows] == rows for rows in range(65))
    assert len({size for rows, size in sizes.items() if 64 < rows <= 512}) == 20
