"""RMS norm and the decoder layer of the Llama family that trunk and micro decoder share.

A layer does not know where keys and values live: it hands q, k, v to an `attend` function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hamburger.model.config import ExpertsConfig, TrunkConfig
from hamburger.model.modules.adapter import ComposedSlots, LayerLora, LowRank
from hamburger.model.modules.linear import MakeLinear, Part, plain_linear
from hamburger.model.modules.rotary import rotate
from hamburger.model.tensor_shapes import LAYER_NORMS

# (q [..., num_heads, head_dim], k and v [..., num_kv_heads, head_dim]) -> [..., num_heads * head_dim]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, normalised in float32 (Zhang & Sennrich, arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # Under autocast a projection's output is narrower than the weight, and torch warns of two dtypes.
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)


class Experts(nn.Module):
    """A mixture of experts (config.ExpertsConfig). router: plain, whatever form the experts' linears have."""

    def __init__(self, config: ExpertsConfig, hidden_size: int, activation: str, linear: MakeLinear) -> None:
        super().__init__()
        self.config, self._activation = config, _ACTIVATIONS[activation]
        self.router = nn.Linear(hidden_size, config.number, bias=False)
        self.each = nn.ModuleList(Expert(hidden_size, config.width, linear) for _ in range(config.number))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]. A slot's sum goes by its experts' numbers, whatever other slots chose."""
        rows, k = x.flatten(0, -2), self.config.per_token
        chances, chosen = self.router(rows).softmax(-1, dtype=torch.float32).topk(k)
        if self.config.sum_to_one:
            chances = chances / chances.sum(-1, keepdim=True)
        chances, chosen = chances.to(x.dtype).flatten(), chosen.flatten()
        counts: list[int] = chosen.bincount(minlength=self.config.number).tolist()  # waits for the device
        y = torch.zeros_like(rows)
        for n, of_expert in enumerate(chosen.argsort(stable=True).split(counts)):
            if len(of_expert):
                at, expert = of_expert // k, self.each[n]
                assert isinstance(expert, Expert)
                gate, up = expert.gate_up_proj(rows[at]).chunk(2, dim=-1)
                out = expert.down_proj(self._activation(gate) * up)
                y.index_add_(0, at, out * chances[of_expert, None])
        return y.view_as(x)


class Expert(nn.Module):
    """One of them: an MLP with fused gate and up projections."""

    def __init__(self, hidden_size: int, width: int, linear: MakeLinear) -> None:
        super().__init__()
        self.gate_up_proj = linear(hidden_size, 2 * width, bias=False, part="layer")
        self.down_proj = linear(width, hidden_size, bias=False, part="layer", split=True)


class DecoderLayer(nn.Module):
    """One layer with fused q/k/v and gate/up projections; biases, and norms, where its kind has them.

    has_wide_norms: those of q and k are over all heads at once. experts: in place of gate, up and down; or None.
    """

    def __init__(
        self,
        config: TrunkConfig,
        adapter_rank: int = 0,
        linear: MakeLinear = plain_linear,
        part: Part = "layer",
        experts: ExpertsConfig | None = None,
    ) -> None:
        """adapter_rank: of the adapters that slots of several tokens pass; 0: none. experts: of this layer."""
        super().__init__()
        d, ff = config.hidden_size, config.intermediate_size
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.activation, self._activation = config.activation, _ACTIVATIONS[config.activation]
        norms = LAYER_NORMS[config.norms]
        self.attn_norm, self.attn_out_norm, self.mlp_norm, self.mlp_out_norm = (
            RMSNorm(d, config.rms_norm_eps) if name in norms else None
            for name in ("attn_norm", "attn_out_norm", "mlp_norm", "mlp_out_norm")
        )
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv_proj = linear(d, width, bias=config.qkv_bias, part=part)
        self.has_wide_norms = config.qk_norm == "width"
        of_q, of_k = (config.num_heads, config.num_kv_heads) if self.has_wide_norms else (1, 1)
        self.q_norm = RMSNorm(of_q * self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(of_k * self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        heads = self.num_heads * self.head_dim
        self.o_proj = linear(heads, d, bias=config.o_bias, part=part, split=True)
        self.experts = None if experts is None else Experts(experts, d, config.activation, linear)
        if experts is None:
            self.gate_up_proj = linear(d, 2 * ff, bias=config.mlp_bias, part=part)
            self.down_proj = linear(ff, d, bias=config.mlp_bias, part=part, split=True)
        if adapter_rank:
            self.qkv_adapter = LowRank(d, width, adapter_rank, linear)
            self.o_adapter = LowRank(heads, d, adapter_rank, linear, split=True)
            self.gate_up_adapter = LowRank(d, 2 * ff, adapter_rank, linear)
            self.down_adapter = LowRank(ff, d, adapter_rank, linear, split=True)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        last_only: bool = False,
        composed: ComposedSlots | None = None,
        loras: Sequence[LayerLora] = (),
    ) -> Tensor:
        """x [..., D] -> [..., D]; with last_only, x [R, n, D] -> [R, 1, D], and attend gives only that position.

        composed: the slots of x [T, D] that pass the layer's adapters. loras: those that pass others'.
        """
        qkv = self.project("qkv", self.entering(x), composed, loras).unflatten(-1, (-1, self.head_dim))
        heads = qkv[..., : self.num_heads + self.num_kv_heads, :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = heads.split((self.num_heads, self.num_kv_heads), dim=-2)
            if self.has_wide_norms:
                q, k = (norm(part.flatten(-2)).view_as(part) for norm, part in ((self.q_norm, q), (self.k_norm, k)))
            else:
                q, k = self.q_norm(q), self.k_norm(k)
            heads = torch.cat((q, k), dim=-2)
        q, k = rotate(heads, cos, sin).split((self.num_heads, self.num_kv_heads), dim=-2)
        attended = attend(q, k, qkv[..., self.num_heads + self.num_kv_heads :, :])
        if last_only:
            x = x[:, -1:]
        x = x + _normed(self.attn_out_norm, self.project("o", attended, composed, loras))
        entering = _normed(self.mlp_norm, x)
        if self.experts is not None:
            return x + _normed(self.mlp_out_norm, self.experts(entering))
        gate, up = self.project("gate_up", entering, composed, loras).chunk(2, dim=-1)
        return x + _normed(self.mlp_out_norm, self.project("down", self._activation(gate) * up, composed, loras))

    def entering(self, x: Tensor) -> Tensor:
        """What q, k and v are made of, of the states [..., D] before the layer."""
        return _normed(self.attn_norm, x)

    def project(self, name: str, x: Tensor, composed: ComposedSlots | None, loras: Sequence[LayerLora] = ()) -> Tensor:
        """One of the linears: qkv, o, gate_up or down; the last two where there are no experts."""
        y: Tensor = self._modules[f"{name}_proj"](x)  # type: ignore[misc]  # it is there
        if composed is not None:
            adapter = self._modules[f"{name}_adapter"]
            assert isinstance(adapter, LowRank)
            y = composed.add(adapter, x, y)
        for lora in loras:
            y = lora.add(name, x, y)
        return y


def _normed(norm: RMSNorm | None, x: Tensor) -> Tensor:
    if norm is None:
        return x
    normed: Tensor = norm(x)
    return normed
