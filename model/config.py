"""The shape of a model: the trunk's geometry and every constant of the graft, frozen. No torch.

Words are those of docs/architecture.md: a *graft* is what turns a base model into a HAMburger (the compositional
embedder, the micro-step decoder and the stop head).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from hamburger.model.rope_scaling import (
    DynamicRopeScaling,
    LinearRopeScaling,
    LongRopeScaling,
    RopeScaling,
    YarnRopeScaling,
)

_FLOAT32_MAX = 3.4e38

# Where a layer's norms stand: before attention and MLP, after them (on what they add), or around.
Norms = Literal["before", "after", "around"]


class ConfigError(ValueError):
    """A model configuration that cannot be served; the message names the field and the remedy."""


Architecture = Literal[
    "llama",
    "mistral",
    "ministral",
    "qwen2",
    "qwen3",
    "smollm3",
    "olmo2",
    "olmo3",
    "gemma",
    "gemma3_text",
    "exaone4",
    "hyperclovax",
    "glm",
    "glm4",
    "qwen3_moe",
    "olmoe",
    "mixtral",
]
# How a layer turns queries and keys by their positions.
Rope = Literal["main", "local", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts in place of a layer's MLP (Shazeer et al., arXiv 1701.06538).

    A router gives each slot the chances of `number` MLPs of `width`; the `per_token` likeliest compute it, and their
    sum is weighted by these chances, which `sum_to_one` divides by their own sum. dense_layers: have one MLP of
    intermediate_size, as in any other trunk.
    """

    number: int
    per_token: int
    width: int
    sum_to_one: bool
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ConfigError(f"the width of an expert is {self.width}: it must be at least 1.")
        if not 1 <= self.per_token <= self.number:
            raise ConfigError(
                f"num_experts_per_tok is {self.per_token}: it must be in 1..{self.number}, the number of experts."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrunkConfig:
    """A base model of the Llama family. Sizes are in units; `rope_theta` is the rotary base.

    architecture: transformers' `model_type`, whose tensor names and rules it follows.
    qkv_bias, o_bias, mlp_bias: which linears have a bias. norms: of a layer, as tensor_shapes.LAYER_NORMS has them.
    qk_norm: an RMS norm over each head of q and k (Qwen3), or over the whole width of all heads (OLMo 2).
    activation: of the MLP's gate; gelu_tanh is GELU by its tanh form (arXiv 1606.08415).
    sliding_window: slots that a query of the sliding_layers sees, its own included; None and () where none slides.
    rotary_dim: how many numbers of a head turn, the first of each half; None: all.
    local_rope_theta: rotary base of the sliding layers, which is not scaled; None: they turn as all others.
    unturned_layers: without rotary embedding (NoPE, arXiv 2305.19466). experts: of its layers; None for one MLP each.
    longest_text: in tokens, where the model computes longer ones in a way that is not known here; None: any.
    retold_from: the model_type whose layers' linears these are with other numbers or in another order (relatives/), so
        that its adapters do not fit as they are; None: the linears are as their makers wrote them.
    max_position_embeddings: as the model's own configuration says; `context_tokens` is what can be served.
    eos_token_ids: those of the vocabulary alone: others, which classes of transformers have by default, nothing emits.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    rotary_dim: int | None = None
    tie_word_embeddings: bool
    max_position_embeddings: int
    longest_text: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    architecture: Architecture = "llama"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    norms: Norms = "before"
    qk_norm: Literal["head", "width"] | None = None
    activation: Literal["silu", "gelu_tanh"] = "silu"
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    local_rope_theta: float | None = None
    unturned_layers: tuple[int, ...] = ()
    experts: ExpertsConfig | None = None
    retold_from: str | None = None

    def __post_init__(self) -> None:
        ends = tuple(token_id for token_id in self.eos_token_ids if 0 <= token_id < self.vocab_size)
        object.__setattr__(self, "eos_token_ids", ends)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}."
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd; rotary embedding needs an even one.")
        if self.rotary_dim is not None and (self.rotary_dim % 2 or not 0 < self.rotary_dim < self.head_dim):
            raise ConfigError(f"rotary_dim is {self.rotary_dim}: it must be even, and less than head_dim.")
        if isinstance(scaling := self.rope_scaling, LongRopeScaling):
            for name, factors in (("short_factor", scaling.short_factor), ("long_factor", scaling.long_factor)):
                if len(factors) != (turned := self.rotary_dim or self.head_dim) // 2:
                    raise ConfigError(f"{name} has {len(factors)} numbers, but {turned // 2} wavelengths turn.")
        if (self.sliding_window is None) != (not self.sliding_layers):
            raise ConfigError("sliding_window and sliding_layers belong together.")
        if self.local_rope_theta is not None and not self.sliding_layers:
            raise ConfigError("local_rope_theta is of sliding layers, and there are none.")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(f"sliding_window is {self.sliding_window}: it must be at least 1.")
        if self.experts is not None and (self.norms != "before" or self.mlp_bias):
            raise ConfigError("experts are known in layers with norms before them and without mlp_bias only.")

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """Those of a layer of the trunk; None where it has one MLP."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    @property
    def mlp_products(self) -> int:
        """Multiplications by a slot's numbers in the MLP of the trunk's first layer, for each of hidden_size."""
        experts = self.experts_of(0)
        if experts is None:
            return 3 * self.intermediate_size
        return experts.number + 3 * experts.per_token * experts.width

    @property
    def slides_beyond(self) -> int | None:
        """Tokens of text up to which no layer differs by its window; None where none has one."""
        if self.sliding_window is None:
            return None
        return self.sliding_window if self.local_rope_theta is None else 0  # else they turn otherwise as well

    def for_texts(self, most_tokens: int) -> TrunkConfig:
        """The same for texts of at most so many tokens: without the windows where these hold them all."""
        if self.slides_beyond is None or most_tokens > self.slides_beyond:
            return self
        return replace(self, sliding_window=None, sliding_layers=())

    def rope_of(self, layer: int) -> Rope:
        """How a layer of the trunk turns; those of the micro decoder are turned by the main tables."""
        if layer in self.unturned_layers:
            return "none"
        return "local" if self.local_rope_theta is not None and layer in self.sliding_layers else "main"

    @property
    def fixed_context_tokens(self) -> int:
        """The longest text, in tokens, whose positions are embedded without regard to its length."""
        dynamic = isinstance(self.rope_scaling, DynamicRopeScaling)
        return self.max_position_embeddings if dynamic else self.context_tokens

    @property
    def context_tokens(self) -> int:
        """The longest text, in tokens, that can be served: what the rotary embedding was made for, or longest_text."""
        made_for = self._made_for_tokens
        return made_for if self.longest_text is None else min(made_for, self.longest_text)

    @property
    def _made_for_tokens(self) -> int:
        match self.rope_scaling:
            case LinearRopeScaling() if self.architecture == "gemma3_text":
                return self.max_position_embeddings  # which Gemma states as it is stretched
            case LinearRopeScaling() | DynamicRopeScaling() as scaling:
                return int(self.max_position_embeddings * scaling.factor)
            case YarnRopeScaling() as scaling:
                longest = int(scaling.original_max_position_embeddings * scaling.factor)
                return max(longest, self.max_position_embeddings)
        return self.max_position_embeddings

    def slot_bytes(self, number_bytes: int) -> int:
        """Bytes that one KV slot takes over all layers, in numbers of that size."""
        return kv_slot_bytes(self.num_layers, self.num_kv_heads, self.head_dim, number_bytes)


def kv_slot_bytes(num_layers: int, num_kv_heads: int, head_dim: int, number_bytes: int) -> int:
    """Bytes of one slot's keys and values over all layers. Numbers of one byte have a float32 scale a head."""
    scale_bytes = 4 if number_bytes == 1 else 0
    return 2 * num_layers * num_kv_heads * (head_dim * number_bytes + scale_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraftConfig:
    """The graft's shape (docs/architecture.md, "The graft").

    max_group: most tokens of a group (and rows of the merger's position table).
    merger_heads: heads of the compositional embedder's cross-attention; a property of the checkpoint, hidden_size must
        be a multiple of it.
    micro_layers: decoder layers of a micro-step.
    feature_layers: ascending trunk layers (counted from 0) whose residual stream the micro decoder reads; the last
        trunk layer means the final normed state.
    features: "positions" gives each feature a position of its own (the published form); "fused" adds
        W_f [norm(feature_1); ...; norm(feature_n)] + W_e norm(embedding) into each micro-step's one input.
    micro_norm: an RMS norm of the micro decoder's output before head and stop head (the published form has none).
    short_list_size: None, or how many vocabulary ids the micro-steps' head is restricted to; the ids are the
        checkpoint's tensor `short_list`. A token off the list starts a new group.
    default_confidence: what a request gets that names none, of composed groups.
    groups: how it is served where nobody says: composed, the published form, or verified.
    expected_tokens_per_kv: what was measured at default_confidence when the graft was trained; only for reports.
    stop_scale, stop_bias: the dial's calibration, one entry for each token of a group: the stop logit z after token j
        counts as stop_scale[j] * z + stop_bias[j]. None leaves it as the stop head gives it; training never sees it.
    """

    max_group: int
    merger_heads: int
    micro_layers: int
    feature_layers: tuple[int, ...]
    features: Literal["positions", "fused"] = "positions"
    micro_norm: bool = False
    short_list_size: int | None = None
    default_confidence: float = 0.8
    expected_tokens_per_kv: float = 1.0
    groups: Literal["composed", "verified"] = "composed"
    stop_scale: tuple[float, ...] | None = None
    stop_bias: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A trunk and, unless it is a plain base model, its graft.

    adapter_rank: of the adapter that slots of several tokens alone pass (modules/adapter.py); 0: there is none.
    """

    trunk: TrunkConfig
    graft: GraftConfig | None = None
    adapter_rank: int = 0

    def __post_init__(self) -> None:
        graft, trunk = self.graft, self.trunk
        if self.adapter_rank and (graft is None or self.adapter_rank < 0 or self.adapter_rank % 32):
            raise ConfigError(
                f"the rank of an adapter for composed slots is {self.adapter_rank}: it must be a multiple of 32, and "
                "needs a graft."
            )
        if graft is None:
            return
        if trunk.experts is not None:
            raise ConfigError(
                f"a graft on {trunk.architecture}, which has experts, is not supported: serve it as a plain base."
            )
        if not 2 <= graft.max_group <= 16:
            raise ConfigError(f"max_group is {graft.max_group}: it must be in [2, 16].")
        if graft.merger_heads < 1 or trunk.hidden_size % graft.merger_heads:
            raise ConfigError(
                f"merger_heads is {graft.merger_heads}: hidden_size {trunk.hidden_size} must be a multiple of it."
            )
        if trunk.hidden_size % 2:
            raise ConfigError(f"hidden_size {trunk.hidden_size} is odd; the merger's positions need half of it.")
        if graft.micro_layers < 1:
            raise ConfigError(f"micro_layers is {graft.micro_layers}: it must be at least 1.")
        layers = graft.feature_layers
        if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= trunk.num_layers:
            raise ConfigError(
                f"feature_layers {list(layers)} must ascend within 0..{trunk.num_layers - 1} without repeats."
            )
        if not 0 <= graft.default_confidence <= 1:
            raise ConfigError(f"default_confidence is {graft.default_confidence}: it must be in [0, 1].")
        if graft.short_list_size is not None and not 1 <= graft.short_list_size <= trunk.vocab_size:
            raise ConfigError(
                f"short_list_size is {graft.short_list_size}: it must be in 1..{trunk.vocab_size} (vocab_size)."
            )
        for name, values in (("stop_scale", graft.stop_scale), ("stop_bias", graft.stop_bias)):
            if values is None:
                continue
            if len(values) != graft.max_group or not all(abs(value) <= _FLOAT32_MAX for value in values):
                raise ConfigError(
                    f"{name} is {list(values)}: it must hold max_group ({graft.max_group}) numbers, finite in float32."
                )
        if graft.stop_scale is not None and min(graft.stop_scale) <= 0:
            raise ConfigError(f"stop_scale is {list(graft.stop_scale)}: each number must be above 0.")

    @property
    def max_group(self) -> int:
        """Most tokens of a group; 1 for a plain base model."""
        return self.graft.max_group if self.graft else 1

    @property
    def default_confidence(self) -> float:
        """Confidence of a request that names none; a plain base model runs no micro-step (1.0)."""
        return self.graft.default_confidence if self.graft else 1.0
