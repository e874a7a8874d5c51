"""GrammarConstraint: the grammars of one step's rows as the model's masks. The only grammar file with tensors."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from hamburger.engine.text.grammar import Matcher
from hamburger.model.device.transfer import upload


class GrammarConstraint:
    """A Constraint (model/batch.py). matchers: emitting row -> where its answer stands; `restore` puts them back."""

    def __init__(self, matchers: Mapping[int, Matcher], vocab_size: int, device: torch.device) -> None:
        self.rows = upload([sorted(matchers)], device)[0]
        self._matchers = matchers
        self._vocab_size = vocab_size
        self._num_taken = dict.fromkeys(matchers, 0)

    def allowed(self, rows: Tensor) -> Tensor:
        masks = np.zeros((len(rows), -(-self._vocab_size // 32)), dtype=np.int32)
        for i, row in enumerate(rows.tolist()):
            self._matchers[row].allow(masks, i)
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, : self._vocab_size]
        return torch.from_numpy(bits).to(self.rows.device, torch.bool)

    def advance(self, rows: Tensor, tokens: Tensor) -> Tensor:
        complete = []
        for row, token_id in zip(rows.tolist(), tokens.tolist(), strict=True):
            matcher = self._matchers.get(row)
            if matcher is not None:
                matcher.advance(token_id)
                self._num_taken[row] += 1
            complete.append(matcher is not None and (matcher.is_complete or matcher.error is not None))
        return torch.tensor(complete, device=rows.device)

    def restore(self) -> None:
        """Take back what the model tried: Sequence.accept advances by the tokens that are kept."""
        for row, num_tokens in self._num_taken.items():
            self._matchers[row].go_back(num_tokens)
