"""A new graft for a base model: weights from which training starts quickly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from hamburger.model.config import ModelConfig, TrunkConfig
from hamburger.model.tensor_shapes import LAYER_NORMS, layer_shapes, tensor_shapes
from hamburger.training.errors import TrainingError

# A copied layer adds what the trunk's large residual needs; a fused input is far smaller. Measured after 72,000
# positions of recipe `frozen`: .31 agreement with the base at the first micro-step, against .28 undamped.
_DAMPING = 0.1
# The merger's heads that begin at a group's last token, and how strongly they prefer it (in logits a place).
_LAST_HEADS, _PREFERENCE = 0.75, 4.0


def new_graft(
    config: ModelConfig, base: Mapping[str, Tensor], short_list: Tensor | None, seed: int
) -> dict[str, Tensor]:
    """The graft's canonical tensors (tensor_shapes.py), float32.

    base: the trunk's canonical tensors. The micro decoder's layers begin as the trunk's last ones and its norm as the
    trunk's final norm; fused features begin as the last feature alone, with the layers' outputs damped; a composed slot
    begins as the mean of its tokens and once more its last one (_merger); the stop head begins at 0.5 everywhere. The
    rest is drawn from N(0, 0.02^2) with `seed`.
    short_list: int64 ids, for a graft that has one. Raises TrainingError when it does not fit the config.
    """
    graft, trunk = config.graft, config.trunk
    if graft is None:
        raise TrainingError("the configuration has no graft.")
    if (short_list is None) != (graft.short_list_size is None) or (
        short_list is not None and len(short_list) != graft.short_list_size
    ):
        raise TrainingError(f"short_list_size is {graft.short_list_size}, which the given list does not have.")
    generator = torch.Generator().manual_seed(seed)
    shapes = {n: s for n, s in tensor_shapes(config).items() if not n.startswith(("model.", "lm_head."))}
    tensors = {n: torch.randn(s, generator=generator) * 0.02 for n, s in shapes.items() if n != "short_list"}
    for name in tensors:
        if name.endswith("norm.weight"):
            tensors[name] = torch.ones(shapes[name])
        elif name.endswith(".bias"):
            tensors[name] = torch.zeros(shapes[name])
    first = trunk.num_layers - graft.micro_layers
    for i in range(graft.micro_layers):
        for part in layer_shapes(trunk):
            source = base[f"model.layers.{max(first, 0) + min(i, trunk.num_layers - 1)}.{part}"]
            tensors[f"micro_decoder.layers.{i}.{part}"] = source.float().clone()
    if graft.micro_norm:
        tensors["micro_decoder.norm.weight"] = base["model.norm.weight"].float().clone()
    if graft.features == "fused":
        d = trunk.hidden_size
        tensors["micro_decoder.feature_proj.weight"][:, -d:] += torch.eye(d)
        for i in range(graft.micro_layers):
            for part in _last_parts(trunk):
                tensors[f"micro_decoder.layers.{i}.{part}"] *= _DAMPING
    tensors |= _merger(tensors, base["model.embed_tokens.weight"].float(), graft.merger_heads)
    tensors["stop_head.4.weight"] = torch.zeros(shapes["stop_head.4.weight"])
    if short_list is not None:
        tensors["short_list"] = short_list.to(torch.int64).sort().values
    return tensors


def _last_parts(trunk: TrunkConfig) -> tuple[str, ...]:
    """What a layer's two outputs are multiplied by last: their norms' weights, where they have norms."""
    norms = LAYER_NORMS[trunk.norms]
    last = tuple(f"{norms[name]}.weight" for name in ("attn_out_norm", "mlp_out_norm") if name in norms)
    return last or ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def _merger(drawn: Mapping[str, Tensor], embedding: Tensor, heads: int) -> dict[str, Tensor]:
    """The merger's tensors, with heads that tell places apart, because what the trunk foresees depends on the last
    token most.

    Of a mean of tokens it cannot say which was the last. Three heads in four begin at the last place, the others at the
    first; each reads a few of the embedding's principal directions, strongest first. The former write them where they
    were read, the latter nothing yet. drawn: small random values of all of the merger's tensors.
    """
    d = embedding.shape[1]
    size = d // heads
    last = max(1, round(heads * _LAST_HEADS)) * size
    tensors = {name: t.clone() for name, t in drawn.items() if name.startswith("embedder.")}
    pos, key, value = (tensors[f"embedder.{name}"] for name in ("pos", "k_proj.weight", "v_proj.weight"))
    places = len(pos)
    pos[:, :places] = torch.eye(places)
    tensors["embedder.q_proj.bias"][:] = 1
    towards_end = torch.ones(d, 1)
    towards_end[last:] = -1
    # A head's logit is the sum of its `size` products over sqrt(size).
    key[:, d : d + places] = towards_end * _PREFERENCE * torch.arange(places) / size**0.5
    principal = torch.linalg.eigh(embedding.T @ embedding).eigenvectors.flip(1)
    value[:last, :d] = principal[:, :last].T
    value[last:, :d] = principal[:, : d - last].T
    out = torch.zeros(d, d)
    out[:, :last] = principal[:, :last]
    return tensors | {"embedder.out_proj.weight": out}


def likeliest_ids(counted: Iterable[Tensor], size: int, vocab_size: int) -> Tensor:
    """The short list: the `size` ids that occur most in the given id tensors, int64 ascending; ties by lower id."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for ids in counted:
        counts += torch.bincount(ids.flatten().long(), minlength=vocab_size)
    order = torch.argsort(counts, descending=True, stable=True)
    return order[:size].sort().values
