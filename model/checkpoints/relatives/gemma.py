"""Gemma and Gemma 3: norms by 1 + weight, a factor of the embedding and attention's scale are put into the weights.

Of those that read images the language model is read, as of one without.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hamburger.model.checkpoints.config.kinds import KINDS
from hamburger.model.checkpoints.relatives.parts import (
    check_unsaid,
    entries_of,
    head_dim_of,
    lazy,
    multiplied,
    without_tied_head,
)
from hamburger.model.checkpoints.sources import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

# What the text_config of published ones leaves out, as transformers fills it in.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
}
_GELU = "gelu_pytorch_tanh"
_ALONE = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")


def gemma3_text_config(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """As it is. Raises CheckpointError for what it may say and nobody computes here."""
    return check_unsaid(config, _ALONE, where)


def gemma_config(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """As it is; a `gelu` of the first ones means its tanh form. Raises CheckpointError."""
    check_unsaid(config, ("use_bidirectional_attention",), where)
    if (named := config.get("hidden_act")) not in (None, "gelu", _GELU):
        raise CheckpointError(f"{where}: hidden_act is {named!r}; only {_GELU!r} is supported.")
    return {**config, "hidden_activation": _GELU}  # whatever it says, hidden_act counts


def gemma3_factors(hidden_size: int, attends: float, *, tied: bool) -> dict[str, float]:
    """What Gemma 3 computes beside its weights: a tensor's name, or a part of each layer -> what it is multiplied by.

    attends: head_dim over query_pre_attn_scalar, whose root a Llama's own scale lacks. tied: as of Granite.
    """
    embedding = hidden_size**0.5
    final = {"model.norm.weight": 1 / embedding} if tied else {}
    return {"model.embed_tokens.weight": embedding, "q_norm": attends**0.5, **final}


def gemma_tensors(config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> Mapping[str, Tensor]:
    """With its factors in them, in float32; those of a first Gemma, too, which norms no queries."""
    kind = KINDS["gemma3_text"]
    attends = head_dim_of(config, kind.head_dim) / float(config.get("query_pre_attn_scalar", 256))
    tied = config.get("tie_word_embeddings", kind.tied)
    factors = gemma3_factors(int(config["hidden_size"]), attends, tied=tied)
    found = without_tied_head(tensors, where) if tied else dict(entries_of(tensors))
    for name in found:
        factor, plus = factors.get(name, factors.get(name.split(".")[-2], 1.0)), 1.0 if "norm" in name else 0.0
        if factor != 1.0 or plus:
            found[name] = multiplied(tensors, name, factor, plus)
    return lazy(found)
