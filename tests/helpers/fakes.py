"""Stand-ins for tests, without torch: a scripted runner that checks what it is asked, and a byte tokenizer.

Request ids pick the script; a request without one gets random groups that depend on its prompt and seed alone.
fake_engines.py makes engines of them.
"""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

from gates import Gate
from hamburger.engine.core.batch import BatchResult, GroupResult, ScheduledBatch
from hamburger.engine.core.sequence import Sequence
from hamburger.engine.types.errors import OutOfMemory
from hamburger.engine.types.messages import TokenLogprobs

BOS, EOS, PAD = 256, 257, 258
VOCAB_SIZE = 259
SPECIALS = {"<bos>": BOS, "<eos>": EOS, "<pad>": PAD}


class ByteTokenizer:
    """One token a byte, and three specials; the text of any token split is known by hand."""

    vocab_size = VOCAB_SIZE
    max_token_bytes = 5
    bos_token, bos_token_id = "<bos>", BOS
    eos_token, eos_token_id = "<eos>", EOS
    pad_token, pad_token_id = "<pad>", PAD
    chat_template = tool_template = "{{ messages }}"
    streams_bytes = True

    @property
    def loader(self) -> tuple[str, ...]:
        return (f"{type(self).__module__}:{type(self).__name__}",)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        ids = [BOS] if add_special_tokens else []
        for part in re.split("(<bos>|<eos>|<pad>)", text):
            ids += [SPECIALS[part]] if part in SPECIALS else part.encode()
        return ids

    def decode(self, ids: SequenceOf[int], *, skip_special_tokens: bool = True) -> str:
        data = b"".join(self.token_bytes(i) for i in ids if not (skip_special_tokens and self.is_special(i)))
        return data.decode(errors="replace")

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        return bytes([token_id]) if token_id < BOS else list(SPECIALS)[token_id - BOS].encode()

    def token_text(self, token_id: int) -> str:
        return chr(token_id) if token_id < BOS else list(SPECIALS)[token_id - BOS]

    def is_special(self, token_id: int) -> bool:
        return token_id >= BOS

    def apply_chat_template(self, messages: SequenceOf[Mapping[str, Any]], **kwargs: Any) -> str:
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return text + ("assistant: " if kwargs.get("add_generation_prompt", True) else "")


class ScriptedRunner:
    """Emits scripted groups, and checks the scheduler like a KV pool would.

    It stores what was written into each physical slot. Whenever a sequence emits, its whole context must be there, in
    its own blocks, written since its last admission, and its groups must be those that this runner emitted before.
    With a prefix cache, what another sequence with the same beginning wrote is as good, and blocks that nobody writes
    may be shared.

    scripts: request id -> groups; after the last one come end tokens. Others get random groups of 1..max_group tokens
        from `alphabet`, and an end token with chance `eos_chance` a token.
    gate: every step first waits for it. delay_seconds: every step takes so long.
    fail_at_step: this step (from 1) raises RuntimeError.
    out_of_memory: whether this step's memory does not hold its batch.
    """

    def __init__(
        self,
        scripts: Mapping[str, list[list[int]]] | None = None,
        *,
        max_group: int = 4,
        alphabet: bytes = b"abcdefgh ",
        eos_chance: float = 0.05,
        seed: int = 0,
        gate: Gate | None = None,
        delay_seconds: float = 0.0,
        fail_at_step: int | None = None,
        out_of_memory: Callable[[int, ScheduledBatch], bool] = lambda step, batch: False,
    ) -> None:
        self.scripts = dict(scripts or {})
        self.max_group = max_group
        self.alphabet = alphabet
        self.eos_chance = eos_chance
        self.seed = seed
        self.gate = gate
        self.delay_seconds = delay_seconds
        self.fail_at_step = fail_at_step
        self.out_of_memory = out_of_memory
        self._may_replay: set[Sequence] = set()  # since a step failed: nobody tells a runner whom that preempted
        self.block_size = 0  # set by fake_core
        self.max_batched_slots = 0  # set by fake_core
        self.shares = False  # set by fake_core: whether there is a prefix cache
        self.num_steps = 0
        self.batches: list[list[tuple[str, int, bool]]] = []  # (request id, slots, emits) of each step
        self.emitted: dict[str, list[list[int]]] = {}  # over a request's whole life, preemptions included
        self._emitted: dict[Sequence, list[list[int]]] = {}
        self._computed: dict[Sequence, int] = {}
        self._scored: dict[Sequence, int] = {}  # prompt tokens whose log-probabilities were given
        self.num_scored = 0
        self._pool: dict[int, object] = {}
        self._chains: dict[Sequence, list[int]] = {}  # for each slot, a hash of what it and all before it were fed

    def run(self, batch: ScheduledBatch) -> BatchResult:
        self.num_steps += 1
        self._wait(self.num_steps)
        return self._compute(batch)

    def launch(self, batch: ScheduledBatch) -> ScriptedStep:
        """Its groups are known to this runner at once, and to the core when it asks for them."""
        self.num_steps += 1
        return ScriptedStep(self, self.num_steps, self._compute(batch))

    def _wait(self, step: int) -> None:
        if self.gate is not None:
            self.gate.wait()
        if self.delay_seconds:
            time.sleep(self.delay_seconds)
        if step == self.fail_at_step:
            raise RuntimeError("scripted failure")

    def _compute(self, batch: ScheduledBatch) -> BatchResult:
        for sequence in batch.preempted:
            self._computed[sequence] = 0
        if self.out_of_memory(self.num_steps, batch):
            self._may_replay = {*self._computed}
            raise OutOfMemory("scripted")
        self.batches.append([(item.sequence.request_id, item.num_slots, item.emits) for item in batch.sequences])
        self._check_sharing(batch)
        _check(batch.num_slots <= self.max_batched_slots, "over the slot budget")
        _check(len({item.sequence.request_id for item in batch.sequences}) == len(batch.sequences), "scheduled twice")
        for item in batch.sequences:
            sequence, start = item.sequence, item.sequence.num_computed_slots
            if sequence in self._may_replay:
                self._may_replay.remove(sequence)
                if start != self._computed[sequence]:
                    self._computed[sequence] = 0
            _check(item.num_slots >= 1, "no slots")
            found = self.shares and not self._computed.get(sequence, 0) and start < sequence.num_slots
            _check(found or start == self._computed.get(sequence, 0), "slots are not contiguous")
            end = self._computed[sequence] = start + item.num_slots
            may_emit = end == sequence.num_slots and sequence.num_tokens_left > 0
            _check(item.emits == may_emit, "emits at the wrong place")
            for slot in range(start, end):
                self._pool[self._physical(sequence, slot)] = self._content(sequence, slot)
        scores = {item.sequence.request_id: self._score(item.sequence, item.num_slots) for item in batch.sequences}
        groups = [self._emit(item.sequence) for item in batch.sequences if item.emits]
        return BatchResult(groups, {request_id: entries for request_id, entries in scores.items() if entries})

    def script(self, sequence: Sequence) -> list[int]:
        """The group that this sequence emits next."""
        index = len(self._emitted.get(sequence, ()))
        groups = self.scripts.get(sequence.request_id)
        if groups is not None:
            return groups[index] if index < len(groups) else [EOS]
        draw = random.Random(f"{self.seed} {sequence.params.seed} {sequence.prompt_ids} {index}")
        size = draw.randint(1, self.max_group)
        return [EOS if draw.random() < self.eos_chance else draw.choice(self.alphabet) for _ in range(size)]

    def _emit(self, sequence: Sequence) -> GroupResult:
        for slot in range(sequence.num_slots):
            written = self._pool.get(self._physical(sequence, slot))
            _check(written == self._content(sequence, slot), f"slot {slot} is stale")
        emitted = self.emitted[sequence.request_id] = self._emitted.setdefault(sequence, [])
        known = len(emitted) - sequence.awaits_group
        _check(sequence.groups == emitted[:known], "groups were lost, changed or emitted again")
        first = sum(map(len, emitted))
        group = self.script(sequence)
        emitted.append(group)
        stop_probs = [scripted_stop_prob(first + i, token_id) for i, token_id in enumerate(group)]
        if sequence.params.logprobs is None:
            return GroupResult(group, stop_probs)
        logprobs = [
            scripted_logprobs(first + i, token_id, sequence.params.logprobs) for i, token_id in enumerate(group)
        ]
        return GroupResult(group, stop_probs, logprobs)

    def _score(self, sequence: Sequence, num_slots: int) -> list[TokenLogprobs]:
        """Each prompt token but the first is scored once in a request's life, by the slot before it."""
        k = sequence.params.prompt_logprobs
        start, scored = sequence.num_computed_slots, self._scored.get(sequence, 1)
        end = min(start + num_slots + 1, len(sequence.prompt_ids))
        if k is None or sequence.prompt_logprobs is None or end <= scored:
            return []
        self._scored[sequence] = end
        self.num_scored += end - scored
        return [scripted_score(i, sequence.prompt_ids[i], k) for i in range(scored, end)]

    def _check_sharing(self, batch: ScheduledBatch) -> None:
        holders = Counter(block_id for item in batch.sequences for block_id in item.sequence.block_ids)
        _check(self.shares or all(n == 1 for n in holders.values()), "a block is shared")
        for item in batch.sequences:
            first = item.sequence.num_computed_slots // self.block_size
            last = (item.sequence.num_computed_slots + item.num_slots - 1) // self.block_size
            written = item.sequence.block_ids[first : last + 1]
            _check(all(holders[block_id] == 1 for block_id in written), "a shared block is written")

    def _content(self, sequence: Sequence, slot: int) -> object:
        """What a slot's KV depends on."""
        fed, position = self._fed(sequence, slot)
        if not self.shares:
            return sequence, slot, position, fed
        chain = self._chains.setdefault(sequence, [])
        for i in range(len(chain), slot + 1):
            chain.append(hash((chain[-1] if chain else 0, *self._fed(sequence, i)[0])))
        return sequence.cache_salt, position, chain[slot]

    def _fed(self, sequence: Sequence, slot: int) -> tuple[tuple[int, ...], int]:
        """A slot's tokens and position. Of a group that is awaited they are those that this runner itself emitted."""
        if slot < len(sequence.prompt_ids) + len(sequence.groups):
            return tuple(sequence.slot_tokens(slot)), sequence.slot_position(slot)
        emitted = self._emitted[sequence]
        _check(sequence.awaits_group and len(emitted) == len(sequence.groups) + 1, "an unknown group is fed")
        return tuple(emitted[-1]), sequence.num_tokens - 1 + len(emitted[-1])

    def _physical(self, sequence: Sequence, slot: int) -> int:
        return sequence.block_ids[slot // self.block_size] * self.block_size + slot % self.block_size


class ScriptedStep:
    """A LaunchedStep: it ran when it was launched, as on a device that is never behind; result() waits for the gate."""

    def __init__(self, runner: ScriptedRunner, number: int, result: BatchResult) -> None:
        self._runner, self._number, self._result = runner, number, result

    def result(self) -> BatchResult:
        self._runner._wait(self._number)
        return self._result

    def then(self, batch: ScheduledBatch) -> ScriptedStep:
        return self._runner.launch(batch)


def scripted_stop_prob(output_index: int, token_id: int) -> float:
    return (output_index * 7 + token_id) % 101 / 100


def scripted_logprobs(output_index: int, token_id: int, num_top: int) -> TokenLogprobs:
    """Recognisable values: the token's own log-probability is that of the likeliest rival, itself."""
    logprob = -(output_index + 1) / 8 - token_id / 4096
    return TokenLogprobs(logprob, [((token_id + k) % VOCAB_SIZE, logprob - k) for k in range(num_top)])


def scripted_score(place: int, token_id: int, num_top: int) -> TokenLogprobs:
    """The same of a prompt's token."""
    return replace(scripted_logprobs(1000 + place, token_id, num_top), rank=1)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(f"ScriptedRunner: {message}")
