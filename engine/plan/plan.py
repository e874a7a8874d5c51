"""What a machine can serve: from a model's shape and memory to slots, requests at once and limits of speed. No torch.

A request takes prompt + answer / g slots, with g tokens per KV: a prompt token takes one slot, a group takes one. A
server with one token a slot takes prompt + answer. The pool is sized by the engine's own rule (pool.py). This module
reads no files and prints nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hamburger.engine.core.pool import blocks_of_pool, pool_share
from hamburger.engine.plan.shape import Shape
from hamburger.engine.types.settling import Settling
from hamburger.model.config import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Each of them, where several GPUs share a model; kv_cache_memory is of all together.

    memory_bytes: all that the model may use, None if only the pool's size is known; reserved_bytes: of it, what
    others take. bandwidth: bytes a second that can be read; None leaves speed out.
    """

    device: Literal["cpu", "cuda"] = "cuda"
    memory_bytes: int | None = None
    reserved_bytes: int = 0
    kv_cache_memory: int | None = None
    bandwidth: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one request is, in tokens, and how the server is set; None leaves a setting open.

    settling: when old tokens of the answer give slots back; None: never. max_loras: adapters, each of max_lora_rank.
    """

    prompt_tokens: int
    output_tokens: int
    tokens_per_kv: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    block_size: int = 32
    settling: Settling | None = None
    max_loras: int = 0
    max_lora_rank: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Tokens a second that reading weights and KV alone would allow: no more can be had, a real server has less. But
    accepted drafts, of which a plan knows nothing, make more of one token a pass."""

    one_stream: float
    one_stream_plain: float
    all_requests: float
    all_requests_plain: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer. `plain` is a server of the same memory and weights with one token a slot. Bytes are those of each of
    num_gpus, but parameters are all.

    tokens_per_kv: of a whole answer. tokens_per_pass: of its passes, drafts aside. slots_per_request: the most that one
    holds at a time. loras_bytes: what adapters will take.
    """

    model: str
    num_gpus: int
    parameters: int
    weights_bytes: int
    loras_bytes: int
    slot_bytes: int
    pool_bytes: int
    pool_blocks: int
    pool_slots: int
    max_model_len: int
    prompt_tokens: int
    output_tokens: int
    tokens_per_kv: float
    tokens_per_pass: float
    slots_per_request: int
    slots_per_request_plain: int
    concurrent_requests: int
    concurrent_requests_plain: int
    max_num_seqs: int | None
    speed: Speed | None


def make_plan(shape: Shape, machine: Machine, load: Load) -> Plan:
    """Raises ConfigError that names the field when it does not fit together, or into the memory."""
    ratio = _tokens_per_kv(shape, load)
    context = _context(shape, load)
    loras = _loras_bytes(shape, load)
    num_blocks = blocks_of_pool(
        _pool_budget(shape, machine, loras),
        shape.slot_bytes,
        block_size=load.block_size,
        max_model_len=context,
        max_num_seqs=load.max_num_seqs,
    )
    if load.settling is not None and shape.slides_beyond is not None and context > shape.slides_beyond:
        remedy = f", or set max_model_len to {shape.slides_beyond} at most" if shape.slides_beyond else ""
        raise ConfigError(
            f"settle is on, but layers of {shape.name} see a sliding window of slots, which would move: leave it out"
            f"{remedy}."
        )
    held, most = _answer_slots(ratio, load)
    slots = load.prompt_tokens + most
    plain_slots = load.prompt_tokens + load.output_tokens
    concurrent, concurrent_plain = (_max_concurrent(num_blocks, needed, load) for needed in (slots, plain_slots))
    speed = None
    if machine.bandwidth is not None:
        speed = _speed(shape, machine.bandwidth, load, ratio, held, concurrent, concurrent_plain)
    num_slots = num_blocks * load.block_size
    return Plan(
        model=shape.name,
        num_gpus=shape.num_parts,
        parameters=shape.parameters,
        weights_bytes=shape.weights_bytes,
        loras_bytes=loras,
        slot_bytes=shape.slot_bytes,
        pool_bytes=num_slots * shape.slot_bytes,
        pool_blocks=num_blocks,
        pool_slots=num_slots,
        max_model_len=context,
        prompt_tokens=load.prompt_tokens,
        output_tokens=load.output_tokens,
        tokens_per_kv=load.output_tokens / held if load.settling else ratio,
        tokens_per_pass=ratio,
        slots_per_request=slots,
        slots_per_request_plain=plain_slots,
        concurrent_requests=concurrent,
        concurrent_requests_plain=concurrent_plain,
        max_num_seqs=load.max_num_seqs,
        speed=speed,
    )


def _tokens_per_kv(shape: Shape, load: Load) -> float:
    ratio = shape.tokens_per_kv if load.tokens_per_kv is None else load.tokens_per_kv
    if shape.max_group is not None and ratio > shape.max_group:
        what = "a plain base, which emits one token a slot" if shape.max_group == 1 else "a HAMburger"
        remedy = "plan it with --graft" if shape.max_group == 1 else "lower it"
        raise ConfigError(
            f"tokens_per_kv is {ratio:g}, but {shape.name} is {what}: it can be at most {shape.max_group}; {remedy}."
        )
    return ratio


def _answer_slots(ratio: float, load: Load) -> tuple[int, int]:
    """At the answer's end, and at most."""
    if load.settling is None:
        return (slots := math.ceil(load.output_tokens / ratio)), slots
    if ratio != 1:
        raise ConfigError(
            f"settle is on, but there are {ratio:g} tokens per KV before, and slots of several tokens do not settle: "
            "plan groups verified, or leave settle out."
        )
    return load.settling.slots(load.output_tokens), load.settling.most_slots(load.output_tokens)


def _context(shape: Shape, load: Load) -> int:
    longest = load.prompt_tokens + load.output_tokens
    if load.max_model_len is not None and shape.max_model_len is not None and load.max_model_len > shape.max_model_len:
        raise ConfigError(
            f"max_model_len is {load.max_model_len}, but the model was made for {shape.max_model_len} tokens: lower it."
        )
    context = load.max_model_len or shape.max_model_len or longest
    if longest > context:
        raise ConfigError(
            f"prompt_tokens {load.prompt_tokens} and output_tokens {load.output_tokens} are {longest} together, but "
            f"max_model_len is {context}: shorten the request or raise it."
        )
    return context


def _loras_bytes(shape: Shape, load: Load) -> int:
    if not load.max_loras:
        return 0
    if shape.loras is None:
        raise ConfigError("max_loras needs the shapes of the model's linears: name a model, not its parameters.")
    return load.max_loras * shape.loras(load.max_lora_rank)


def _pool_budget(shape: Shape, machine: Machine, loras_bytes: int) -> int:
    """Bytes, as the engine finds them once the weights are loaded."""
    pool = None if machine.kv_cache_memory is None else machine.kv_cache_memory // shape.num_parts
    if machine.memory_bytes is None:
        if pool is None:
            raise ConfigError(
                "memory is missing: give the machine's with --memory, or the KV pool's with --kv-cache-memory."
            )
        return pool
    free = machine.memory_bytes - machine.reserved_bytes - shape.weights_bytes - loras_bytes
    if free < (pool or 1):
        of_each = "" if shape.num_parts == 1 else f" on each of {shape.num_parts} GPUs"
        needed = "" if not loras_bytes else f" and LoRA adapters of {loras_bytes / 2**30:.2f} GiB"
        needed += "" if pool is None else f" and a KV pool of {pool / 2**30:.2f} GiB"
        raise ConfigError(
            f"memory is {machine.memory_bytes / 2**30:.2f} GiB, which does not hold {shape.name}'s weights of "
            f"{shape.weights_bytes / 2**30:.2f} GiB{of_each}{needed} beside {machine.reserved_bytes / 2**30:.2f} GiB "
            "that are reserved: take a larger machine, more GPUs (tensor_parallel_size), a smaller model, or fewer "
            "bytes a number (dtype)."
        )
    return pool_share(machine.device, free) if pool is None else pool


def _max_concurrent(num_blocks: int, slots: int, load: Load) -> int:
    """Requests that hold their whole KV at the same time."""
    fits = num_blocks // -(-slots // load.block_size)
    return fits if load.max_num_seqs is None else min(fits, load.max_num_seqs)


def _speed(
    shape: Shape, bandwidth: float, load: Load, ratio: float, held: int, concurrent: int, concurrent_plain: int
) -> Speed:
    reads = shape.reads
    if reads is None:
        raise ConfigError("bandwidth says a speed only with the model's whole shape: name a model, not its parameters.")

    def tokens_per_second(streams: int, tokens: float, trunk: int, held: int) -> float:
        # Averaged over its steps, half of an answer lies in the pool. A batch runs a micro-step if any of its groups
        # goes on, so tokens - 1 is the least that it runs, in the fewest steps if these groups are full.
        slots = load.prompt_tokens + held / 2
        more = tokens - 1
        merging = more / (shape.max_group - 1) * reads.merge if more and shape.max_group else 0
        # Streams choose experts as if by lot, each without regard to the others.
        unread = reads.experts * (1 - reads.expert_share) ** streams
        weights = trunk - unread + reads.head + more * reads.micro + merging
        return streams * tokens * bandwidth / (weights + streams * slots * shape.slot_bytes)

    return Speed(
        one_stream=tokens_per_second(1, ratio, reads.trunk, held),
        one_stream_plain=tokens_per_second(1, 1.0, reads.plain, load.output_tokens),
        all_requests=tokens_per_second(concurrent, ratio, reads.trunk, held),
        all_requests_plain=tokens_per_second(concurrent_plain, 1.0, reads.plain, load.output_tokens),
    )
