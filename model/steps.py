"""Steps: all that the engine knows of a model: a batch in, the groups out.

`EagerSteps` runs one operation after the other; graphs/ replays captured ones, parallel/ leads several processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from hamburger.model.backend import Backend
from hamburger.model.batch import ForwardBatch, StepOutput
from hamburger.model.config import ModelConfig, TrunkConfig
from hamburger.model.emission.emission import Emission
from hamburger.model.emission.scoring import reads_of, score
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.sampler import LogprobsOf, token_logprobs


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
    logprobs_of: gives the scores of prompts.
    loras: of the backend.
    """

    def __init__(
        self, backend: Backend, emissions: Sequence[Emission], logprobs_of: LogprobsOf = token_logprobs
    ) -> None:
        self.backend = backend
        self._emissions, self._logprobs_of = emissions, logprobs_of
        self.config, self.trunk_config = backend.config, backend.trunk_config
        self.device, self.state_dtype = backend.device, backend.state_dtype
        self.quantization, self.short_list = backend.quantization, backend.short_list
        self.loras = backend.loras

    @torch.inference_mode()
    def step(self, batch: ForwardBatch, cache: PagedKVCache) -> StepOutput:
        return self.step_with(next(e for e in self._emissions if e.takes(batch)), batch, cache)

    def step_with(self, emission: Emission, batch: ForwardBatch, cache: PagedKVCache) -> StepOutput:
        """A macro-step whose groups `emission` makes."""
        states, features = self.backend.trunk(batch, cache, reads_of(batch))
        if batch.scored is None:
            return emission.emit(states, features, batch)
        of_groups, of_scores = states.split((len(batch.emit), len(batch.scored.rows)))
        output = emission.emit(of_groups, features, batch)
        return replace(output, prompt_logprobs=score(self.backend, of_scores, batch.scored, self._logprobs_of))
