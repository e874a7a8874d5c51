"""LoRA adapters: several at once, each request's answer that of the model with its adapter merged in by PEFT."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drafted import eager_drafts
from graph_cores import MODELS, graphs_core
from hamburger.engine.types.messages import GroupOutput, LoadLora
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.engine.types.settling import Settling
from hamburger.model.assemble import assemble
from hamburger.model.batch import LoraSlots, Reads
from hamburger.model.checkpoints.lora_folder import read_lora
from hamburger.model.checkpoints.sources import CheckpointError
from hamburger.model.config import ModelConfig
from hamburger.model.cpu.library import InstructionSet, Kernels, load_kernels
from hamburger.model.cpu.loras import CpuLoras
from hamburger.model.execution import Execution
from hamburger.model.graphs.capture import EagerCapture
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.modules.lora import LoraWeights
from hamburger.model.steps import EagerSteps
from hamburger.model.tensor_shapes import JOINED, tensor_shapes
from lora_folders import lora_folder, merged_peer, merged_tensors, peft_folder
from native_models import SETS, WIDE, models
from peer import hugging_face, is_greedy
from slow_cases import slow_but
from small_models import (
    CPU,
    core_loras,
    core_of,
    grafted,
    one_sequence,
    params,
    random_model,
    random_tensors,
    run_core,
    tokens_of,
    trunk_config,
)
from trunk_shapes import SHAPES

WIDE_BASE = ModelConfig(trunk=trunk_config(**WIDE))
# What PEFT is asked for: all linears; some of some layers, with scalings of their own.
ADAPTERS: list[dict[str, Any]] = [
    {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"},
    {
        "r": 8,
        "lora_alpha": 4,
        "use_rslora": True,
        "target_modules": ["q_proj", "v_proj", "up_proj"],
        "layers_to_transform": [0, 2, 3],
        "rank_pattern": {"v_proj": 3},
        "alpha_pattern": {"layers.2.self_attn.q_proj": 7},
    },
]


@pytest.mark.parametrize("groups", ["composed", "verified"])
@pytest.mark.parametrize("shape", slow_but(["grouped", "llama_with_biases", "qwen3"], SHAPES))
def test_answers_are_those_of_the_models_that_peft_merges(tmp_path: Path, shape: str, groups: str) -> None:
    """Two adapters and the base in the same steps, with prompts that begin alike, chunks, and drafts from lookup."""
    config = ModelConfig(trunk=trunk_config(**SHAPES[shape]))
    tensors = random_tensors(config, seed=4)
    folders = [peft_folder(tmp_path / str(i), config, tensors, i, **fields) for i, fields in enumerate(ADAPTERS)]
    steps = assemble(config, tensors, dtype=torch.float32, device=CPU, max_positions=512)
    policy = eager_drafts(steps) if groups == "verified" else None
    core = core_of(steps, prefix_cache=True, policy=policy, loras=folders)
    beginning = [5, 9, 13, 9, 5, 9, 13, 9, 5, 70]
    # No longer than the pretraining context, beyond which one pass over a whole text is not its steps (dynamic rope).
    prompts = [[*beginning, *[40 + i] * (1 + 15 * i)] for i in range(3)]
    sampling = params(max_tokens=20, ignore_eos=True, confidence=0.0, logprobs=0)
    requests = {f"{lora} {i}": (prompt, sampling) for i, prompt in enumerate(prompts) for lora in range(3)}
    outputs = run_core(core, requests, loras={name: int(name[0]) for name in requests})
    peers = [hugging_face(config, tensors), *(merged_peer(folder, config, tensors) for folder in folders)]
    for name, (prompt, _) in requests.items():
        peer, answer = peers[int(name[0])], tokens_of(outputs[name])
        assert is_greedy(peer, prompt, answer), name
        with torch.inference_mode():
            chances = peer(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        wanted = chances.gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()
        assert [p.logprob for o in outputs[name] for p in o.logprobs or ()] == pytest.approx(wanted, abs=1e-4)
    told = [[p.logprob for o in outputs[f"{lora} 2"] for p in o.logprobs or ()] for lora in range(3)]
    assert len({*map(tuple, told)}) == 3  # each adapter changes something
    core.check_integrity()


def test_composed_groups_are_those_of_the_hamburger_with_the_merged_trunk(tmp_path: Path) -> None:
    config = grafted(adapter_rank=32)
    folder, tensors = lora_folder(tmp_path, config, 1), random_tensors(config, 6)
    prompts = {str(i): ([3 + i, 7, 40 + i], params(confidence=0.0, max_tokens=20, logprobs=1)) for i in range(4)}
    whole = merged_tensors(folder, config, tensors)
    wanted = run_core(core_of(random_steps(config, whole)), prompts)
    for overlap in (False, True):
        core = core_of(random_steps(config, tensors), overlap=overlap, loras=[folder])
        found = run_core(
            core, prompts | {f"base {name}": of for name, of in prompts.items()}, loras=dict.fromkeys(prompts, 1)
        )
        for name in prompts:
            assert [o.token_ids for o in found[name]] == [o.token_ids for o in wanted[name]]
            assert [o.token_ids for o in found[f"base {name}"]] != [o.token_ids for o in wanted[name]]
    assert max(len(output.token_ids) for of in wanted.values() for output in of) > 1


def random_steps(config: ModelConfig, tensors: dict[str, Any], **execution: Any) -> EagerSteps:
    return assemble(
        config, tensors, dtype=torch.float32, device=CPU, max_positions=512, execution=Execution(**execution)
    )


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    if (found := load_kernels()) is None:
        pytest.skip("built without a compiler, or for another processor")
    return found


@pytest.mark.parametrize("shift", [-30, -20, 20, 30])
def test_the_kernels_read_adapters_of_any_size_of_numbers(kernels: Kernels, shift: int) -> None:
    """Scales are in half precision: what B has too large A has too small, and their product is the same."""
    generator = torch.Generator().manual_seed(1)
    down, up = torch.randn(4, 64, generator=generator), torch.randn(96, 4, generator=generator) / 8
    part = (0, "mlp.up_proj")
    loras = CpuLoras(kernels, WIDE_BASE.trunk)
    gate = (torch.zeros(4, 64), torch.zeros(96, 4))
    found = []
    for number, (a, b) in enumerate(((down, up), (down * 2.0**shift, up * 2.0**-shift)), start=1):
        loras.load(number, LoraWeights({part: (a, b), (0, "mlp.gate_proj"): gate}))
        found.append([weight.multiply(torch.eye(weight.inputs)) for weight in loras.adapters(number)._held[2] or ()])
    assert len(found[0]) == 2
    assert all(torch.equal(*both) for both in zip(*found, strict=True))
    product = (found[0][0] @ found[0][1])[:, 96:]
    torch.testing.assert_close(product, (up @ down).T, atol=0.02, rtol=0)
    with pytest.raises(CheckpointError, match="too large for the CPU kernels"):
        loras.load(3, LoraWeights({part: (down * 2.0**30, up * 2.0**30)}))
    loras.load(4, LoraWeights({part: (down * 1e30, torch.zeros_like(up)), (0, "mlp.gate_proj"): gate}))
    assert not any(weight.multiply(torch.eye(weight.inputs)).any() for weight in loras.adapters(4)._held[2] or ())


def seen(outputs: list[GroupOutput]) -> list[Any]:
    return [(o.token_ids, o.stop_probs, o.logprobs, o.prompt_logprobs) for o in outputs]


def asked(lora: int) -> SamplingParams:
    return params(max_tokens=30, confidence=1.0, logprobs=2, prompt_logprobs=1, temperature=0.5 * (lora % 2), seed=lora)


@pytest.mark.parametrize("composes", [False, True])
def test_on_the_kernels_no_other_request_changes_a_bit(tmp_path: Path, kernels: Kernels, composes: bool) -> None:
    """Nor do drafts, chunks, or the other adapters that are loaded."""
    config = grafted(trunk_config(**WIDE), adapter_rank=32) if composes else WIDE_BASE
    ranks = (3, 32, 40)
    folders = [lora_folder(tmp_path / str(rank), config, rank, rank) for rank in ranks]
    _, native = models(config, kernels=kernels)
    confidence = {"confidence": 0.0} if composes else {}
    prompts = {
        f"{lora} {i}": ([5 + i] * (3 + 9 * i), params(max_tokens=20, logprobs=2, seed=i, **confidence))
        for lora in range(4)
        for i in range(3)
    }
    numbers = {name: int(name[0]) for name in prompts}
    together = run_core(core_of(native, loras=folders), prompts, loras=numbers)
    assert len({str(seen(together[f"{lora} 2"])) for lora in range(4)}) == 4
    for name, prompt in prompts.items():
        _, other = models(config, kernels=kernels)
        only = folders[max(numbers[name], 1) - 1 :][:1]
        core = core_of(other, max_num_seqs=4, max_num_batched_slots=7, loras=only)
        alone = run_core(core, {name: prompt}, loras={name: min(numbers[name], 1)})
        assert seen(alone[name]) == seen(together[name])


def test_on_the_kernels_drafts_and_preemption_and_settled_slots_change_no_bit(tmp_path: Path, kernels: Kernels) -> None:
    folders = [lora_folder(tmp_path / str(i), WIDE_BASE, i, 4) for i in range(2)]
    _, native = models(WIDE_BASE, kernels=kernels)
    prompts = {f"{lora} {i}": ([5 + i, 9, 5 + i, 9], asked(lora)) for lora in range(3) for i in range(3)}
    fields = {"max_tokens": 30, "confidence": 0.0, "logprobs": 2, "prompt_logprobs": 1}
    drafting = {
        name: (prompt, params(**fields, temperature=p.temperature, seed=p.seed))
        for name, (prompt, p) in prompts.items()
    }
    numbers = {name: int(name[0]) for name in prompts}
    settling = Settling(window=32, keep=0.5, chunk=8)
    found = []
    for requests, blocks in ((prompts, 256), (drafting, 256), (drafting, 30)):
        _, native = models(WIDE_BASE, kernels=kernels)
        core = core_of(native, blocks, policy=eager_drafts(native), loras=folders, settling=settling, prefix_cache=True,
                       max_model_len=64)  # fmt: skip
        outputs = run_core(core, requests, loras=numbers)
        found.append(
            {
                name: ([t for o in of for t in o.token_ids], [p for o in of for p in o.logprobs or ()])
                for name, of in outputs.items()
            }
        )
    assert found[0] == found[1] == found[2]
    assert found[0]["0 1"] != found[0]["1 1"]


@pytest.mark.parametrize("rank", [5, 32, 40])
def test_the_kernels_states_are_near_those_of_merged_weights(tmp_path: Path, kernels: Kernels, rank: int) -> None:
    """As near as 8 bits are: a small part of what the adapter changes."""
    folder, tensors = lora_folder(tmp_path, WIDE_BASE, rank, rank), random_tensors(WIDE_BASE, 3)
    slots = [[(7 * i) % 90 + 2] for i in range(20)]
    batch = one_sequence(slots, list(range(20)), emit=list(range(20)))
    states = {}
    for name, given, execution in (
        ("base", tensors, Execution()),
        ("merged", merged_tensors(folder, WIDE_BASE, tensors), Execution()),
        ("kernels", tensors, Execution(kernels=kernels, bits=8)),
    ):
        steps = assemble(WIDE_BASE, given, dtype=torch.float32, device=CPU, max_positions=64, execution=execution)
        asked_of = batch
        if name == "kernels":
            assert steps.loras is not None
            steps.loras.load(1, read_lora(folder, WIDE_BASE.trunk, 64))
            asked_of = with_loras(batch, LoraSlots(1, torch.arange(20)))
        with torch.inference_mode():
            cache = PagedKVCache(WIDE_BASE.trunk, 1, 20, torch.float32, CPU)
            states[name] = steps.backend.trunk(asked_of, cache, Reads(batch.emit, 0))[0]
    off, changed = (float((states[name] - states["merged"]).norm()) for name in ("kernels", "base"))
    assert off < 0.1 * changed


@pytest.mark.parametrize("instructions", SETS)
def test_on_the_kernels_an_adapter_computes_what_that_of_composed_slots_does(instructions: InstructionSet) -> None:
    """To the bit, with the same numbers for the same slots: that one's kernels are compared with plain torch."""
    if (kernels := load_kernels(instructions)) is None:
        pytest.skip("built without a compiler, or for another processor")
    config, plain = grafted(trunk_config(**WIDE), adapter_rank=32), grafted(trunk_config(**WIDE))
    tensors = random_tensors(config, 3)
    pairs = {}
    for layer in range(4):
        for part in (part for parts in JOINED.values() for part in parts):
            start = f"adapter.model.layers.{layer}.{part}"
            pairs[layer, part] = tensors[f"{start}.lora_A"], tensors[f"{start}.lora_B"]
    slots = [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14], [3], [4], [5, 2]]
    batch = one_sequence(slots, [2, 3, 5, 9, 10, 11, 13], emit=[0, 1, 2, 3, 4, 5, 6])
    rows = torch.tensor([0, 2, 3, 6])
    states = []
    for form in (config, plain):
        own = {name: tensors[name] for name in tensor_shapes(form)}
        steps = assemble(form, own, dtype=torch.float32, device=CPU, max_positions=64,
                         execution=Execution(kernels=kernels, bits=8))  # fmt: skip
        assert steps.loras is not None
        asked_of = batch
        if form is plain:
            steps.loras.load(7, Shared(pairs))
            asked_of = with_loras(batch, LoraSlots(7, rows))
        cache = PagedKVCache(form.trunk, 1, len(slots), torch.float32, CPU)
        with torch.inference_mode():
            hidden, features = steps.backend.trunk(asked_of, cache, Reads(batch.emit, 7))
        states.append(torch.stack([hidden, *features]))
    assert torch.equal(states[0], states[1])


class Shared(LoraWeights):
    """Whose joined parts have one A."""

    def joined(self, trunk: Any, layer: int, name: str) -> Any:
        found = [self.pairs[layer, part] for part in JOINED[name]]
        return found[0][0], torch.cat([up for _, up in found])


def with_loras(batch: Any, *loras: LoraSlots) -> Any:
    return replace(batch, loras=loras)


@pytest.mark.parametrize("name", ["positions", "plain_base"])
def test_graphs_leave_the_trunk_of_such_steps_to_the_eager_one(tmp_path: Path, name: str) -> None:
    """And replay the rest; steps without adapters are replayed whole."""
    config = MODELS[name]
    folder = lora_folder(tmp_path, config, 1)
    steps = random_model(config, 3, static_shapes=True, packed=False)
    assert steps.loras is not None
    steps.loras.load(1, read_lora(folder, config.trunk, 64))
    prompts = {str(i): ([3 + i, 7, 40 + i], params(confidence=0.2, max_tokens=20, ignore_eos=True)) for i in range(6)}
    loras = dict.fromkeys(["1", "3"], 1)
    wanted = run_core(core_of(random_model(config, 3, packed=False), loras=[folder]), prompts, loras=loras)
    core = graphs_core(steps, EagerCapture(), 200)
    core._loras = core_loras(steps)
    assert core.load_lora(LoadLora(1, str(folder))) is None
    found = run_core(core, prompts, loras=loras)
    assert {i: tokens_of(of) for i, of in found.items()} == {i: tokens_of(of) for i, of in wanted.items()}
    base = run_core(core_of(steps), prompts)
    assert [tokens_of(base[i]) == tokens_of(found[i]) for i in prompts] == [True, False, True, False, True, True]
