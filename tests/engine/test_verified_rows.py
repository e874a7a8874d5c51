"""Runner with verified groups: the rows that a step computes for drafts, and the groups that come of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hamburger.engine.core.batch import GroupResult, ScheduledBatch, ScheduledSequence
from hamburger.engine.core.sequence import Sequence
from hamburger.engine.device.runner import Runner
from hamburger.engine.drafting.proposal import Proposal
from hamburger.engine.types.messages import SubmitRequest
from hamburger.model.batch import ForwardBatch, Logprobs, StepOutput
from hamburger.model.config import ModelConfig
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.rope_scaling import DynamicRopeScaling
from small_models import CPU, graft_config, params, trunk_config


class Recorded:
    """Steps that keep their batch, and give what they are told to, or tokens that no draft is."""

    short_list = None
    device = CPU

    def __init__(self, **trunk: Any) -> None:
        self.config = ModelConfig(trunk=trunk_config(**trunk), graft=graft_config())
        self.batches: list[ForwardBatch] = []
        self.output: StepOutput | None = None

    def step(self, batch: ForwardBatch, cache: PagedKVCache) -> StepOutput:
        self.batches.append(batch)
        rows = len(batch.emit)
        scores = None
        if batch.scored is not None:
            zeros = torch.zeros(len(batch.scored.rows))
            scores = Logprobs(zeros, zeros[:, None].long(), zeros[:, None], zeros.long())
        plain = StepOutput(torch.full((rows, 1), 95), torch.ones(rows).long(), torch.zeros(rows, 1), None, scores)
        return self.output or plain


def runner_of(steps: Recorded) -> Runner:
    cache = PagedKVCache(steps.config.trunk, 8, 4, torch.float32, CPU)
    return Runner(steps, cache, groups="verified")  # type: ignore[arg-type]


def sequence_of(name: str, prompt: list[int], output: list[int], blocks: list[int], **fields: Any) -> Sequence:
    """All but its newest token is computed."""
    sequence = Sequence(SubmitRequest(name, prompt, params(**fields), 0.0), (1,), 64, "verified")
    sequence.scheduled_time, sequence.block_ids = 0.0, blocks
    for token_id in output:
        sequence.accept([token_id], [0.5], None)
    sequence.num_computed_slots = sequence.num_slots - 1 if output else 0
    return sequence


def item(sequence: Sequence, num_slots: int = 1, drafts: list[int] | None = None, **fields: Any) -> ScheduledSequence:
    made = Proposal("micro", drafts, [0.9] * len(drafts)) if drafts else None
    emits = sequence.num_computed_slots + num_slots == sequence.num_slots
    return ScheduledSequence(sequence, num_slots, emits, made, **fields)


def steps_batch(*items: ScheduledSequence, **trunk: Any) -> ForwardBatch:
    steps = Recorded(**trunk)
    runner_of(steps).run(ScheduledBatch([*items]))
    return steps.batches[0]


def values(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.tolist()


def test_each_draft_is_a_row_behind_its_sequence() -> None:
    a = sequence_of("a", [5, 6, 7], [10, 11], [2, 0], seed=3, temperature=0.7)
    b = sequence_of("b", [8], [12], [4], confidence=1.0)
    c = sequence_of("c", list(range(20, 26)), [], [1, 3])
    batch = steps_batch(item(a, drafts=[13, 14], max_drafts=2, min_chance=0.25), item(b), item(c, 6, max_drafts=1))
    assert values(batch.token_ids) == [[11], [13], [14], [12], *([i] for i in range(20, 26))]
    assert values(batch.positions) == [4, 5, 6, 1, *range(6)]
    assert values(batch.write_slots) == [0, 1, 2, 17, 4, 5, 6, 7, 12, 13]
    assert batch.query_slots == [1, 1, 1, 1, 6]
    assert batch.num_single == 4
    assert batch.context_slots_host == values(batch.context_slots) == [5, 6, 7, 2, 6]
    assert values(batch.block_tables) == [[2, 0], [2, 0], [2, 0], [4, 0], [1, 3]]
    assert values(batch.emit) == [0, 1, 2, 3, 9]
    assert values(batch.checks) == [13, 14, -1, -1, -1]
    assert values(batch.sampling.output_index) == [2, 3, 4, 1, 0]
    assert values(batch.sampling.seed) == [3, 3, 3, 0, 0]
    assert values(batch.group_limits) == [3, 3, 3, 1, 2]
    assert values(batch.confidence) == [0.25, 0.25, 0.25, 1.0, 0.0]
    assert batch.max_group_limit == 3


def test_no_more_is_drafted_than_the_next_step_may_check() -> None:
    a = sequence_of("a", [5], [10], [0, 2], max_tokens=6)
    batch = steps_batch(item(a, drafts=[11, 12, 13], max_drafts=3))
    # Of the 5 tokens that are left row i leaves 4 - i, and the last of these is the trunk's own.
    assert values(batch.group_limits) == [4, 3, 2, 1]


def test_penalties_of_a_row_know_the_drafts_before_it() -> None:
    a = sequence_of("a", [5, 6], [10], [0, 2], presence_penalty=1.0, repetition_penalty=1.2)
    b = sequence_of("b", [5, 6], [10, 10], [1, 3])
    batch = steps_batch(item(b, drafts=[9]), item(a, drafts=[11, 12]))
    adjustments = batch.sampling.adjustments
    assert adjustments is not None
    assert values(adjustments.row) == [2, 3, 4]
    assert values(adjustments.output_ids) == [[10, -1, -1], [10, 11, -1], [10, 11, 12]]
    assert values(adjustments.prompt_ids) == [[5, 6]] * 3


def test_prompt_slots_are_scored_in_their_own_rows_beside_drafts() -> None:
    a = sequence_of("a", [5, 6], [10], [0, 2])
    b = sequence_of("b", [20, 21, 22], [], [1], prompt_logprobs=0)
    batch = steps_batch(item(a, drafts=[11, 12, 13]), item(b, 3))
    assert batch.scored is not None
    assert (values(batch.scored.rows), values(batch.scored.next_ids)) == ([4, 5], [21, 22])


def test_dynamic_rope_sees_the_text_that_a_row_ends() -> None:
    a = sequence_of("a", [5, 6], [10], [0, 2])
    rope = {"rope_scaling": DynamicRopeScaling(factor=2.0), "max_position_embeddings": 4}
    assert values(steps_batch(item(a, drafts=[11, 12]), **rope).text_lengths) == [3, 4, 5]


@pytest.mark.parametrize(
    ("chosen", "wanted", "last"),
    [
        ([13, 14, 40], [13, 14, 40], 2),
        ([13, 41, 40], [13, 41], 1),
        ([42, 14, 40], [42], 0),
    ],
)
def test_a_group_is_what_the_trunk_confirms_and_its_next_token(chosen: list[int], wanted: list[int], last: int) -> None:
    steps = Recorded()
    a, b = sequence_of("a", [5], [10], [0], logprobs=1), sequence_of("b", [5], [10], [1])
    # Each row's own token, then drafts: those of row i are [50 + i, 60 + i] with chances .75 and .5.
    rows = [[token_id, 50 + i, 60 + i] for i, token_id in enumerate([*chosen, 30])]
    probs = torch.tensor([[0.0, 0.25, 0.5]] * 4)
    zeros = torch.zeros(4, 3)
    logprobs = Logprobs(-torch.tensor(rows).float(), torch.tensor(rows)[..., None], zeros[..., None])
    steps.output = StepOutput(torch.tensor(rows), torch.tensor([3, 3, 3, 1]), probs, logprobs)
    batch = ScheduledBatch([item(a, drafts=[13, 14], max_drafts=2), item(b)])
    first, second = runner_of(steps).run(batch).groups
    assert first.token_ids == wanted
    assert [entry.logprob for entry in first.logprobs or []] == [-token_id for token_id in wanted]
    assert first.proposal == Proposal("micro", [50 + last, 60 + last], [0.75, 0.5])
    assert second == GroupResult([30], [0.0], None, None)


def test_nothing_emits() -> None:
    a = sequence_of("a", list(range(9)), [], [0, 1])
    batch = steps_batch(item(a, 4))
    assert values(batch.checks) == []
    assert batch.max_group_limit == 1


def test_composed_groups_have_no_checks() -> None:
    steps = Recorded()
    cache = PagedKVCache(steps.config.trunk, 8, 4, torch.float32, CPU)
    sequence = Sequence(SubmitRequest("a", [5, 6], params(), 0.0), (1,), 64)
    sequence.block_ids = [0]
    Runner(steps, cache).run(ScheduledBatch([item(sequence, 2)]))  # type: ignore[arg-type]
    assert steps.batches[0].checks is None
