"""SettledPlaces: what each KV head keeps of old tokens, and where in settled slots it lies.

A settled slot has a place in each layer and KV head, and a key carries its position, so each place may hold another
token. Few heads of a trunk read what an answer said long ago; most look at its newest tokens alone (retrieval and
streaming heads of DuoAttention, arXiv 2410.10819). So a streaming head keeps a quarter of its places, and lends the
others to a retrieval head of any layer, which may borrow of several:

    settled slots            s0 s1 s2 s3 | s4 s5 s6 s7      4 are kept of each chunk
    a streaming head         a  .  .  .  | e  .  .  .       the first of each chunk's are its own
    a retrieval head         b  c  f  g  | h  i  k  l       all are its own,
    what it borrows             m  n  o  |    p  q  r       and those of the streaming head, which nobody else reads
"""

from __future__ import annotations

import torch
from torch import Tensor

_OWN = 4  # one of so many places is a streaming head's own


class SettledPlaces:
    """lenders: int64 [layers, kv_heads, most], whose places a head takes beside its own, each layer * kv_heads + head,
    padded with -1. lends: int64 [layers, kv_heads], 1 of streaming heads. kept: slots that stay of a chunk. lent: the
    last of these, whose places are lent. numbers: int64 [layers, kv_heads], tokens of a chunk that each head keeps."""

    def __init__(self, shares: Tensor, chunk: int, kept: int) -> None:
        """shares: int64 [layers, kv_heads], of how many heads a head has the places, its own among them; 0 lends them.

        Raises ValueError where more is borrowed than lent.
        """
        shares = shares.cpu()
        flat = shares.flatten().tolist()
        free = [head for head, share in enumerate(flat) if not share]
        if sum(max(share - 1, 0) for share in flat) > len(free):
            raise ValueError(f"{len(free)} heads lend their places, which are fewer than the others borrow.")
        most = max(1, *flat) - 1
        self.kept, self.lends = kept, (shares == 0).long()
        self.lent = 0 if most < 1 else min(kept - max(kept // _OWN, 1), (chunk - kept) // most)
        lenders = torch.full((len(flat), most), -1)
        # Of each place: whose token lies there, and which of those that it keeps.
        keepers = torch.arange(len(flat))[:, None].expand(-1, kept).clone()
        tokens = torch.arange(kept).repeat(len(flat), 1)
        for head, share in enumerate(flat):
            for number in range(share - 1):
                lender = free.pop(0)
                lenders[head, number] = lender
                keepers[lender, kept - self.lent :] = head
                tokens[lender, kept - self.lent :] = torch.arange(self.lent) + kept + number * self.lent
        self.lenders = lenders.view(*shares.shape, most)
        self._keepers, self._tokens = keepers, tokens
        self.numbers = torch.where(self.lends > 0, kept - self.lent, kept + (shares - 1) * self.lent)

    def sources(self, stay: Tensor) -> Tensor:
        """int64 [layers, kept, kv_heads]: what lies in each place after a chunk of C tokens has settled, as
        (layer * kv_heads + head) * C + token. stay: bool [layers, C, kv_heads], of each head `numbers`."""
        layers, chunk, heads = stay.shape
        places = torch.arange(chunk, device=stay.device)[None, :, None]
        tokens = torch.where(stay, places, chunk - 1).sort(dim=1).values.movedim(2, 1).flatten(0, 1)
        keepers = self._keepers.to(stay.device)
        found = keepers * chunk + tokens[keepers, self._tokens.to(stay.device)]
        return found.view(layers, heads, -1).transpose(1, 2)

    def are_lent(self, slots: Tensor) -> Tensor:
        """bool: in which of these settled slots, counted from a sequence's first, places are lent."""
        return slots % self.kept >= self.kept - self.lent
