"""Small random models and a way to run them through the real core, for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hamburger.engine.core.core import EngineCore
from hamburger.engine.core.loras import CoreLoras
from hamburger.engine.core.overlap import OverlappedCore
from hamburger.engine.device.loras import LoraFolders
from hamburger.engine.device.runner import Runner
from hamburger.engine.drafting.policy import DraftPolicy
from hamburger.engine.grammar.matching import Grammars
from hamburger.engine.types.config import EngineConfig
from hamburger.engine.types.messages import GroupOutput, Groups, LoadLora, SubmitRequest
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.engine.types.settling import Settling
from hamburger.model.assemble import assemble, model_of
from hamburger.model.backend import Heads, TorchBackend
from hamburger.model.batch import ForwardBatch, Reads, empty_sampling
from hamburger.model.checkpoints.settle_probe import equal_shares
from hamburger.model.config import GraftConfig, ModelConfig, TrunkConfig
from hamburger.model.emission.narrowing import NarrowingEmission
from hamburger.model.execution import Execution
from hamburger.model.gpu.availability import AttentionBackend
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.modules.hamburger import HamburgerModel
from hamburger.model.modules.linear import MakeLinear, plain_linear
from hamburger.model.modules.rotary import RotaryEmbedding
from hamburger.model.settled_places import SettledPlaces
from hamburger.model.slot_choice import SlotChoice
from hamburger.model.steps import EagerSteps, Steps
from hamburger.model.tensor_shapes import shared_lora_a, tensor_shapes

CPU = torch.device("cpu")


def trunk_config(**changes: Any) -> TrunkConfig:
    """A trunk of 4 small layers with grouped-query attention."""
    fields: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "max_position_embeddings": 512,
        "eos_token_ids": (1,),
    }
    return TrunkConfig(**{**fields, **changes})


def graft_config(**changes: Any) -> GraftConfig:
    fields: dict[str, Any] = {"max_group": 4, "merger_heads": 4, "micro_layers": 2, "feature_layers": (1, 2, 3)}
    return GraftConfig(**{**fields, **changes})


def grafted(trunk: TrunkConfig | None = None, adapter_rank: int = 0, **graft: Any) -> ModelConfig:
    """A small model with a graft; adapter_rank: of an adapter for its slots of several tokens (modules/adapter.py)."""
    return ModelConfig(trunk=trunk or trunk_config(), graft=graft_config(**graft), adapter_rank=adapter_rank)


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Canonical tensors whose logits are spread enough that greedy choices are not near ties."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        if name == "short_list":
            order = torch.randperm(config.trunk.vocab_size, generator=generator)
            tensors[name] = order[: shape[0]].sort().values
        elif "norm" in name:
            tensors[name] = 1 + 0.1 * torch.randn(shape, generator=generator)
        else:
            tensors[name] = torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.1)
    for name, shared in shared_lora_a(config).items() if config.adapter_rank else ():
        tensors |= {part: tensors[name].clone() for part in shared}
    tensors["model.embed_tokens.weight"] *= config.trunk.hidden_size**0.5 / 2
    return tensors


def random_model(
    config: ModelConfig,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    packed: bool | None = None,
    static_shapes: bool | None = None,
    device: torch.device = CPU,
    attention: AttentionBackend = "torch",
) -> EagerSteps:
    """The steps of a model with random weights."""
    length = config.trunk.max_position_embeddings
    return assemble(
        config,
        random_tensors(config, seed),
        dtype=dtype,
        device=device,
        max_positions=length,
        execution=Execution(packed=packed, static_shapes=static_shapes, attention=attention),
    )


def plain_model(
    config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32, linear: MakeLinear = plain_linear
) -> HamburgerModel:
    """The plain module with the same weights."""
    length = config.trunk.max_position_embeddings
    tensors = random_tensors(config, seed)
    return model_of(config, tensors, dtype=dtype, device=CPU, max_positions=length, linear=linear)


def steps_of(model: HamburgerModel) -> EagerSteps:
    """The reference path over a plain module: what trained weights are served by, without another form of them."""
    weight = model.head_weight
    micro = weight[model.short_list] if model.has_short_list else weight
    backend = TorchBackend(model, Heads(partial(F.linear, weight=weight), partial(F.linear, weight=micro)))
    return EagerSteps(backend, [NarrowingEmission(backend)])


def core_of(
    model: Steps,
    num_blocks: int = 256,
    block_size: int = 4,
    max_num_seqs: int = 32,
    max_num_batched_slots: int = 64,
    max_model_len: int = 256,
    prefix_cache: bool = False,
    overlap: bool = False,
    grammars: Grammars | None = None,
    policy: DraftPolicy | None = None,
    kv_dtype: torch.dtype | None = None,
    settling: Settling | None = None,
    choice: Callable[[RotaryEmbedding], SlotChoice] = SlotChoice,
    shares: Tensor | None = None,
    loras: Sequence[Path] = (),
) -> EngineCore:
    """A real core and runner over a model. policy: of verified groups; None for composed ones. kv_dtype: of the cache;
    None for the states' own. settling: of answers' old tokens; choice: of who stays, and shares:
    of SettledPlaces. loras: folders of adapters, which requests name by their place, from 1."""
    groups: Groups = "composed" if policy is None else "verified"
    config = EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_slots=max_num_batched_slots,
        block_size=block_size,
        num_blocks=num_blocks,
        eos_token_ids=model.config.trunk.eos_token_ids,
        max_group=model.config.max_group if policy is None else 8,
        groups=groups,
        prefix_cache=prefix_cache,
        settling=settling,
    )
    dtype = kv_dtype or model.state_dtype
    places = None
    if settling is not None:
        shares = equal_shares(model.trunk_config) if shares is None else shares
        places = SettledPlaces(shares, settling.chunk, settling.kept)
    cache = PagedKVCache(model.trunk_config, num_blocks, block_size, dtype, model.device, places)
    rotary = RotaryEmbedding(model.trunk_config, max_model_len, model.device, torch.float32)
    runner = Runner(model, cache, groups=groups, choice=choice(rotary))
    if overlap:
        core: EngineCore = OverlappedCore(config, runner, lambda: 0.0, grammars, core_loras(model))
    else:
        core = EngineCore(config, runner, lambda: 0.0, grammars, policy, runner.settle, core_loras(model))
    for number, folder in enumerate(loras, start=1):
        assert core.load_lora(LoadLora(number, str(folder))) is None
    return core


def core_loras(model: Steps, max_loras: int = 8) -> CoreLoras | None:
    if not isinstance(model, EagerSteps) or model.loras is None:
        return None
    return CoreLoras(LoraFolders(model.loras, model.config.trunk, 64), max_loras)


def params(**fields: Any) -> SamplingParams:
    """Greedy at confidence 0.5 unless told otherwise, with the fields filled in that the client fills in."""
    return SamplingParams(**{"temperature": 0.0, "confidence": 0.5, "max_tokens": 16, "seed": 0, **fields})


def run_core(
    core: EngineCore,
    requests: Mapping[str, tuple[list[int], SamplingParams]],
    max_groups: int | None = None,
    loras: Mapping[str, int] | None = None,
) -> dict[str, list[GroupOutput]]:
    """Run requests (id -> prompt, params) until all end, or each has max_groups groups. loras: adapters of some."""
    outputs: dict[str, list[GroupOutput]] = {request_id: [] for request_id in requests}
    for request_id, (prompt_ids, sampling) in requests.items():
        core.add(SubmitRequest(request_id, prompt_ids, sampling, 0.0, lora=(loras or {}).get(request_id, 0)))
    while core.has_work and (max_groups is None or min(map(len, outputs.values())) < max_groups):
        for output in core.step().outputs:
            outputs[output.request_id].append(output)
    return outputs


def tokens_of(outputs: list[GroupOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def one_sequence(slots: list[list[int]], positions: list[int], emit: list[int]) -> ForwardBatch:
    """A whole sequence as one chunk in block 0."""
    width, n, m = max(map(len, slots)), len(slots), len(emit)
    return ForwardBatch(
        token_ids=torch.tensor([slot + [0] * (width - len(slot)) for slot in slots]),
        group_sizes=torch.tensor([len(slot) for slot in slots]),
        max_group_size=width,
        positions=torch.tensor(positions),
        write_slots=torch.arange(n),
        block_tables=torch.tensor([[0]]),
        context_slots=torch.tensor([n]),
        query_slots=[n],
        context_slots_host=[n],
        num_single=int(n == 1),
        emit=torch.tensor(emit),
        confidence=torch.ones(m),
        group_limits=torch.ones(m, dtype=torch.int64),
        max_group_limit=1,
        sampling=empty_sampling(m, CPU),
    )


def teacher_forced(
    model: EagerSteps, input_ids: list[int], num_prompt: int, group_sizes: list[int]
) -> tuple[Tensor, Tensor]:
    """Logits [n, V] and stop logits [n] of every response token, with the given groups as input."""
    groups, start = [], num_prompt
    for size in group_sizes:
        groups.append(input_ids[start : start + size])
        start += size
    ends = [num_prompt - 1 + sum(group_sizes[: i + 1]) for i in range(len(groups))]
    slots = [[token_id] for token_id in input_ids[:num_prompt]] + groups[:-1]
    positions = list(range(num_prompt)) + ends[:-1]
    batch = one_sequence(slots, positions, emit=list(range(num_prompt - 1, len(slots))))
    cache = PagedKVCache(model.config.trunk, 1, len(slots), torch.float32, CPU)
    graft = model.config.graft
    assert graft is not None
    backend = model.backend
    with torch.inference_mode():
        hidden, features = backend.trunk(batch, cache, Reads(batch.emit, len(batch.emit)))
        logits, stops = [], []
        for row, group in enumerate(groups):
            state = hidden[row : row + 1]
            logits.append(backend.head(state)[0])
            stops.append(backend.stop_logits(state, 0)[0])
            micro = backend.begin_group(torch.stack(features, dim=1)[row : row + 1])
            for index, token_id in enumerate(group[:-1], start=1):
                state, _ = backend.micro_step(torch.tensor([token_id]), micro)
                logits.append(backend.head(state)[0])
                stops.append(backend.stop_logits(state, index)[0])
    return torch.stack(logits), torch.stack(stops)
