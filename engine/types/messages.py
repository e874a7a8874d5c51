"""The typed values that cross between the engine core and AsyncEngine or LLM: plain Python, no tensors, no text.

wire.py carries exactly these between processes; nothing else is shared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from hamburger.engine.types.sampling_params import SamplingParams

FinishReason = Literal["stop", "length"]
# composed: a group is one slot, and what a micro-step chose is emitted. verified: each token has its slot, and
# micro-steps only draft what the trunk then chooses.
Groups = Literal["composed", "verified"]


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """To the core: generate one answer. `params.seed`, `.confidence` and `.max_tokens` are never None here."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    arrival_time: float  # time.monotonic() seconds
    priority: int = 0  # lower goes first
    cache_salt: str = ""  # only requests with the same one read each other's blocks
    client: str = ""  # who sends it: clients share the engine fairly
    scores_prompt: bool = True  # for prompt_logprobs; False where another request of the same prompt does it
    number: int = 0  # from 1, as they were sent to this engine; the core may get them in another order
    lora: int = 0  # the number of the LoRA adapter that its slots pass; 0: the base's


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """To the core: free this request's slots within a step. Unknown ids are ignored (it may just have finished)."""

    request_id: str


@dataclass(frozen=True, slots=True)
class LoadLora:
    """To the core: read the LoRA adapter in the folder `path`, for requests that name `number`: from 1, never twice."""

    number: int
    path: str


@dataclass(frozen=True, slots=True)
class UnloadLora:
    """To the core: forget an adapter as soon as no request uses it. No request that names it follows."""

    number: int


@dataclass(frozen=True, slots=True)
class LoraLoaded:
    """From the core, for each LoadLora. error: why it was not loaded, fit for the user; None: it was. is_fault: the
    server is at fault, not the adapter."""

    number: int
    error: str | None
    is_fault: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's log-probability (nats) and its likeliest rivals [(token id, log-probability)], best first.

    rank: of a prompt's token: 1 + how many are likelier.
    """

    logprob: float
    top: list[tuple[int, float]]
    rank: int | None = None


class CheckedDrafts(NamedTuple):
    """The drafts that one macro-step checked for a sequence, at least one.

    drafter: who made them: `micro` (the micro-step decoder), `lookup` or `prediction`. chances[i]: that draft i is
    accepted if those before it are. num_accepted: the first so many were what the trunk chose, and are in the answer.
    """

    drafter: str
    token_ids: list[int]
    chances: list[float]
    num_accepted: int


class GroupOutput(NamedTuple):
    """From the core: one trimmed group. `token_ids` holds 1 to max_group tokens; none where max_tokens is 0.

    stop_probs[i] = sigmoid(stop logit) after token i; a plain base model has no stop head and gives 1.0.
    drafts: what was checked, of verified groups; None where nothing was.
    finish_reason is set on a request's last group; stop_token_id is the end or stop token that ended it, if one did.
    scheduled_time: time.monotonic() of the step that first gave the request slots.
    prompt_logprobs: on the request's first output, if it asks for them: one entry a prompt token. The first token's is
        None, because nothing predicts it.
    cached_slots: on the request's first output: prompt slots that were found in the prefix cache.
    dropped_slots: of all tokens of the answer so far that settled, those without a slot.
    """

    request_id: str
    token_ids: list[int]
    stop_probs: list[float]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_token_id: int | None
    scheduled_time: float
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_slots: int = 0
    drafts: CheckedDrafts | None = None
    dropped_slots: int = 0

    def first(self, number: int) -> GroupOutput:
        """Its first tokens, behind which the answer was to go on."""
        drafts, logprobs = self.drafts, self.logprobs
        return self._replace(
            token_ids=self.token_ids[:number],
            stop_probs=self.stop_probs[:number],
            logprobs=None if logprobs is None else logprobs[:number],
            finish_reason=None,
            stop_token_id=None,
            drafts=None if drafts is None else drafts._replace(num_accepted=min(drafts.num_accepted, number)),
        )


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """From the core: the request ended without an answer. `kind` picks the error class that its caller gets."""

    request_id: str
    kind: Literal["queue_timeout", "engine_dead", "draining", "grammar", "out_of_memory", "lora"]
    message: str


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one engine step did (work done, before any trimming at stop strings) and the state after it."""

    num_running: int
    num_waiting: int
    num_preemptions: int
    used_slots: int
    total_slots: int
    prompt_slots: int  # prompt slots computed in this step (replays included)
    decoded_sequences: int  # sequences that emitted a group
    group_sizes: list[int]  # after trimming, one per sequence that emitted
    seconds: float  # wall time of the step
    cache_queries: int = 0  # slots of newly admitted sequences that were looked up in the prefix cache
    cache_hits: int = 0  # those of them that were found
    generated_slots: int = 0  # of the groups' tokens: one a group where groups are composed, else one a token
    drafts: list[CheckedDrafts] = field(default_factory=list)  # of the sequences for which any were checked
    settled_tokens: int = 0  # looked at before this step, those of replays not once more
    dropped_slots: int = 0  # of them given back


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """From the core: everything one step produced."""

    outputs: list[GroupOutput] = field(default_factory=list)
    failures: list[RequestFailed] = field(default_factory=list)
    stats: StepStats | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """From the core, once, when the engine is ready: the facts that requests are validated against.

    max_group: most tokens of a group, which are most rows of a sequence in a step where groups are verified.
    expected_tokens: total_slots x the tokens per KV expected at the default confidence (1.0 for a plain base, and where
        groups are verified).
    """

    model: str  # what was loaded, for people
    is_plain_base: bool  # True: every group has one token
    max_model_len: int  # tokens
    max_group: int
    default_confidence: float
    vocab_size: int
    eos_token_ids: list[int]
    block_size: int  # slots
    total_slots: int
    expected_tokens: int
    max_num_seqs: int
    max_num_batched_slots: int
    device: str
    dtype: str
    quantization: str = "none"  # or int8, int4
    kv_cache_dtype: str = "bfloat16"
    groups: Groups = "composed"
    settling: str = ""  # when old tokens of answers give slots back, as its settings say; empty where they never do

    @property
    def settles(self) -> bool:
        return bool(self.settling)
