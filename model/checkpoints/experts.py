"""Experts in a configuration and among tensors, under one set of names (tensor_shapes.py). No torch is imported."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hamburger.model.checkpoints.config.kinds import ExpertFields
from hamburger.model.checkpoints.config.values import flag, whole
from hamburger.model.checkpoints.sources import CheckpointError
from hamburger.model.config import ExpertsConfig, TrunkConfig

if TYPE_CHECKING:  # the HTTP process reads configurations, and has no torch
    from torch import Tensor

# What Mixtral calls an expert's linears, in files of any transformers.
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_OF_MIXTRAL = re.compile(r"(?P<layer>.+\.)block_sparse_moe\.(?P<rest>gate|experts\.\d+\.(?P<linear>w[123]))\.weight")
# All experts of a layer in one tensor, as transformers 5 holds them.
_JOINED = re.compile(r"(?P<prefix>.+\.mlp\.experts\.)(?P<linear>gate_up_proj|down_proj)")


def parse_experts(config: Mapping[str, Any], fields: ExpertFields | None, where: str) -> ExpertsConfig | None:
    """Raises CheckpointError, KeyError, TypeError or ValueError for what is missing or makes no sense."""
    if fields is None:
        return None
    number = next((name for name in fields.number if config.get(name) is not None), fields.number[0])
    sums = flag(config, "norm_topk_prob", where, default=False) if fields.sum_to_one is None else fields.sum_to_one
    return ExpertsConfig(
        number=whole(config, number, where),
        per_token=whole(config, "num_experts_per_tok", where),
        width=whole(config, fields.width, where),
        sum_to_one=sums,
        dense_layers=_dense_layers(config, where) if fields.some_dense else (),
    )


def _dense_layers(config: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """Those that mlp_only_layers names, and all but each decoder_sparse_step-th."""
    layers, step = whole(config, "num_hidden_layers", where), whole(config, "decoder_sparse_step", where, 1)
    named = config.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(type(layer) is int for layer in named):
        raise CheckpointError(f"{where}: mlp_only_layers is {named!r}: it must be a list of layers.")
    return tuple(layer for layer in range(layers) if layer in named or (layer + 1) % step)


def experts_json(experts: ExpertsConfig, fields: ExpertFields) -> dict[str, Any]:
    """The inverse of parse_experts."""
    values: dict[str, Any] = {
        fields.number[0]: experts.number,
        "num_experts_per_tok": experts.per_token,
        fields.width: experts.width,
    }
    if fields.sum_to_one is None:
        values["norm_topk_prob"] = experts.sum_to_one
    if fields.some_dense:
        values |= {"mlp_only_layers": list(experts.dense_layers), "decoder_sparse_step": 1}
    return values


def one_by_one(trunk: TrunkConfig, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Mixtral's names, and tensors of all experts of a layer, as those of single experts: views, nothing is copied."""
    return tensors if trunk.experts is None else of_single_experts(tensors)


def of_single_experts(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The same of tensors that are known to have experts."""
    from hamburger.model.checkpoints.lazy_tensors import Lazy, LazyTensors, entries_of

    found: dict[str, Tensor | Lazy] = {}
    for name, tensor in entries_of(tensors).items():
        if (match := _OF_MIXTRAL.fullmatch(name)) is not None:
            rest, linear = match["rest"], match["linear"]
            own = rest if linear is None else rest.removesuffix(linear) + _MIXTRAL[linear]
            found[f"{match['layer']}mlp.{own}.weight"] = tensor
        elif (match := _JOINED.fullmatch(name)) is not None and len(tensor.shape) == 3:
            for n, of_expert in enumerate(tensors[name]):
                prefix = f"{match['prefix']}{n}."
                if match["linear"] == "down_proj":
                    found[f"{prefix}down_proj.weight"] = of_expert
                else:
                    gate, up = of_expert.tensor_split(2)
                    found |= {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up}
        else:
            found[name] = tensor
    return LazyTensors(found)
