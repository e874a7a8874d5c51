"""Verified groups in tests, without torch: a scripted trunk over a KV pool that is checked, and drafts of every kind.

trunk = ScriptedTrunk()
core = verified_core(VerifyingRunner(trunk, drafts_of(trunk, random.Random(1))))
... the answer to each request is trunk.answer(request, core.config), whatever was drafted
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from zlib import crc32

from fake_engines import fake_config
from fakes import EOS, VOCAB_SIZE, ByteTokenizer, scripted_logprobs
from hamburger.engine.core.batch import BatchResult, GroupResult, ScheduledBatch, ScheduledSequence, SettlingChunk
from hamburger.engine.core.core import EngineCore
from hamburger.engine.core.sequence import Sequence
from hamburger.engine.drafting.costs import MeasuredCosts, StepCosts
from hamburger.engine.drafting.policy import DraftPolicy
from hamburger.engine.drafting.proposal import Proposal
from hamburger.engine.grammar.matching import Grammars
from hamburger.engine.types.config import EngineConfig
from hamburger.engine.types.errors import OutOfMemory
from hamburger.engine.types.messages import SubmitRequest
from hamburger.engine.types.sampling_params import SamplingParams

Draft = Callable[[SequenceOf[int], SamplingParams, int], Proposal | None]


class ScriptedTrunk:
    """Chooses each token by all that come before it, one of few, so that texts repeat themselves."""

    def __init__(self, seed: int = 0, num_tokens: int = 4, eos_chance: float = 0.02) -> None:
        self._seed, self._num_tokens, self._eos = seed, num_tokens, int(eos_chance * 2**32)

    def choose(self, tokens: SequenceOf[int], params: SamplingParams, output_index: int) -> int:
        noise = crc32(array("H", tokens).tobytes(), self._seed)
        may_end = output_index >= params.min_tokens
        if may_end and crc32(b"end", noise) < self._eos:
            return EOS
        # Mostly by the last two tokens alone: what a lookup can foresee.
        if noise % 4:
            noise = crc32(array("H", tokens[-2:]).tobytes(), self._seed)
        choice = noise // 4 % self._num_tokens
        return choice if may_end or choice not in params.stop_token_ids else self._num_tokens

    def answer(self, request: SubmitRequest, config: EngineConfig) -> list[int]:
        """The tokens without any drafts."""
        params, tokens, output = request.params, list(request.prompt_ids), list[int]()
        most = config.max_model_len - len(tokens)
        ends = {*params.stop_token_ids} | (set() if params.ignore_eos else {EOS})
        while len(output) < (most if params.max_tokens is None else min(params.max_tokens, most)):
            tokens.append(self.choose(tokens, params, len(output)))
            output.append(tokens[-1])
            if output[-1] in ends and len(output) > params.min_tokens:
                break
        return output

    def continuation(self, tokens: SequenceOf[int], params: SamplingParams, output_index: int, most: int) -> list[int]:
        """What it chooses after these tokens, beyond any end."""
        text = list(tokens)
        for i in range(most):
            text.append(self.choose(text, params, output_index + i))
        return text[len(tokens) :]


def drafts_of(trunk: ScriptedTrunk, draw: random.Random) -> Draft:
    """Proposals that are right, wrong from some place on, noise, too long, or missing; with any chances."""

    def draft(tokens: SequenceOf[int], params: SamplingParams, output_index: int) -> Proposal | None:
        if draw.random() < 0.1:
            return None
        found = trunk.continuation(tokens, params, output_index, draw.randint(1, 12))
        kind = draw.random()
        if kind < 0.4:
            place = draw.randrange(len(found))
            found[place] = draw.choice([(found[place] + 1) % 4, EOS, VOCAB_SIZE - 1])
        elif kind < 0.5:
            found = [draw.randrange(VOCAB_SIZE) for _ in found]
        return Proposal("micro", found, [draw.choice([0.0, 0.3, 0.7, 0.95, 1.0]) for _ in found])

    return draft


def no_drafts(tokens: SequenceOf[int], params: SamplingParams, output_index: int) -> Proposal | None:
    return None


class VerifyingRunner:
    """Runs a scripted trunk over a pool that remembers what each slot was fed after what, and checks the scheduler.

    draft: the micro decoder, which is asked for nothing and limited by nothing.
    """

    def __init__(
        self,
        trunk: ScriptedTrunk,
        draft: Draft = no_drafts,
        out_of_memory: Callable[[int, ScheduledBatch], bool] = lambda step, batch: False,
    ) -> None:
        self._trunk, self._draft, self._out_of_memory = trunk, draft, out_of_memory
        self.config = fake_config()  # verified_core sets it
        self.num_steps = 0
        self.batches: list[list[tuple[str, int, int]]] = []  # (request id, slots, drafts) of each step
        self.seen: Counter[str] = Counter()
        self._pool: dict[int, int] = {}
        self._chains: dict[Sequence, list[int]] = {}
        self._places: dict[int, int] = {}  # of slots of answers that settle, the token that each holds
        self._settled: dict[Sequence, dict[int, int]] = {}  # of sequences that settle, what each token's slot holds
        self._reached = Counter[Sequence]()  # tokens of them that were computed once, and are no rejected drafts

    def settle(self, chunk: SettlingChunk) -> None:
        """Who stays depends on what the slots hold, as it does in a model."""
        assert chunk.positions == [self._places[slot] for slot in chunk.candidates]
        held = [self._pool[slot] for slot in chunk.candidates]
        best = sorted(sorted(range(len(held)), key=lambda place: held[place])[: len(chunk.kept_at)])
        moved = [(source, to) for source, to in chunk.moves]
        moved += [(chunk.candidates[place], to) for place, to in zip(best, chunk.kept_at, strict=True)]
        for pool in (self._pool, self._places):
            pool.update({to: pool[source] for source, to in moved if source in pool})
        self.seen["settled"] += len(held)

    def run(self, batch: ScheduledBatch) -> BatchResult:
        self.num_steps += 1
        if self._out_of_memory(self.num_steps, batch):
            raise OutOfMemory("scripted")
        self.batches.append([(i.sequence.request_id, i.num_slots, i.num_rows - i.num_slots) for i in batch.sequences])
        self._check(batch)
        for item in batch.sequences:
            self._write(item)
        groups = [self._emit(item) for item in batch.sequences if item.emits]
        return BatchResult(groups, {item.sequence.request_id: self._score(item) for item in batch.sequences})

    def _check(self, batch: ScheduledBatch) -> None:
        assert batch.num_rows <= self.config.max_num_batched_slots, "over the budget"
        several = [item.num_slots > 1 for item in batch.sequences]
        assert several == sorted(several), "several slots before one"
        written = Counter[int]()
        for item in batch.sequences:
            sequence, start = item.sequence, item.sequence.num_computed_slots
            assert item.num_slots >= 1
            may_emit = start + item.num_slots == sequence.num_slots and sequence.num_tokens_left > 0
            assert item.emits == may_emit, "emits at the wrong place"
            if item.drafts is not None:
                assert item.emits
                assert item.num_slots == 1
                assert sequence.params.confidence != 1
                assert 1 < item.num_rows <= min(self.config.max_group, sequence.num_tokens_left)
                self.seen["drafted"] += item.num_rows - 1
            written.update(self._physical(sequence, slot) for slot in range(start, start + item.num_rows))
        assert max(written.values()) == 1, "a slot is written twice"
        # Nobody who takes part reads what is written, except who writes it.
        for item in batch.sequences:
            read = {self._physical(item.sequence, slot) for slot in range(item.sequence.num_computed_slots)}
            assert not read & written.keys(), "a slot that is read is written"

    def _write(self, item: ScheduledSequence) -> None:
        sequence, start = item.sequence, item.sequence.num_computed_slots
        if sequence.settling is not None:
            self._write_settling(item)
            return
        chain = self._chain(sequence)
        for slot in range(start):
            assert self._pool.get(self._physical(sequence, slot)) == chain[slot], f"slot {slot} is stale"
        newest = chain[start : start + item.num_slots]
        for token_id in item.drafts.token_ids if item.drafts is not None else ():
            newest.append(hash((newest[-1], token_id)))
        for slot, content in enumerate(newest, start):
            self._pool[self._physical(sequence, slot)] = content

    def _write_settling(self, item: ScheduledSequence) -> None:
        """What a slot holds depends on its token and on all slots that are there when it is computed: a replay must
        find the same ones."""
        sequence, start = item.sequence, item.sequence.num_computed_slots
        text = [*sequence.prompt_ids, *sequence.output_ids, *(item.drafts.token_ids if item.drafts else ())]
        held = self._settled.setdefault(sequence, dict(enumerate(self._chain(sequence))))
        settled = range(len(sequence.prompt_ids), sequence.num_settled_slots)
        places = [
            self._places[self._physical(sequence, slot)] if slot in settled else sequence.slot_position(slot)
            for slot in range(start)
        ]
        for slot, place in enumerate(places):
            assert self._pool.get(self._physical(sequence, slot)) == held[place], f"slot {slot} is stale"
        self._reached[sequence] = max(self._reached[sequence], places[-1] + 1 if places else 0)
        last = start + item.num_slots - 1
        for slot in range(start, start + item.num_rows):
            drafted = max(slot - last, 0)
            place = sequence.slot_position(min(slot, last)) + drafted
            content = hash((held[place - 1] if place else hash(sequence.cache_salt), text[place]))
            if len(places) < place:  # else it is what it would be in a prompt
                content = hash((content, *(held[p] for p in places)))
            if place < len(sequence.prompt_ids):
                content = held[place]  # others with the same prompt read it
            elif place < self._reached[sequence]:
                assert held[place] == content, f"token {place} was computed among other slots before"
            held[place] = content
            places.append(place)
            self._pool[self._physical(sequence, slot)] = content
            self._places[self._physical(sequence, slot)] = place

    def _emit(self, item: ScheduledSequence) -> GroupResult:
        sequence, params = item.sequence, item.sequence.params
        tokens, first = [*sequence.prompt_ids, *sequence.output_ids], sequence.num_output_tokens
        group: list[int] = []
        for draft in [*(item.drafts.token_ids if item.drafts is not None else ()), -1]:
            group.append(self._trunk.choose([*tokens, *group], params, first + len(group)))
            if group[-1] != draft:
                break
        self.seen["accepted"] += len(group) - 1
        proposal = self._draft([*tokens, *group], params, first + len(group))
        logprobs = None
        if params.logprobs is not None:
            logprobs = [scripted_logprobs(first + i, token_id, params.logprobs) for i, token_id in enumerate(group)]
        return GroupResult(group, [0.5] * len(group), logprobs, proposal)

    def _score(self, item: ScheduledSequence) -> list:  # type: ignore[type-arg]
        sequence = item.sequence
        k = sequence.params.prompt_logprobs or 0
        return [scripted_logprobs(1000 + i, sequence.prompt_ids[i], k) for i in sequence.unscored(item.num_slots)]

    def _chain(self, sequence: Sequence) -> list[int]:
        """For each slot, a hash of what it and all before it are fed."""
        chain = self._chains.setdefault(sequence, [])
        number = sequence.num_slots if sequence.settling is None else len(sequence.prompt_ids)
        for slot in range(len(chain), number):
            [token_id] = sequence.slot_tokens(slot)
            assert sequence.slot_position(slot) == slot
            chain.append(hash((chain[-1] if chain else hash(sequence.cache_salt), token_id)))
        return chain

    def _physical(self, sequence: Sequence, slot: int) -> int:
        size = self.config.block_size
        return sequence.block_ids[slot // size] * size + slot % size


def free_rows(micro_drafts: int = 7) -> DraftPolicy:
    """Drafts cost nothing, so all that have a chance above 0 are checked."""
    return policy_of((1.0, 1.0), micro_drafts)


def policy_of(steps: SequenceOf[float], micro_drafts: int = 7, micro_step: float = 0.0) -> DraftPolicy:
    """steps: milliseconds of a step of 1, 2, ... rows."""
    rows = tuple(range(1, len(steps) + 1))
    return DraftPolicy(StepCosts(MeasuredCosts(rows, tuple(steps), (micro_step,) * len(steps))), micro_drafts)


def verified_core(
    runner: VerifyingRunner,
    config: EngineConfig | None = None,
    policy: DraftPolicy | None = None,
    clock: Callable[[], float] = lambda: 0.0,
) -> EngineCore:
    """policy: None for free_rows."""
    config = config or verified_config()
    runner.config = config
    grammars = Grammars(ByteTokenizer, VOCAB_SIZE, config.eos_token_ids)
    return EngineCore(config, runner, clock, grammars, policy or free_rows(), runner.settle)


def verified_config(**changes: object) -> EngineConfig:
    return fake_config(**{"groups": "verified", "max_group": 8, **changes})
