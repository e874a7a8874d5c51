"""The kinds of models that are read as they are: what transformers' class of each fixes, a row a kind. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hamburger.model.config import Norms


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFields:
    """How a configuration speaks of experts: the fields of their number, by what wrote them, and of an expert's width.

    sum_to_one: as in ExpertsConfig; None where norm_topk_prob says. some_dense: whether decoder_sparse_step and
    mlp_only_layers say that some layers have none.
    """

    number: tuple[str, ...]
    width: str
    sum_to_one: bool | None = None
    some_dense: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """causal_lm: transformers' class.

    attention_bias, mlp_bias: None where the configuration says. o_bias: whether the output projection has attention's.
    norms, qk_norm, activation: as in TrunkConfig. turns_part: whether rotary_dim is read, our own word of TrunkConfig.
    Where the configuration does not say: tied, whether head and embedding are one; head_dim (None: hidden_size over
    heads); rope_theta; window, slots of a sliding one.
    slides: which layers have a window: none, all, all if use_sliding_window (all asked), those that layer_types says if
    use_sliding_window (asked), or those that it says (typed; without it each full_every-th has none). Typed ones have a
    rotary base of their own: local_theta where nothing says it (None: rope_theta), or turn as all others (typed alike).
    experts: None where no layer has any.
    """

    causal_lm: str
    attention_bias: bool | None = None
    mlp_bias: bool | None = False
    o_bias: bool = True
    tied: bool = False
    window: int | None = 4096
    head_dim: int | None = None
    rope_theta: float = 10000.0
    local_theta: float | None = None
    slides: Literal["none", "all", "all asked", "asked", "typed", "typed alike"] = "none"
    full_every: int = 1
    turns_part: bool = False
    norms: Norms = "before"
    qk_norm: Literal["head", "width"] | None = None
    activation: Literal["silu", "gelu_tanh"] = "silu"
    experts: ExpertFields | None = None


# An activation's name -> the field that says it, and what it says.
ACTIVATIONS = {"silu": ("hidden_act", "silu"), "gelu_tanh": ("hidden_activation", "gelu_pytorch_tanh")}

KINDS = {
    "llama": Kind(causal_lm="LlamaForCausalLM", mlp_bias=None),
    "mistral": Kind(causal_lm="MistralForCausalLM", attention_bias=False, slides="all", turns_part=True),
    "qwen2": Kind(causal_lm="Qwen2ForCausalLM", attention_bias=True, o_bias=False, slides="asked"),
    "qwen3": Kind(causal_lm="Qwen3ForCausalLM", head_dim=128, qk_norm="head", slides="asked"),
    "ministral": Kind(causal_lm="MinistralForCausalLM", attention_bias=False, slides="typed alike"),
    "smollm3": Kind(
        causal_lm="SmolLM3ForCausalLM", mlp_bias=None, tied=True, window=None, slides="asked", rope_theta=2e6
    ),
    "olmo2": Kind(causal_lm="Olmo2ForCausalLM", norms="after", qk_norm="width"),
    "olmo3": Kind(
        causal_lm="Olmo3ForCausalLM",
        rope_theta=5e5,
        slides="typed",
        full_every=4,
        norms="after",
        qk_norm="width",
    ),
    "gemma": Kind(causal_lm="GemmaForCausalLM", tied=True, head_dim=256, activation="gelu_tanh"),
    "gemma3_text": Kind(
        causal_lm="Gemma3ForCausalLM",
        tied=True,
        head_dim=256,
        rope_theta=1e6,
        local_theta=1e4,
        slides="typed",
        full_every=6,
        norms="around",
        qk_norm="head",
        activation="gelu_tanh",
    ),
    # Whose layers without a window do not turn where others have one.
    "exaone4": Kind(
        causal_lm="Exaone4ForCausalLM",
        attention_bias=False,
        slides="typed alike",
        full_every=4,
        norms="after",
        qk_norm="head",
    ),
    "hyperclovax": Kind(causal_lm="HyperCLOVAXForCausalLM", mlp_bias=None, norms="around"),
    "glm": Kind(causal_lm="GlmForCausalLM", o_bias=False, head_dim=128, turns_part=True),
    "glm4": Kind(causal_lm="Glm4ForCausalLM", o_bias=False, head_dim=128, turns_part=True, norms="around"),
    "qwen3_moe": Kind(
        causal_lm="Qwen3MoeForCausalLM",
        qk_norm="head",
        slides="all asked",
        experts=ExpertFields(
            number=("num_experts", "num_local_experts"), width="moe_intermediate_size", some_dense=True
        ),
    ),
    "olmoe": Kind(
        causal_lm="OlmoeForCausalLM",
        qk_norm="width",
        experts=ExpertFields(number=("num_experts", "num_local_experts"), width="intermediate_size"),
    ),
    "mixtral": Kind(
        causal_lm="MixtralForCausalLM",
        attention_bias=False,
        window=None,
        rope_theta=1e6,
        slides="all",
        experts=ExpertFields(number=("num_local_experts",), width="intermediate_size", sum_to_one=True),
    ),
}
