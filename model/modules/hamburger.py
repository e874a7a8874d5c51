"""HamburgerModel: the plain module of a trunk with its graft, as checkpoints hold it and training changes it.

It computes no macro-step: model/backend.py does, with this module's parts or with its own form of them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hamburger.model.config import ModelConfig, TrunkConfig
from hamburger.model.modules.embedder import CompositionalEmbedder
from hamburger.model.modules.linear import MakeLinear, plain_linear
from hamburger.model.modules.micro_decoder import MicroStepDecoder, StopHead
from hamburger.model.modules.rotary import RotaryEmbedding
from hamburger.model.modules.trunk import Trunk


class HamburgerModel(nn.Module):
    """A trunk with its graft, or a plain base model (every group then has one token)."""

    short_list: Tensor
    rotary: RotaryEmbedding  # tables, no weights: assemble.py makes them on the model's device

    def __init__(
        self, config: ModelConfig, trunk_config: TrunkConfig | None = None, linear: MakeLinear = plain_linear
    ) -> None:
        """trunk_config: the trunk's sizes in this process, where others hold the rest of it (parallel/).

        linear: what makes the linear layers, head and embedding excepted.
        """
        super().__init__()
        self.config = config
        self.trunk_config = t = config.trunk if trunk_config is None else trunk_config
        g = config.graft
        # Not nn.Embedding(V, D): drawing its initial numbers on the meta device imports torch's compiler for a second.
        self.embed_tokens = nn.Embedding.from_pretrained(torch.empty(t.vocab_size, t.hidden_size), freeze=False)
        self.trunk = Trunk(t, config.adapter_rank, linear)
        if not t.tie_word_embeddings:
            self.lm_head = nn.Linear(t.hidden_size, t.vocab_size, bias=False)
        if g is not None:
            self.embedder = CompositionalEmbedder(t.hidden_size, g.max_group, g.merger_heads, linear)
            self.micro_decoder = MicroStepDecoder(t, g, linear)
            self.stop_head = StopHead(t.hidden_size, linear)
            if g.short_list_size is not None:
                self.register_buffer("short_list", torch.empty(g.short_list_size, dtype=torch.int64))

    @property
    def has_short_list(self) -> bool:
        """Whether micro-steps choose from some ids only."""
        return "short_list" in self._buffers

    @property
    def head_weight(self) -> Tensor:
        """[V, D]: the head that trunk and micro-steps share."""
        return self.embed_tokens.weight if self.trunk_config.tie_word_embeddings else self.lm_head.weight

    def stop_logits(self, states: Tensor, index: int) -> Tensor:
        """states [R, D] after token `index` of the group -> calibrated float32 [R]; a plain base model always stops."""
        if self.config.graft is None:
            return torch.full((len(states),), float("inf"), device=states.device)
        logits: Tensor = self.stop_head(states).squeeze(-1).float()
        return calibrated(logits, self.config, index)


def calibrated(stop: Tensor, config: ModelConfig, index: int) -> Tensor:
    """Raw stop logits float32 [R] after token `index` of the group, as the checkpoint's calibration reads them."""
    graft = config.graft
    if graft is not None and graft.stop_scale is not None:
        stop = stop * graft.stop_scale[index]
    if graft is not None and graft.stop_bias is not None:
        stop = stop + graft.stop_bias[index]
    return stop
