"""The HTTP server with verified groups on a scripted engine: a text that is the trunk's, and drafts of it.

async with drafting("abcdef", micro={1: "bcx"}) as server:   after token 1 the micro decoder drafts b, c and x
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fakes import EOS, scripted_logprobs
from hamburger.engine.core.batch import BatchResult, GroupResult, ScheduledBatch, ScheduledSequence
from hamburger.engine.drafting.proposal import Proposal
from serving import ByChoice, Served, serving

CHANCE = 0.75  # of every draft of the micro decoder


class DraftingRunner(ByChoice):
    """Every answer is `text`, then end tokens. It accepts drafts as a trunk does, and checks no slots."""

    def __init__(self, text: str, micro: Mapping[int, str]) -> None:
        """micro: after so many tokens of the answer, what the micro decoder drafts."""
        super().__init__()
        self._text, self._micro = list(text.encode()), micro

    def run(self, batch: ScheduledBatch) -> BatchResult:
        return BatchResult([self._group(item) for item in batch.sequences if item.emits])

    def _group(self, item: ScheduledSequence) -> GroupResult:
        first, k = item.sequence.num_output_tokens, item.sequence.params.logprobs
        group: list[int] = []
        for draft in [*(item.drafts.token_ids if item.drafts is not None else ()), -1]:
            place = first + len(group)
            group.append(self._text[place] if place < len(self._text) else EOS)
            if group[-1] != draft:
                break
        logprobs = None if k is None else [scripted_logprobs(first + i, t, k) for i, t in enumerate(group)]
        drafts = list(self._micro.get(first + len(group), "").encode()) if item.max_drafts else []
        proposal = Proposal("micro", drafts, [CHANCE] * len(drafts)) if drafts else None
        return GroupResult(group, [0.5] * len(group), logprobs, proposal)


@asynccontextmanager
async def drafting(text: str, micro: Mapping[int, str] | None = None, **engine: Any) -> AsyncIterator[Served]:
    """`engine` are fields of EngineConfig (and `info`, and the server's `settings`), see fake_engines.py."""
    runner = DraftingRunner(text, micro or {})
    options = {"groups": "verified", "max_group": 8, **engine}
    info = {"default_confidence": 0.0, "is_plain_base": False, **options.pop("info", {})}
    async with serving(runner=runner, info=info, **options) as server:
        server.metrics.add_gauges(server.engine)
        yield server
