"""CompositionalEmbedder: smashes a group of tokens into the one input state of its slot."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hamburger.model.modules.linear import MakeLinear, plain_linear


class CompositionalEmbedder(nn.Module):
    """mean(E) + W_out · CrossAttention(q = W_q mean(E), k, v = W_{k,v} [E ; pos]) over `heads` heads.

    The source is arXiv 2505.20438. A group of one token keeps its embedding unchanged.
    """

    def __init__(self, hidden_size: int, max_group: int, heads: int, linear: MakeLinear = plain_linear) -> None:
        super().__init__()
        d, wide = hidden_size, hidden_size + hidden_size // 2
        self.heads = heads
        self.q_proj = linear(d, d, bias=True, part="other")
        self.k_proj = linear(wide, d, bias=True, part="other")
        self.v_proj = linear(wide, d, bias=True, part="other")
        self.out_proj = linear(d, d, bias=True, part="other")
        self.pos = nn.Parameter(torch.empty(max_group, hidden_size // 2))

    def forward(self, embeddings: Tensor, sizes: Tensor, rows: Tensor | None) -> Tensor:
        """embeddings [T, W, D] of the tokens of each slot (padding ignored), sizes int64 [T] -> states [T, D].

        rows: int64 [N], the slots of several tokens; None where the device alone knows them, so that all are
        composed, some for nothing.
        """
        if rows is None:
            return torch.where((sizes > 1)[:, None], self._merge(embeddings, sizes), embeddings[:, 0])
        if not len(rows):
            return embeddings[:, 0]
        return embeddings[:, 0].index_copy(0, rows, self._merge(embeddings[rows], sizes[rows]))

    def _merge(self, e: Tensor, sizes: Tensor) -> Tensor:
        """e [N, W, D], sizes [N] -> [N, D]."""
        # Always to the full width: how sums over it round must not depend on how wide the batch's widest group is.
        e = F.pad(e, (0, 0, 0, len(self.pos) - e.shape[1]))
        n, width, d = e.shape
        visible = torch.arange(width, device=e.device) < sizes[:, None]  # [N, W]
        mean = e.masked_fill(~visible[..., None], 0).sum(1) / sizes[:, None].to(e.dtype)
        joined = torch.cat((e, self.pos.expand(n, -1, -1)), dim=-1)
        q = self.q_proj(mean).view(n, self.heads, 1, -1)
        k, v = (proj(joined).view(n, width, self.heads, -1).transpose(1, 2) for proj in (self.k_proj, self.v_proj))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None, None, :])
        merged: Tensor = mean + self.out_proj(out.reshape(n, d))
        return merged
