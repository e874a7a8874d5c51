"""Kinds of models that are another in other words: their configuration and weights are retold as it has them.

| kind | what it has | how that is retold |
| --- | --- | --- |
| `granite` (3.x, dense) | factors of embedding, attention, residual branches, logits | multiplied into the weights |
| `phi3` (Phi-3, Phi-4) | joined linears of q, k, v, and of gate and up | cut apart |
|                       | heads of which a part turns | what turns is put where a Llama has it |
| `gemma3` (Gemma 3 with images) | a language model beside a vision tower | the former is read, as `gemma3_text` |
| `gemma3_text` (Gemma 3) | norms by 1 + weight, a factor of the embedding, attention's scale | put into the weights |

Their forward passes are those of transformers' modeling_granite.py, modeling_phi3.py and modeling_gemma3.py. What is
left of Gemma 3 is a kind of its own (kinds.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from hamburger.model.checkpoints.config.kinds import KINDS
from hamburger.model.checkpoints.config.values import positive
from hamburger.model.checkpoints.sources import CheckpointError

if TYPE_CHECKING:  # the HTTP process asks what is supported, and has no torch
    from torch import Tensor

    from hamburger.model.checkpoints.lazy_tensors import Lazy

_RETOLD = {"granite": "llama", "phi3": "mistral", "gemma3": "gemma3_text"}
RELATIVES = tuple(_RETOLD)
RETOLD_TENSORS = (*RELATIVES, "gemma3_text")
# What the text_config of published ones leaves out, as transformers fills it in.
_GEMMA_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
}
# How the names of its tensors begin, by what wrote them, and how they do without images.
_GEMMA_TEXT = {"language_model.": "", "model.language_model.": "model."}
_GEMMA_IMAGES = tuple(start + part for start in ("", "model.") for part in ("vision_tower.", "multi_modal_projector."))
_GEMMA_ALONE = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")


def check_tied_head(tensors: Mapping[str, Tensor], where: str) -> None:
    """Raises CheckpointError for a head of its own where the configuration ties it to the embedding."""
    import torch

    head = tensors["lm_head.weight"]
    if not torch.equal(head, tensors.get("model.embed_tokens.weight", head)):
        raise CheckpointError(
            f"{where}: lm_head.weight differs from the embedding although the config ties them: set "
            "tie_word_embeddings to false in config.json."
        )


def retold_config(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """A configuration of one of RELATIVES as its kind's; any other as it is. Raises CheckpointError for what Gemma 3
    may say and nobody computes here."""
    if config.get("model_type") == "gemma3":
        config = _gemma3_text(config, where)
    kind = config.get("model_type")
    for field in _GEMMA_ALONE if kind == "gemma3_text" else ():
        if config.get(field):
            raise CheckpointError(f"{where}: {field} is {config[field]!r}, which is not supported.")
    if kind not in _RETOLD:
        return config
    changes: dict[str, Any] = {"model_type": _RETOLD[kind]}
    if kind == "phi3":
        changes["sliding_window"] = config.get("sliding_window")  # Mistral's default would be one
        changes |= _phi3_rope(config, where)
    return {**config, **changes}


def retold_tensors(config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> Mapping[str, Tensor]:
    """The tensors of one of RELATIVES under a Llama's names, to be computed as such, and those of Gemma 3 with its
    factors in them; any other's as they are.

    Where they are multiplied they come in float32. Raises CheckpointError for a factor that is no number, for joined
    linears whose rows are no whole heads, and for a head that is not the embedding it is tied to.
    """
    try:
        match config.get("model_type"):
            case "granite":
                return _granite(config, tensors, where)
            case "phi3":
                return _phi3(config, tensors, where)
            case "gemma3":
                text = {
                    retold_name(config, name): entry
                    for name, entry in _entries_of(tensors).items()
                    if not name.startswith(_GEMMA_IMAGES)
                }
                return _gemma3(_gemma3_text(config, where), _lazy(text), where)
            case "gemma3_text":
                return _gemma3(config, tensors, where)
    except CheckpointError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError, RuntimeError) as error:
        raise CheckpointError(f"{where}: the weights are not those of its configuration: {error}") from error
    return tensors


def retold_name(config: Mapping[str, Any], name: str) -> str:
    """What a tensor or linear of Gemma 3 with images is called in its text part; any other's name as it is."""
    if config.get("model_type") == "gemma3":
        for theirs, ours in _GEMMA_TEXT.items():
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
    return name


def _granite(config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> Mapping[str, Tensor]:
    embedding, attention, residual, logits = (
        float(config.get(name, 1.0))
        for name in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    )
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    # A tied embedding is the head, too, which must not be multiplied: the norm before it takes that back.
    tied = embedding if config.get("tie_word_embeddings", False) else 1.0
    factors = {
        "model.embed_tokens.": embedding,
        "model.norm.": 1 / (logits * tied),
        ".q_proj.": attention * head_dim**0.5,  # a Llama divides by the root of a head's size
        ".o_proj.": residual,
        ".down_proj.": residual,
    }
    found = dict(_entries_of(tensors))
    if tied != 1.0:
        _leave_out_head(found, tensors, where)
    for name in found:
        factor = next((factor for part, factor in factors.items() if part in name), 1.0)
        if factor != 1.0:
            found[name] = _computed(tensors, name, partial(_multiplied, factor=factor))
    return _lazy(found)


def _leave_out_head(found: dict[str, Tensor | Lazy], tensors: Mapping[str, Tensor], where: str) -> None:
    """It is the embedding once more, before that is multiplied."""
    if found.pop("lm_head.weight", None) is not None:
        check_tied_head(tensors, where)


def _multiplied(tensor: Tensor, factor: float, plus: float = 0.0) -> Tensor:
    return (tensor.float() + plus) * factor


def _computed(tensors: Mapping[str, Tensor], name: str, change: Callable[[Tensor], Tensor]) -> Lazy:
    """Of the same shape, in float32, when it is asked for."""
    import torch

    from hamburger.model.checkpoints.lazy_tensors import Lazy

    return Lazy(tuple(_entries_of(tensors)[name].shape), torch.float32, lambda: change(tensors[name]))


def _entries_of(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor | Lazy]:
    from hamburger.model.checkpoints.lazy_tensors import entries_of

    return entries_of(tensors)


def _lazy(entries: Mapping[str, Tensor | Lazy]) -> Mapping[str, Tensor]:
    from hamburger.model.checkpoints.lazy_tensors import LazyTensors

    return LazyTensors(entries)


def _gemma3_text(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The text_config of a Gemma 3 with images, as of one without; what stands beside it wins."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError(f"{where}: text_config, the language model of a gemma3, is missing.")
    beside = {
        "eos_token_id": config.get("eos_token_id") or text.get("eos_token_id"),
        "tie_word_embeddings": config.get("tie_word_embeddings", True),  # text_config's own has no effect
    }
    if config.get("quantization_config"):
        beside["quantization_config"] = config["quantization_config"]
    return {**_GEMMA_DEFAULTS, **text, "model_type": "gemma3_text", **beside}


def gemma3_factors(hidden_size: int, attends: float, *, tied: bool) -> dict[str, float]:
    """What Gemma 3 computes beside its weights: a tensor's name, or a part of each layer -> what it is multiplied by.

    attends: head_dim over query_pre_attn_scalar, whose root a Llama's own scale lacks. tied: as of Granite.
    """
    embedding = hidden_size**0.5
    final = {"model.norm.weight": 1 / embedding} if tied else {}
    return {"model.embed_tokens.weight": embedding, "q_norm": attends**0.5, **final}


def _gemma3(config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> Mapping[str, Tensor]:
    kind = KINDS["gemma3_text"]
    attends = float(config.get("head_dim") or kind.head_dim or 0) / float(config.get("query_pre_attn_scalar", 256))
    tied = config.get("tie_word_embeddings", kind.tied)
    factors = gemma3_factors(int(config["hidden_size"]), attends, tied=tied)
    found = dict(_entries_of(tensors))
    if tied:
        _leave_out_head(found, tensors, where)
    for name in found:
        factor, plus = factors.get(name, factors.get(name.split(".")[-2], 1.0)), 1.0 if "norm" in name else 0.0
        if factor != 1.0 or plus:
            found[name] = _computed(tensors, name, partial(_multiplied, factor=factor, plus=plus))
    return _lazy(found)


def _phi3_rope(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """How a Phi-3 turns, as parse_rope has it: `su` and `yarn` are old names of longrope. Raises CheckpointError."""
    changes: dict[str, Any] = {
        "original_max_position_embeddings": config.get("original_max_position_embeddings", 4096),
        "rotary_dim": _phi3_rotary_dim(config, where),
        "partial_rotary_factor": None,
    }
    for field in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := config.get(field), Mapping):
            kinds = {key: "longrope" for key in ("rope_type", "type") if rope.get(key) in ("su", "yarn")}
            changes[field] = {**rope, **kinds, "partial_rotary_factor": None}
    return changes


def _phi3_rotary_dim(config: Mapping[str, Any], where: str) -> int | None:
    """Numbers of a head that turn, the first ones; None: all. Raises CheckpointError."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    said = {**config, **rope} if isinstance(rope, Mapping) else config
    part = positive(said, "partial_rotary_factor", where, 1.0)
    return None if part == 1 else int(_head_dim(config) * part)


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _in_halves(heads: int, head_dim: int, rotary_dim: int) -> list[int]:
    """Rows of so many heads of which the first rotary_dim numbers turn, each with the one half of them behind: as a
    Llama has them, half a head behind. Queries and keys alike, so that their products stay."""
    turned, still = rotary_dim // 2, head_dim // 2 - rotary_dim // 2
    firsts = (0, rotary_dim), (turned, rotary_dim + still)  # of each half: of what turns, and of what does not
    one = [at for first, left in firsts for at in (*range(first, first + turned), *range(left, left + still))]
    return [head * head_dim + at for head in range(heads) for at in one]


def _phi3(config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> Mapping[str, Tensor]:
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = _head_dim(config)
    parts = {
        "self_attn.qkv_proj.weight": (
            ("self_attn.q_proj.weight", heads * head_dim),
            ("self_attn.k_proj.weight", kv_heads * head_dim),
            ("self_attn.v_proj.weight", kv_heads * head_dim),
        ),
        "mlp.gate_up_proj.weight": (
            ("mlp.gate_proj.weight", int(config["intermediate_size"])),
            ("mlp.up_proj.weight", int(config["intermediate_size"])),
        ),
    }
    from hamburger.model.checkpoints.lazy_tensors import Lazy

    rotary_dim = _phi3_rotary_dim(config, where)
    orders = {}
    if rotary_dim is not None:
        numbers = {"self_attn.q_proj.weight": heads, "self_attn.k_proj.weight": kv_heads}
        orders = {part: _in_halves(number, head_dim, rotary_dim) for part, number in numbers.items()}
    found: dict[str, Tensor | Lazy] = {}
    for name, entry in _entries_of(tensors).items():
        joined = next((joined for joined in parts if name.endswith(joined)), None)
        if joined is None:
            found[name] = entry
            continue
        if entry.shape[0] != sum(rows for _, rows in parts[joined]):
            raise ValueError(f"{name} has {entry.shape[0]} rows")
        first = 0
        for part, rows in parts[joined]:
            make = partial(_rows, tensors, name, first, rows, orders.get(part))
            found[name.removesuffix(joined) + part] = Lazy((rows, *entry.shape[1:]), entry.dtype, make)
            first += rows
    return _lazy(found)


def _rows(tensors: Mapping[str, Tensor], name: str, first: int, number: int, order: list[int] | None) -> Tensor:
    rows = tensors[name].narrow(0, first, number)
    return rows if order is None else rows[order]
