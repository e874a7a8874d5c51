"""Which kinds are retold, and how: a row a kind. Their forward passes are those of transformers' modeling files.

| kind | what it has | how that is retold |
| --- | --- | --- |
| `granite` (3.x, dense) | factors of embedding, attention, residual branches, logits | multiplied into the weights |
| `granitemoe`, `granitemoehybrid` (4.0, dense) | the same, other names; joined gate and up | renamed; cut apart |
| `phi3` (Phi-3, Phi-4) | joined linears of q, k, v, and of gate and up | cut apart |
|                       | heads of which a part turns | what turns is put where a Llama has it |
| `hyperclovax` | Granite's factors, with norms behind what they multiply | multiplied into those norms |
| `seed_oss` (Seed-OSS) | biases of q, k and v alone | as of a Qwen2 |
| `ernie4_5` (ERNIE 4.5, dense), `helium` | numbers of a head that turn with the next one | put where a Llama has it |
| `glm`, `glm4` (GLM-4) | heads of which a part turns, each number with the next | put where a Llama has it |
|                       | a joined linear of gate and up; other names of norms | cut apart; renamed |
| `ministral3` (Ministral 3) | a scale of queries behind the pretraining context | it ends the context |
| `gemma3`, `mistral3`, `qwen2_vl` ... | a language model beside a vision tower | the former is read, as its kind |
| `gemma`, `gemma3_text` | norms by 1 + weight, a factor of the embedding, attention's scale | put into the weights |

What is left of GLM and of Gemma is a kind of its own (kinds.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hamburger.model.checkpoints.relatives import gemma, granite, images, joined, llamas, mistral
from hamburger.model.checkpoints.relatives.parts import entries_of, lazy
from hamburger.model.checkpoints.sources import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

RetoldConfig = Callable[[Mapping[str, Any], str], Mapping[str, Any]]
RetoldTensors = Callable[[Mapping[str, Any], Mapping[str, "Tensor"], str], Mapping[str, "Tensor"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Relative:
    """config: a configuration of the kind -> that of another, which may be retold in its turn, or of the same.

    tensors: as that kind has them; None: they are. names: parts of theirs -> what stands there instead, of which the
    first that is found counts, before `tensors` is asked. images: how those begin that are left out, as they are of no
    language model. turns_linears: whether `tensors` changes the numbers of a layer's linears, or their order.
    """

    config: RetoldConfig
    tensors: RetoldTensors | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    images: tuple[str, ...] = ()
    turns_linears: bool = False


def _with_images(config: RetoldConfig) -> _Relative:
    return _Relative(config=config, names=images.NAMES, images=images.TOWERS)


_RELATIVES = {
    "granite": _Relative(config=granite.granite_config, tensors=granite.granite_tensors, turns_linears=True),
    "granitemoe": _Relative(
        config=granite.granitemoe_config,
        tensors=granite.granitemoe_tensors,
        names=granite.EXPERTS_NAMES,
        turns_linears=True,
    ),
    "granitemoehybrid": _Relative(
        config=granite.granite4_config,
        tensors=granite.granite4_tensors,
        names=granite.SHARED_NAMES,
        turns_linears=True,
    ),
    "phi3": _Relative(config=joined.phi3_config, tensors=joined.phi3_tensors),
    "ministral": _Relative(config=mistral.ministral_config),
    "cwm": _Relative(config=mistral.cwm_config),
    "ministral3": _Relative(config=mistral.ministral3_config),
    "hyperclovax": _Relative(
        config=granite.clova_config, tensors=granite.clova_tensors, names=granite.CLOVA_NAMES, turns_linears=True
    ),
    "internlm3": _Relative(config=llamas.internlm3_config),
    "iquestcoder": _Relative(config=llamas.iquestcoder_config),
    "seed_oss": _Relative(config=llamas.seed_oss_config),
    "ernie4_5": _Relative(config=llamas.ernie_config, tensors=llamas.tensors_in_pairs, turns_linears=True),
    "helium": _Relative(config=llamas.helium_config, tensors=llamas.tensors_in_pairs, turns_linears=True),
    "olmoe": _Relative(config=llamas.olmoe_config),
    "glm": _Relative(config=joined.glm_config, tensors=joined.glm_tensors, turns_linears=True),
    "glm4": _Relative(
        config=joined.glm_config, tensors=joined.glm_tensors, names=joined.GLM4_NAMES, turns_linears=True
    ),
    "gemma": _Relative(config=gemma.gemma_config, tensors=gemma.gemma_tensors),
    "gemma3_text": _Relative(config=gemma.gemma3_text_config, tensors=gemma.gemma_tensors),
    "gemma3": _with_images(
        images.text_config({"gemma3_text": "gemma3_text"}, tied=True, defaults=gemma.DEFAULTS)  # its own has no effect
    ),
    "mistral3": _with_images(images.text_config({"mistral": "mistral", "ministral3": "ministral3"})),
    "qwen2_vl": _with_images(images.text_config({"qwen2_vl_text": "qwen2"}, is_flat=True)),
    "qwen2_5_vl": _with_images(images.text_config({"qwen2_5_vl_text": "qwen2"}, is_flat=True)),
    "qwen3_vl": _with_images(images.text_config({"qwen3_vl_text": "qwen3"})),
}
RELATIVES = tuple(_RELATIVES)


def reads_images(config: Mapping[str, Any]) -> bool:
    """Whether it is of a model of which the language model alone is read."""
    relative = _RELATIVES.get(config.get("model_type", ""))
    return relative is not None and bool(relative.images)


def has_retold_tensors(config: Mapping[str, Any], where: str) -> bool:
    """Whether retold_tensors changes any numbers or their order. Raises as retold_config."""
    return any(relative.tensors is not None for relative, _ in _steps(config, where)[0])


def turned_linears(config: Mapping[str, Any], where: str) -> str | None:
    """The model_type whose linears retold_tensors gives other numbers or another order; None where it does to none, and
    for phi3, whose linears that it cuts have no name here. Raises as retold_config."""
    steps = _steps(config, where)[0]
    return next((str(own["model_type"]) for relative, own in steps if relative.turns_linears), None)


def retold_config(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """A configuration of one of RELATIVES as its kind's; any other as it is. Raises CheckpointError for what it may
    say and nobody computes here."""
    return _steps(config, where)[1]


def retold_tensors(config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> Mapping[str, Tensor]:
    """The tensors of one of RELATIVES under the names of its kind, to be computed as such; any other's as they are.

    Where they are multiplied they come in float32. Raises CheckpointError for a factor that is no number, for joined
    linears whose rows are no whole heads, and for a head that is not the embedding it is tied to.
    """
    try:
        for relative, own in _steps(config, where)[0]:
            if relative.names:
                tensors = lazy(
                    {
                        _renamed(relative, name): entry
                        for name, entry in entries_of(tensors).items()
                        if not name.startswith(relative.images)
                    }
                )
            if relative.tensors is not None:
                tensors = relative.tensors(own, tensors, where)
    except CheckpointError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError, RuntimeError) as error:
        raise CheckpointError(f"{where}: the weights are not those of its configuration: {error}") from error
    return tensors


def retold_name(config: Mapping[str, Any], name: str) -> str:
    """What a tensor or linear of a model is called where its kind has other names; else as it is."""
    relative = _RELATIVES.get(config.get("model_type", ""))
    return name if relative is None else _renamed(relative, name)


def _renamed(relative: _Relative, name: str) -> str:
    for theirs, ours in relative.names.items():
        if theirs in name:
            return name.replace(theirs, ours, 1)
    return name


def _steps(
    config: Mapping[str, Any], where: str
) -> tuple[list[tuple[_Relative, Mapping[str, Any]]], Mapping[str, Any]]:
    """Each relative that a configuration is retold by, with what it is before that; and what it is at last."""
    steps: list[tuple[_Relative, Mapping[str, Any]]] = []
    kind = None
    while (named := config.get("model_type")) != kind and named in _RELATIVES:
        kind, relative = named, _RELATIVES[named]
        steps.append((relative, config))
        config = relative.config(config, where)
    return steps, config
