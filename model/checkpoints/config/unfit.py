"""Known kinds of models that are not served, and what they have that the trunk has not. No torch."""

from __future__ import annotations

# What they have -> their model_type.
_UNFIT = {
    "caps on logits": ("gemma2", "gemma3n", "gemma4", "nanochat", "vaultgemma"),
    "experts that are chosen in another way, or shared ones": (
        *("qwen2_moe", "ernie4_5_moe", "glm4_moe", "dots1", "exaone_moe", "afmoe", "solar_open", "minimax_m2"),
        *("llama4", "llama4_text", "granitemoeshared", "flex_olmo"),
    ),
    "compressed keys and values": ("deepseek_v2", "deepseek_v3", "minicpm3", "youtu"),
    "norms of queries and keys behind their rotary embedding": ("hunyuan_v1_dense", "hunyuan_v1_moe"),
    "an MLP without a gate": ("arcee", "nemotron", "apertus", "jais2", "starcoder2", "phi", "falcon", "gpt_neox"),
    "norms that subtract a mean": ("olmo", "stablelm", "cohere", "cohere2", "phimoe"),
    "attention with sinks": ("gpt_oss",),
    "layers that are no attention": (
        *("qwen3_next", "qwen3_5", "qwen3_5_moe", "lfm2", "lfm2_moe", "minimax", "mamba", "mamba2", "jamba", "bamba"),
        *("falcon_h1", "nemotron_h", "zamba2"),
    ),
}
_WHY = {kind: what for what, kinds in _UNFIT.items() for kind in kinds}


def why_unfit(kind: object) -> str:
    """What comes behind "is not supported" where the reason is known; else nothing."""
    return f" ({what})" if isinstance(kind, str) and (what := _WHY.get(kind)) is not None else ""
