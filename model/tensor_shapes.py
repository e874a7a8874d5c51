"""The tensors of a model by its shape: their canonical names, their sizes, and which of them are joined. No torch."""

from __future__ import annotations

from hamburger.model.config import ModelConfig, Norms, TrunkConfig

# The linears that are joined, and what DecoderLayer (modules/layers.py) calls them.
JOINED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}

# What DecoderLayer calls the norms of a layer -> their names in checkpoints.
LAYER_NORMS: dict[Norms, dict[str, str]] = {
    "before": {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "after": {"attn_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"},
    "around": {
        "attn_norm": "input_layernorm",
        "attn_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
}


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this shape holds: canonical name -> shape. Nothing more, nothing less is loaded.

    Canonical names are the Hugging Face Llama names for the trunk (`model.*`, `lm_head.weight` only when untied), those
    of Qwen3-MoE for experts (`mlp.gate` is their router, `mlp.experts.0.*` the first one), and
    `embedder.*`, `micro_decoder.*`, `stop_head.*`, `short_list` for the graft. An adapter for composed slots has a
    pair `adapter.<linear>.lora_A` and `.lora_B` for each linear of the trunk's layers.
    """
    t, d = config.trunk, config.trunk.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (t.vocab_size, d), "model.norm.weight": (d,)}
    if not t.tie_word_embeddings:
        shapes["lm_head.weight"] = (t.vocab_size, d)
    for i in range(t.num_layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer_shapes(t, i).items()}
    g = config.graft
    if g is None:
        return shapes
    for proj, width in (("q_proj", d), ("k_proj", d + d // 2), ("v_proj", d + d // 2), ("out_proj", d)):
        shapes |= {f"embedder.{proj}.weight": (d, width), f"embedder.{proj}.bias": (d,)}
    shapes["embedder.pos"] = (g.max_group, d // 2)
    if rank := config.adapter_rank:
        for name, shape in list(shapes.items()):
            if name.startswith("model.layers.") and name.endswith("_proj.weight"):
                pair = f"adapter.{name.removesuffix('.weight')}"
                shapes |= {f"{pair}.lora_A": (rank, shape[1]), f"{pair}.lora_B": (shape[0], rank)}
    for i in range(g.micro_layers):
        shapes |= {f"micro_decoder.layers.{i}.{name}": shape for name, shape in layer_shapes(t).items()}
    if g.micro_norm:
        shapes["micro_decoder.norm.weight"] = (d,)
    if g.features == "fused":
        n = len(g.feature_layers)
        shapes |= {
            "micro_decoder.feature_norm.weight": (n, d),
            "micro_decoder.embedding_norm.weight": (d,),
            "micro_decoder.feature_proj.weight": (d, n * d),
            "micro_decoder.embedding_proj.weight": (d, d),
        }
    for i, width in ((0, d), (2, d), (4, 1)):
        shapes |= {f"stop_head.{i}.weight": (width, d), f"stop_head.{i}.bias": (width,)}
    if g.short_list_size is not None:
        shapes["short_list"] = (g.short_list_size,)
    return shapes


def shared_lora_a(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The lora_A of the first of joined linears -> those of the others, which are the same."""
    return {
        f"adapter.model.layers.{i}.{joined[0]}.lora_A": tuple(
            f"adapter.model.layers.{i}.{part}.lora_A" for part in joined[1:]
        )
        for i in range(config.trunk.num_layers)
        for joined in JOINED.values()
    }


def layer_shapes(t: TrunkConfig, layer: int = 0) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one decoder layer's tensors, as Hugging Face writes them.

    layer: of the trunk, whose layers differ where it has experts.
    """
    d, ff, q, kv = t.hidden_size, t.intermediate_size, t.num_heads * t.head_dim, t.num_kv_heads * t.head_dim
    norms = {name: {f"{named}.weight": (d,)} for name, named in LAYER_NORMS[t.norms].items()}
    shapes: dict[str, tuple[int, ...]] = {
        **norms.pop("attn_norm", {}),
        "self_attn.q_proj.weight": (q, d),
        "self_attn.k_proj.weight": (kv, d),
        "self_attn.v_proj.weight": (kv, d),
        "self_attn.o_proj.weight": (d, q),
        **norms.pop("mlp_norm", {}),
    }
    experts = t.experts_of(layer)
    if experts is None:
        shapes |= _mlp_shapes("mlp.", d, ff)
    else:
        shapes["mlp.gate.weight"] = (experts.number, d)
        for n in range(experts.number):
            shapes |= _mlp_shapes(f"mlp.experts.{n}.", d, experts.width)
    if t.qkv_bias:
        shapes |= {f"self_attn.{name}_proj.bias": (width,) for name, width in (("q", q), ("k", kv), ("v", kv))}
    if t.o_bias:
        shapes["self_attn.o_proj.bias"] = (d,)
    if t.mlp_bias:
        shapes |= {f"mlp.{name}_proj.bias": (width,) for name, width in (("gate", ff), ("up", ff), ("down", d))}
    if t.qk_norm is not None:
        of_q, of_k = (t.head_dim, t.head_dim) if t.qk_norm == "head" else (q, kv)
        shapes |= {"self_attn.q_norm.weight": (of_q,), "self_attn.k_norm.weight": (of_k,)}
    for left in norms.values():
        shapes |= left
    return shapes


def _mlp_shapes(prefix: str, d: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (width, d),
        f"{prefix}up_proj.weight": (width, d),
        f"{prefix}down_proj.weight": (d, width),
    }
