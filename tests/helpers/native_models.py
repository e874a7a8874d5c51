"""Models on the compiled kernels, and what their number format says, spelled out in torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hamburger.model.assemble import assemble, model_of
from hamburger.model.backend import Heads, TorchBackend
from hamburger.model.config import ModelConfig
from hamburger.model.cpu.library import InstructionSet, Kernels, load_kernels
from hamburger.model.emission.narrowing import NarrowingEmission
from hamburger.model.execution import Execution
from hamburger.model.kernel_shapes import GROUP
from hamburger.model.modules.linear import FormedLinear, Part
from hamburger.model.steps import EagerSteps
from small_models import CPU, random_tensors

SETS: tuple[InstructionSet, ...] = ("avx512bf16", "avx512", "avx2")
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}


def half(x: Tensor) -> Tensor:
    return x.half().float()


def dequantized(weight: Tensor, bits: int) -> Tensor:
    """What kernels/structs.h says a packed weight stands for."""
    groups = weight.float().unflatten(-1, (-1, GROUP))
    if bits == 8:
        scales = half(groups.abs().amax(-1, keepdim=True) / 127)
        codes = (groups / scales.clamp_min(1e-30)).round().clamp(-127, 127)
        of_8_bits: Tensor = (codes * scales).flatten(-2)
        return of_8_bits
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scales, zeros = half((high - low) / 15), half(low)
    codes = ((groups - zeros) / scales.clamp_min(1e-30)).round().clamp(0, 15)
    of_4_bits: Tensor = (codes * scales + zeros).flatten(-2)
    return of_4_bits


def rounded(x: Tensor) -> Tensor:
    """Inputs as the kernels see them."""
    groups = x.unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(-1, keepdim=True) / 127
    values: Tensor = ((groups / scales.clamp_min(1e-30)).round() * scales).flatten(-2)
    return values


class RoundedLinear(FormedLinear):
    """What a packed linear computes, spelled out in torch."""

    def __init__(self, bits: int = 8) -> None:
        super().__init__()
        self._bits = bits
        self.bias: Tensor | None = None

    def take(self, name: str, tensor: Tensor) -> None:
        if name == "weight":
            self.weight = dequantized(tensor, self._bits)
        else:
            self.bias = tensor

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = nn.functional.linear(rounded(x), self.weight, self.bias)
        return y


def models(
    config: ModelConfig, seed: int = 3, kernels: Kernels | None = None, bits: int = 8, draft_bits: int = 8
) -> tuple[EagerSteps, EagerSteps]:
    """A plain model with its linears rounded in torch, and one on the kernels. bits: of the trunk. draft_bits: of the
    micro decoder."""
    tensors = random_tensors(config, seed)
    length = max(config.trunk.max_position_embeddings, 200)

    def linear(inputs: int, outputs: int, *, bias: bool, part: Part, split: bool = False) -> nn.Module:
        return RoundedLinear({"layer": bits, "micro": draft_bits}.get(part, 8))

    plain = model_of(config, tensors, dtype=torch.float32, device=CPU, max_positions=length, linear=linear)
    first = RoundedLinear.of(plain.head_weight)
    micro = RoundedLinear.of(plain.head_weight[plain.short_list]) if plain.has_short_list else first
    if config.trunk.tie_word_embeddings:  # it is read from the head in 8 bits
        plain.embed_tokens.weight = nn.Parameter(dequantized(plain.head_weight.detach(), 8), requires_grad=False)
    backend = TorchBackend(plain, Heads(first, micro))
    native = assemble(
        config,
        tensors,
        dtype=torch.float32,
        device=CPU,
        max_positions=length,
        execution=Execution(kernels=kernels or load_kernels(), bits=bits, draft_bits=draft_bits),
    )
    return EagerSteps(backend, [NarrowingEmission(backend)]), native
