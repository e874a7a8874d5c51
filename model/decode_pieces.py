"""The pieces that a decoding macro-step of static rows is cut into: the trunk, each micro-step, each choice of a token.

Each leaves what the next reads in tensors that stay where they are; decode_graphs.py captures and replays them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hamburger.model.batch import ForwardBatch
from hamburger.model.hamburger import HamburgerModel
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.masked import Groups, MaskedStep
from hamburger.model.micro_cache import GroupCache

# (any_sampled, any_filtered): what a choice has to compute.
Kind = tuple[bool, bool]
GREEDY: Kind = (False, False)
KINDS: tuple[Kind, ...] = (GREEDY, (True, False), (True, True))


class Pieces:
    """Those of one number of rows, by the model's own modules.

    batches: the static rows, the same for each kind of choice. logits [B, V] and stop [B]: where a piece leaves them
    for the choice.
    """

    def __init__(
        self,
        model: HamburgerModel,
        cache: PagedKVCache,
        batches: dict[Kind, ForwardBatch],
        groups: Groups,
        logits: Tensor,
        stop: Tensor,
    ) -> None:
        self._model, self._cache = model, cache
        self.batch, self.groups, self.logits, self.stop = batches[GREEDY], groups, logits, stop
        self.width = self.batch.max_group_limit
        self.choices = {
            kind: MaskedStep(groups, b.sampling, b.confidence, b.group_limits) for kind, b in batches.items()
        }
        self._features: list[Tensor] = []
        self._micro: GroupCache | None = None

    def compute(self, index: int) -> None:
        """The state that token `index` of the groups is chosen from, its logits and its stop value."""
        if index == 0:
            self._trunk()
        else:
            self._micro_step(index)

    def choose(self, kind: Kind, index: int) -> None:
        """Token `index` of the groups."""
        if index == 0:
            self.groups.begin()
        self.choices[kind].take(index, self.logits, self.stop)

    def left(self) -> list[object]:
        """What the last pieces left for each other: as long as their graphs are replayed it must not be freed."""
        return [self._features, self._micro]

    def _trunk(self) -> None:
        model, graft = self._model, self._model.config.graft
        layers = graft.feature_layers if graft else ()
        hidden, self._features = model.trunk(model.embed(self.batch), self.batch, self._cache, model.rotary, layers)
        self._leave(hidden, model.head(hidden), 0)

    def _micro_step(self, index: int) -> None:
        if index == 1:
            self._micro = self._model.micro_decoder.start_static(torch.stack(self._features, dim=1), self.width)
        if self._micro is None:
            raise RuntimeError("a group goes on that never began.")
        state, logits = self._model.micro_step(self.groups.newest, self._micro)
        self._leave(state, logits, index)

    def _leave(self, state: Tensor, logits: Tensor, index: int) -> None:
        self.logits.copy_(logits)
        self.stop.copy_(self._model.stop_logit(state, index))
