"""Canonical checkpoint tensors -> what computes with them. The only file that knows every backend and combination."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hamburger.model.backend import Head, Heads, TorchBackend
from hamburger.model.config import ConfigError, ExpertsConfig, ModelConfig, TrunkConfig
from hamburger.model.cpu.backend import CpuBackend
from hamburger.model.cpu.emission import CpuChoices, CpuEmission
from hamburger.model.cpu.onednn import PackedLinear, can_pack, packed_linear
from hamburger.model.emission.emission import Emission
from hamburger.model.emission.narrowing import NarrowingEmission
from hamburger.model.emission.static import StaticEmission
from hamburger.model.execution import DEFAULT, Execution
from hamburger.model.gpu.int8 import Int8Linear, int8_linear
from hamburger.model.modules.hamburger import HamburgerModel
from hamburger.model.modules.linear import MakeLinear, give, plain_linear
from hamburger.model.modules.rotary import RotaryEmbedding
from hamburger.model.parallel.collectives import Collectives
from hamburger.model.parallel.shard import Shard
from hamburger.model.parallel.steps import ParallelSteps
from hamburger.model.steps import EagerSteps
from hamburger.model.tensor_shapes import JOINED, LAYER_NORMS

_LAYERS = "trunk.layers."
# What excludes what: (is asked, and excludes, remedy). How the user asks for it is the engine's to say.
_EXCLUDED: tuple[tuple[str, str, str], ...] = (
    ("kernels", "static_shapes", "the compiled kernels compute only for rows that go on: leave static_shapes off."),
    ("kernels", "ranks", "the compiled kernels run whole models only: use one rank."),
    ("kernels", "int8", "the compiled kernels have 8 bits of their own: leave int8 off."),
    ("kernels", "triton", "the compiled kernels are the CPU's, Triton's are a GPU's: use one of them."),
    ("ranks", "static_shapes", "ranks agree in each micro-step on the rows that go on: leave static_shapes off."),
    ("ranks", "int8", "weights of 8 bits are for whole models only: use one rank."),
    ("int8", "packed", "weights have one form: use int8 or packed."),
)


def assemble(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int,
    execution: Execution = DEFAULT,
) -> EagerSteps:
    """Build what runs macro-steps of tensors named as `tensor_shapes` says (checked by the loader), in `dtype`.

    max_positions: the longest sequence to serve, in tokens. Raises ConfigError where parts of `execution` exclude each
    other.
    """
    _check(execution, ranks=False)
    if execution.kernels is not None:
        model = model_of(config, tensors, dtype=dtype, device=device, max_positions=max_positions,
                         state_dtype=torch.float32, has_layers=False)  # fmt: skip
        fill = partial(_fill_layer, model, tensors, dtype)
        native = CpuBackend(model, execution.kernels, execution.bits, execution.draft_bits, fill)
        graft = native.graft
        narrowing = NarrowingEmission(native, graft.draw, partial(CpuChoices.begin, native), graft.logprobs)
        return EagerSteps(native, [CpuEmission(graft), narrowing], graft.logprobs)
    linear = _linear_of(execution, dtype, device)
    model = model_of(config, tensors, dtype=dtype, device=device, max_positions=max_positions, linear=linear)
    heads = _heads(model, linear)
    _drop_spare_head(model, linear)
    static = device.type == "cuda" if execution.static_shapes is None else execution.static_shapes
    quantization = "int8" if execution.int8 else "none"
    backend = _torch_backend(execution)(model, heads, static=static, quantization=quantization)
    emissions: list[Emission] = [StaticEmission(backend)] if static else []
    return EagerSteps(backend, [*emissions, NarrowingEmission(backend)])


def assemble_shard(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    ranks: Collectives,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int,
    execution: Execution = DEFAULT,
) -> ParallelSteps:
    """The same of this rank's part of a model that is split over `ranks` (connected then or later)."""
    _check(execution, ranks=True)
    shard, linear = Shard(config, ranks), _linear_of(execution, dtype, device)
    model = model_of(config, tensors, dtype=dtype, device=device, max_positions=max_positions, linear=linear,
                     shard=shard)  # fmt: skip
    shard.hold(model)
    heads = shard.heads(partial(_head, model, PackedLinear if linear is packed_linear else None))
    _drop_spare_head(model, linear)
    backend = _torch_backend(execution)(model, heads, lookup=shard.lookup)
    return ParallelSteps(backend, shard)


def model_of(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int,
    linear: MakeLinear = plain_linear,
    state_dtype: torch.dtype | None = None,
    shard: Shard | None = None,
    has_layers: bool = True,
) -> HamburgerModel:
    """The plain module. state_dtype: of the states that its rotary tables turn; None is dtype. has_layers: whether the
    trunk's layers get their weights, too (else by _fill_layer, one by one)."""
    with torch.device("meta"):
        if shard is None:
            model = HamburgerModel(config, linear=linear)
        else:
            model = HamburgerModel(config, shard.trunk_config, shard.linear(linear))
    now = {name: parts for name, parts in parts_of(config).items() if has_layers or not name.startswith(_LAYERS)}
    _fill(model, now, lambda p: tensors[p] if shard is None else shard.tensor(p, tensors[p]), dtype, device)
    if has_layers:
        _check_filled(model)
    model.eval().requires_grad_(False)
    graft = config.graft
    if graft is not None:  # the micro decoder counts its own positions
        max_positions = max(max_positions, len(graft.feature_layers) + graft.max_group)
    model.rotary = RotaryEmbedding(config.trunk, max_positions, device, state_dtype or dtype)
    return model


def _fill(
    model: HamburgerModel,
    parts: Mapping[str, tuple[str, ...]],
    tensor_of: Callable[[str], Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Give parameters their canonical tensors, joined."""
    for name, joined_of in parts.items():
        own = [tensor_of(part) for part in joined_of]
        joined = torch.cat(own) if len(own) > 1 else own[0]
        owner, _, leaf = name.rpartition(".")
        give(model.get_submodule(owner), leaf, joined.to(device, dtype if joined.is_floating_point() else joined.dtype))


def _fill_layer(model: HamburgerModel, tensors: Mapping[str, Tensor], dtype: torch.dtype, layer: int) -> None:
    """Give one of the trunk's layers its weights."""
    prefix = f"{_LAYERS}{layer}."
    parts = {name: parts for name, parts in parts_of(model.config).items() if name.startswith(prefix)}
    _fill(model, parts, tensors.__getitem__, dtype, model.embed_tokens.weight.device)
    _check_filled(model.trunk.layers[layer])


def _check_filled(module: nn.Module) -> None:
    if left := [name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if tensor.is_meta]:
        raise RuntimeError(f"parts_of names no tensors for {', '.join(left)}.")


def _check(execution: Execution, *, ranks: bool) -> None:
    asked = {
        "kernels": execution.kernels is not None,
        "static_shapes": bool(execution.static_shapes),
        "ranks": ranks,
        "int8": execution.int8,
        "packed": bool(execution.packed),
        "triton": execution.attention == "triton",
    }
    for one, other, remedy in _EXCLUDED:
        if asked[one] and asked[other]:
            raise ConfigError(f"{one} and {other} exclude each other: {remedy}")


def _torch_backend(execution: Execution) -> type[TorchBackend]:
    if execution.attention == "torch":
        return TorchBackend
    from hamburger.model.gpu.backend import TritonBackend  # its package may be missing where it is not asked for

    return TritonBackend


def _linear_of(execution: Execution, dtype: torch.dtype, device: torch.device) -> MakeLinear:
    if execution.int8:
        return int8_linear
    packed = can_pack(dtype, device) if execution.packed is None else execution.packed
    return packed_linear if packed else plain_linear


def _drop_spare_head(model: HamburgerModel, linear: MakeLinear) -> None:
    """An untied head that the heads hold in another form is not kept twice."""
    if linear is packed_linear and not model.trunk_config.tie_word_embeddings:
        del model.lm_head


_Form = type[PackedLinear] | type[Int8Linear] | None


def _heads(model: HamburgerModel, linear: MakeLinear) -> Heads:
    """In the linears' form; but first tokens keep the dtype where that is 8 bits."""
    own = PackedLinear if linear is packed_linear else None
    of_micro_steps: _Form = Int8Linear if linear is int8_linear else own
    first = _head(model, own, None)
    if model.config.graft is None or (of_micro_steps is own and not model.has_short_list):
        return Heads(first, first)
    return Heads(first, _head(model, of_micro_steps, model.short_list if model.has_short_list else None))


def _head(model: HamburgerModel, form: _Form, rows: Tensor | None) -> Head:
    """What multiplies by some rows of the head's weight, or by all."""
    weight = model.head_weight.detach() if rows is None else model.head_weight.detach()[rows]
    return partial(F.linear, weight=weight) if form is None else form.of(weight)


def parts_of(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Module parameter -> the canonical tensors that are joined along axis 0 to make it."""
    names: dict[str, tuple[str, ...]] = {
        "embed_tokens.weight": ("model.embed_tokens.weight",),
        "trunk.norm.weight": ("model.norm.weight",),
    }
    if not config.trunk.tie_word_embeddings:
        names["lm_head.weight"] = ("lm_head.weight",)
    for i in range(config.trunk.num_layers):
        names |= _layer(f"trunk.layers.{i}.", f"model.layers.{i}.", config.trunk, config.trunk.experts_of(i))
        if config.adapter_rank:
            names |= _adapter(f"trunk.layers.{i}.", f"adapter.model.layers.{i}.")
    graft = config.graft
    if graft is None:
        return names
    for i in range(graft.micro_layers):
        names |= _layer(f"micro_decoder.layers.{i}.", f"micro_decoder.layers.{i}.", config.trunk)
    same = [f"embedder.{p}_proj.{kind}" for p in ("q", "k", "v", "out") for kind in ("weight", "bias")]
    same += ["embedder.pos"] + [f"stop_head.{i}.{kind}" for i in (0, 2, 4) for kind in ("weight", "bias")]
    if graft.micro_norm:
        same.append("micro_decoder.norm.weight")
    if graft.features == "fused":
        same += [
            f"micro_decoder.{p}.weight" for p in ("feature_norm", "embedding_norm", "feature_proj", "embedding_proj")
        ]
    if graft.short_list_size is not None:
        same.append("short_list")
    return names | {name: (name,) for name in same}


def _adapter(ours: str, theirs: str) -> dict[str, tuple[str, ...]]:
    """Joined linears share one lora_A (load.py sees to it)."""
    parts: dict[str, tuple[str, ...]] = {}
    for name, joined in JOINED.items():
        parts[f"{ours}{name}_adapter.down.weight"] = (f"{theirs}{joined[0]}.lora_A",)
        parts[f"{ours}{name}_adapter.up.weight"] = tuple(f"{theirs}{part}.lora_B" for part in joined)
    return parts


def _layer(
    prefix: str, canonical: str, trunk: TrunkConfig, experts: ExpertsConfig | None = None
) -> dict[str, tuple[str, ...]]:
    norms = LAYER_NORMS[trunk.norms].items()
    parts: dict[str, tuple[str, ...]] = {f"{name}.weight": (f"{theirs}.weight",) for name, theirs in norms}
    has_bias = {"qkv": trunk.qkv_bias, "o": trunk.o_bias, "gate_up": trunk.mlp_bias, "down": trunk.mlp_bias}
    for name, joined in JOINED.items():
        if experts is not None and name in ("gate_up", "down"):
            for n in range(experts.number):
                own = tuple(f"mlp.experts.{n}.{part.removeprefix('mlp.')}.weight" for part in joined)
                parts[f"experts.each.{n}.{name}_proj.weight"] = own
            continue
        for kind in ("weight", "bias") if has_bias[name] else ("weight",):
            parts[f"{name}_proj.{kind}"] = tuple(f"{part}.{kind}" for part in joined)
    if experts is not None:
        parts["experts.router.weight"] = ("mlp.gate.weight",)
    if trunk.qk_norm:
        parts |= {f"{name}_norm.weight": (f"self_attn.{name}_norm.weight",) for name in ("q", "k")}
    return {prefix + name: tuple(canonical + part for part in joined) for name, joined in parts.items()}
