"""Verified groups whose answers count from 100, with drafts that are right but where a test says so."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

from hamburger.engine.core.core import EngineCore
from hamburger.engine.core.sequence import Sequence
from hamburger.engine.drafting.proposal import Proposal
from hamburger.engine.types.messages import GroupOutput, SubmitRequest
from hamburger.engine.types.sampling_params import SamplingParams
from verified import ScriptedTrunk, VerifyingRunner, no_drafts, verified_config, verified_core


class Counting(ScriptedTrunk):
    """Says 100, 101, 102, ... from the answer's first token on, or what `instead` says at a place of the answer."""

    def __init__(self, instead: dict[int, int] | None = None) -> None:
        super().__init__()
        self._instead = instead or {}

    def choose(self, tokens: SequenceOf[int], params: SamplingParams, output_index: int) -> int:
        return self._instead.get(output_index, 100 + output_index)


class Drafting:
    """Drafts what the trunk would say, but for the places of the answer that are named here."""

    def __init__(self, trunk: ScriptedTrunk, most: int = 3, wrong: SequenceOf[int] = ()) -> None:
        self._trunk, self._most, self._wrong = trunk, most, wrong

    def __call__(self, tokens: SequenceOf[int], params: SamplingParams, output_index: int) -> Proposal | None:
        found = self._trunk.continuation(tokens, params, output_index, self._most)
        found = [99 if output_index + i in self._wrong else token_id for i, token_id in enumerate(found)]
        return Proposal("micro", found, [0.9] * len(found)) if found else None


def request(name: str, num_prompt: int = 4, **fields: Any) -> SubmitRequest:
    params = SamplingParams(**{"max_tokens": 20, "seed": 1, "confidence": 0.0, "temperature": 0.0, **fields})
    return SubmitRequest(name, list(range(num_prompt)), params, arrival_time=0.0)


def core_of(
    trunk: ScriptedTrunk | None = None, most: int = 3, wrong: SequenceOf[int] = (), **changes: Any
) -> tuple[EngineCore, VerifyingRunner]:
    trunk = trunk or Counting()
    runner = VerifyingRunner(trunk, Drafting(trunk, most, wrong) if most else no_drafts)
    return verified_core(runner, verified_config(**changes)), runner


def answer(num_tokens: int) -> list[int]:
    return [100 + i for i in range(num_tokens)]


def sequence_of(core: EngineCore, name: str) -> Sequence:
    return core._scheduler._sequences[name]


def step(core: EngineCore) -> list[GroupOutput]:
    outputs = core.step().outputs
    core.check_integrity()
    return outputs
