"""Which linears of a GGUF file have 4 bits, from its table of tensors alone. No torch."""

from __future__ import annotations

import gguf

from hamburger.model.checkpoints.sources import BUILTIN, ModelSource, embedded_gguf
from hamburger.model.tensor_shapes import JOINED

_PARTS = {  # of a layer, as llama.cpp calls them
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def four_bit_linears(source: ModelSource, num_layers: int) -> set[str]:
    """The canonical names of those whose 4 bits the CPU kernels keep: Q4_1, with all that they are joined with. None
    where the trunk's weights are in no GGUF file."""
    if source.kind == "gguf":
        path = source.path
    elif source.kind == "hamburger" and source.base_path == BUILTIN:
        path = embedded_gguf()
    else:
        return set()
    kinds = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(path).tensors}
    found = set[str]()
    for layer in range(num_layers):
        for parts in JOINED.values():
            if all(kinds.get(f"blk.{layer}.{_PARTS[part]}.weight") == gguf.GGMLQuantizationType.Q4_1 for part in parts):
                found |= {f"model.layers.{layer}.{part}.weight" for part in parts}
    return found
