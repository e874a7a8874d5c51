"""The peer that our trunk is proven against: transformers, on the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from hamburger.model.checkpoints.config.hf import trunk_config_json
from hamburger.model.config import ModelConfig


def hugging_face(config: ModelConfig, tensors: dict[str, Tensor]) -> Any:
    """transformers' model of this shape with these canonical tensors, in float32."""
    # Some kinds begin with ids beyond a small vocabulary.
    settings = {**trunk_config_json(config.trunk), "pad_token_id": None, "bos_token_id": None}
    peer: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), attn_implementation="eager")
    peer.eval()
    tensors = as_its_kind_has_them(config, tensors)
    if config.trunk.tie_word_embeddings:
        tensors = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    peer.load_state_dict(tensors, strict=True)
    return peer


def as_its_kind_has_them(config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Canonical tensors as transformers' class of the kind has them: the way back from what relatives/ makes of
    Gemma's, and all experts of a layer in one."""
    if config.trunk.experts is not None:
        return with_joined_experts(config, tensors)
    if config.trunk.architecture != "gemma3_text":
        return tensors
    scale, found = config.trunk.hidden_size**0.5, dict(tensors)
    found["model.embed_tokens.weight"] = found["model.embed_tokens.weight"] / scale
    if config.trunk.tie_word_embeddings:
        found["model.norm.weight"] = found["model.norm.weight"] * scale
    return {name: tensor - 1 if "norm" in name else tensor for name, tensor in found.items()}


def with_joined_experts(config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Canonical tensors with all experts of a layer in one: gate over up [E, 2 F, D], and down [E, D, F]."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(config.trunk.num_layers):
        experts = config.trunk.experts_of(layer)
        start = f"model.layers.{layer}.mlp.experts."
        for n in range(0 if experts is None else experts.number):
            gate, up, down = (tensors[f"{start}{n}.{part}_proj.weight"] for part in ("gate", "up", "down"))
            for name, of_expert in (("gate_up_proj", torch.cat((gate, up))), ("down_proj", down)):
                joined = found.get(start + name, of_expert.new_empty(0, *of_expert.shape))
                found[start + name] = torch.cat((joined, of_expert[None]))
    return found


SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "initializer_range": 0.3,
}  # fmt: skip


def saved(folder: Path, form: Any = AutoModelForCausalLM, **changes: Any) -> Any:
    """transformers' model of SIZES with random weights, saved; biases and norms too, which it would begin at 0 or 1."""
    torch.manual_seed(3)
    made: Any = form.from_config(AutoConfig.for_model(**{**SIZES, **changes}), attn_implementation="eager")
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(std=0.3)
        elif "norm" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    made.eval().save_pretrained(folder)
    return made


def greedy(peer: Any, prompt_ids: list[int], new_tokens: int) -> list[int]:
    """The peer's own greedy continuation, end tokens included as ordinary tokens."""
    prompt = torch.tensor([prompt_ids])
    with torch.inference_mode():
        output = peer.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    tokens: list[int] = output[0, len(prompt_ids) :].tolist()
    return tokens


def is_greedy(peer: Any, prompt_ids: list[int], answer_ids: list[int]) -> bool:
    """Whether the peer's greedy continuation is answer_ids: one pass over both, in place of a pass a token."""
    with torch.inference_mode():
        logits = peer(torch.tensor([prompt_ids + answer_ids])).logits[0]
    likeliest: list[int] = logits[len(prompt_ids) - 1 : -1].argmax(-1).tolist()
    return likeliest == answer_ids
