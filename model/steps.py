"""Steps: all that the engine knows of a model: a batch in, the groups out.

`EagerSteps` runs one operation after the other; graphs/ replays captured ones, parallel/ leads several processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from hamburger.model.backend import Backend
from hamburger.model.batch import ForwardBatch, StepOutput
from hamburger.model.config import ModelConfig, TrunkConfig
from hamburger.model.emission.emission import Emission
from hamburger.model.kv_cache import PagedKVCache


class Steps(Protocol):
    """What runs macro-steps, and what the engine must know of the model. Fields as of Backend."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def trunk_config(self) -> TrunkConfig: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def state_dtype(self) -> torch.dtype: ...
    @property
    def quantization(self) -> str: ...
    @property
    def short_list(self) -> Tensor | None: ...
    def step(self, batch: ForwardBatch, cache: PagedKVCache) -> StepOutput:
        """One macro-step: write every new slot's keys and values, emit a group for each row of `batch.emit`, score
        `batch.scored`."""


class EagerSteps:
    """A Steps of one backend, in this process.

    emissions: in order of preference; the first that takes a batch makes its groups, and the last takes any.
    loras: of the backend.
    """

    def __init__(self, backend: Backend, emissions: Sequence[Emission]) -> None:
        self.backend = backend
        self._emissions = emissions
        self.config, self.trunk_config = backend.config, backend.trunk_config
        self.device, self.state_dtype = backend.device, backend.state_dtype
        self.quantization, self.short_list = backend.quantization, backend.short_list
        self.loras = backend.loras

    @torch.inference_mode()
    def step(self, batch: ForwardBatch, cache: PagedKVCache) -> StepOutput:
        return self.step_with(next(e for e in self._emissions if e.takes(batch)), batch, cache)

    def step_with(self, emission: Emission, batch: ForwardBatch, cache: PagedKVCache) -> StepOutput:
        """A macro-step whose groups `emission` makes."""
        states, features = self.backend.trunk(batch, cache, emission.reads(batch))
        return emission.emit(states, features, batch)
