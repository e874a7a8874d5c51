"""GrammarConstraint: the grammars and token rules of one step's rows as the model's masks; the only file of them with
tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from hamburger.engine.text.token_rules import TokenMatcher
from hamburger.model.device.transfer import upload


class GrammarConstraint:
    """A Constraint (model/batch.py). `restore` puts the matchers back where their answers stand.

    Rows of one sequence share a matcher, which is moved along the drafts of whichever row is asked about. A row behind
    a draft that the grammar refuses, or that completes it, may choose anything: nobody will read it.
    """

    def __init__(
        self, guided: Mapping[int, tuple[TokenMatcher, Sequence[int]]], vocab_size: int, device: torch.device
    ) -> None:
        """guided: emitting row -> its matcher, and the drafts between where its answer stands and this row."""
        self.rows = upload([sorted(guided)], device)[0]
        self._walks = {id(matcher): _Walk(matcher, vocab_size) for matcher, _ in guided.values()}
        self._of_row = {row: self._walks[id(matcher)] for row, (matcher, _) in guided.items()}
        self._paths = {row: list(drafts) for row, (_, drafts) in guided.items()}
        self._vocab_size = vocab_size

    def allowed(self, rows: Tensor) -> Tensor:
        masks = np.empty((len(rows), -(-self._vocab_size // 32)), dtype=np.int32)
        for i, row in enumerate(rows.tolist()):
            walk = self._of_row[row]
            masks[i] = walk.mask if walk.go_to(self._paths[row]) else -1
        return torch.from_numpy(masks).to(self.rows.device)

    def advance(self, rows: Tensor, tokens: Tensor) -> Tensor:
        complete = []
        for row, token_id in zip(rows.tolist(), tokens.tolist(), strict=True):
            walk = self._of_row.get(row)
            if walk is not None:
                self._paths[row].append(token_id)
            complete.append(walk is not None and not walk.go_to(self._paths[row]))
        return torch.tensor(complete, device=rows.device)

    def restore(self) -> None:
        """Take back what the model tried: Sequence.accept advances by the tokens that are kept."""
        for walk in self._walks.values():
            walk.go_to([])


class _Walk:
    """A matcher that goes along tokens and back."""

    def __init__(self, matcher: TokenMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._taken: list[int] = []
        self._words = -(-vocab_size // 32)
        self._mask: np.ndarray | None = None  # of where it stands

    @property
    def mask(self) -> np.ndarray:
        """int32 [words]: the tokens that may come next."""
        if self._mask is None:
            masks = np.zeros((1, self._words), dtype=np.int32)
            self._matcher.allow(masks, 0)
            self._mask = masks[0]
        return self._mask

    def go_to(self, path: Sequence[int]) -> bool:
        """Stand behind these tokens, or the first of them that the grammar refuses. False where something is refused,
        or nothing may follow."""
        same = 0
        while same < min(len(path), len(self._taken)) and path[same] == self._taken[same]:
            same += 1
        if same < len(self._taken):
            self._matcher.go_back(len(self._taken) - same)
            del self._taken[same:]
            self._mask = None
        for token_id in path[same:]:
            if self._ends or not self.mask[token_id // 32] >> (token_id % 32) & 1:
                return False
            self._matcher.advance(token_id)
            self._taken.append(token_id)
            self._mask = None
        return not path or not self._ends

    @property
    def _ends(self) -> bool:
        return self._matcher.is_complete or self._matcher.error is not None
