"""The kinds of models that are read as they are: what transformers' class of each fixes, a row a kind. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hamburger.model.config import Norms


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """causal_lm: transformers' class.

    attention_bias, mlp_bias: None where the configuration says. o_bias: whether the output projection has attention's.
    tied: whether head and embedding are one where the configuration does not say. window: slots of a sliding window,
    the same. slides: whether layers have it: none, all, or those that use_sliding_window and layer_types say. norms,
    qk_norm: as in TrunkConfig.
    """

    causal_lm: str
    attention_bias: bool | None = None
    mlp_bias: bool | None = False
    o_bias: bool = True
    tied: bool = False
    window: int | None = 4096
    slides: Literal["none", "all", "asked"] = "none"
    norms: Norms = "before"
    qk_norm: Literal["head", "width"] | None = None


KINDS = {
    "llama": Kind(causal_lm="LlamaForCausalLM", mlp_bias=None),
    "mistral": Kind(causal_lm="MistralForCausalLM", attention_bias=False, slides="all"),
    "qwen2": Kind(causal_lm="Qwen2ForCausalLM", attention_bias=True, o_bias=False, slides="asked"),
    "qwen3": Kind(causal_lm="Qwen3ForCausalLM", qk_norm="head", slides="asked"),
    "smollm3": Kind(causal_lm="SmolLM3ForCausalLM", mlp_bias=None, tied=True, window=None, slides="asked"),
    "olmo2": Kind(causal_lm="Olmo2ForCausalLM", norms="after", qk_norm="width"),
}
