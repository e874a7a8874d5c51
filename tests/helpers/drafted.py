"""Verified groups on real models: a policy that always drafts, right and wrong drafts, and the text without any."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from hamburger.engine.core.core import EngineCore
from hamburger.engine.device.runner import Runner
from hamburger.engine.drafting.costs import MeasuredCosts, StepCosts
from hamburger.engine.drafting.policy import DraftPolicy
from hamburger.engine.grammar.matching import Grammars
from hamburger.engine.types.config import VERIFIED_GROUP, EngineConfig
from hamburger.engine.types.messages import GroupOutput, SubmitRequest
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.steps import Steps


def eager_drafts(steps: Steps) -> DraftPolicy:
    """Drafts cost nothing, so each that may be right is checked."""
    return DraftPolicy(StepCosts(MeasuredCosts((1, 2), (1.0, 1.0), (0.0, 0.0))), steps.config.max_group - 1)


def drafting_core(steps: Steps, config: EngineConfig, grammars: Grammars | None = None) -> EngineCore:
    """A core with verified groups over any steps. config: of composed ones."""
    config = replace(config, groups="verified", max_group=VERIFIED_GROUP)
    cache = PagedKVCache(steps.trunk_config, config.num_blocks, config.block_size, steps.state_dtype, steps.device)
    runner = Runner(steps, cache, groups="verified")
    return EngineCore(config, runner, lambda: 0.0, grammars, eager_drafts(steps))


def never_drafted(asked: Sequence[SubmitRequest]) -> list[SubmitRequest]:
    return [replace(r, params=replace(r.params, confidence=1.0)) for r in asked]


def drafted(asked: Sequence[SubmitRequest], answers: Mapping[str, Sequence[GroupOutput]]) -> list[SubmitRequest]:
    """As many drafts as may be. Two of three requests predict their answer, with a token in seven changed."""
    draw, found = random.Random(len(asked)), []
    for i, request in enumerate(asked):
        prediction = [draw.randrange(2, 90) if draw.random() < 1 / 7 else token for token in text_of(answers[str(i)])]
        changed = replace(request.params, confidence=0.0, prediction_ids=tuple(prediction if i % 3 else ()))
        found.append(replace(request, params=changed))
    return found


def text_of(outputs: Sequence[GroupOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def assert_same_text(found: Mapping[str, Sequence[GroupOutput]], wanted: Mapping[str, Sequence[GroupOutput]]) -> None:
    """In other groups: the same tokens, ends and, within rounding, log-probabilities."""
    assert found.keys() == wanted.keys()
    for name, outputs in wanted.items():
        ours = found[name]
        assert text_of(ours) == text_of(outputs), name
        assert ours[-1].finish_reason == outputs[-1].finish_reason
        assert _logprobs(ours) == pytest.approx(_logprobs(outputs), abs=1e-3)


def _logprobs(outputs: Sequence[GroupOutput]) -> list[float]:
    entries = [entry for output in outputs for entry in output.logprobs or []]
    entries += [entry for entry in outputs[0].prompt_logprobs or [] if entry is not None]
    return [value for entry in entries for value in (entry.logprob, *(p for _, p in entry.top))]


def checked(outputs: Mapping[str, Sequence[GroupOutput]]) -> Counter[str]:
    """How many drafts were accepted and rejected, and how many each drafter made."""
    seen = Counter[str]()
    for drafts in (output.drafts for each in outputs.values() for output in each if output.drafts is not None):
        seen[drafts.drafter] += len(drafts.token_ids)
        seen["accepted"] += drafts.num_accepted
        seen["rejected"] += len(drafts.token_ids) - drafts.num_accepted
    return seen
