"""Cores whose decoding steps are CUDA graphs, or the same pieces replayed eagerly, and requests of every kind."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from hamburger.engine.core.core import EngineCore
from hamburger.engine.core.overlap import OverlappedCore
from hamburger.engine.device.runner import Runner
from hamburger.engine.drafting.policy import DraftPolicy
from hamburger.engine.grammar.matching import Grammars
from hamburger.engine.grammar.writing import choice_grammar, json_grammar, regex_grammar
from hamburger.engine.types.config import VERIFIED_GROUP, EngineConfig
from hamburger.engine.types.messages import GroupOutput, SubmitRequest
from hamburger.model.config import ModelConfig
from hamburger.model.graphs.capture import Capture
from hamburger.model.graphs.decode_graphs import DecodeGraphs
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.steps import EagerSteps
from small_models import graft_config, grafted, params, trunk_config
from trunk_shapes import SHAPES as TRUNKS

BLOCK, CONTEXT, ROWS = 4, 128, 11
MODELS: dict[str, ModelConfig] = {
    "positions": ModelConfig(trunk=trunk_config(), graft=graft_config()),
    "fused": ModelConfig(trunk=trunk_config(), graft=graft_config(features="fused", micro_norm=True)),
    "short_list": ModelConfig(trunk=trunk_config(), graft=graft_config(features="fused", short_list_size=40)),
    "plain_base": ModelConfig(trunk=trunk_config(tie_word_embeddings=False)),
    "dynamic_rope": ModelConfig(trunk=trunk_config(**TRUNKS["dynamic_rope"]), graft=graft_config()),
    "merge_adapter": grafted(adapter_rank=32),
    "sliding": ModelConfig(trunk=trunk_config(**TRUNKS["qwen2_sliding"]), graft=graft_config()),
    "gemma3": ModelConfig(trunk=trunk_config(**TRUNKS["gemma3"]), graft=graft_config()),
    "smollm3": ModelConfig(trunk=trunk_config(**TRUNKS["smollm3"]), graft=graft_config()),
}


def graphs_core(
    model: EagerSteps,
    capture: Capture,
    num_blocks: int,
    *,
    max_rows: int = ROWS,
    overlap: bool = False,
    captured_rows: int | None = None,
    policy: DraftPolicy | None = None,
) -> EngineCore:
    """captured_rows: of the largest batches that are, if others than max_rows. policy: of verified groups' drafts."""
    verifies = policy is not None
    config = EngineConfig(
        max_model_len=CONTEXT,
        max_num_seqs=max_rows,
        max_num_batched_slots=32,
        block_size=BLOCK,
        num_blocks=num_blocks,
        eos_token_ids=(1,),
        max_group=VERIFIED_GROUP if verifies else model.config.max_group,
        groups="verified" if verifies else "composed",
    )
    cache = PagedKVCache(model.config.trunk, num_blocks, BLOCK, torch.float32, model.device)
    for data in cache.data:  # what nobody has written must not matter
        data[:num_blocks].fill_(1e4)
    graphs = DecodeGraphs(
        model,
        cache,
        capture,
        max_rows=captured_rows or max_rows,
        max_columns=CONTEXT // BLOCK,
        is_verified=verifies,
    )
    graphs.prepare()
    runner = Runner(graphs, cache, groups=config.groups)
    if verifies:
        return EngineCore(config, runner, lambda: 0.0, ascii_grammars(), policy)
    return (OverlappedCore if overlap else EngineCore)(config, runner, lambda: 0.0, ascii_grammars())


class Ascii:
    """The models' 96 tokens: two special ones and the characters from space to }."""

    vocab_size = 96

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [ord(character) - 30 for character in text]

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        return b"" if token_id < 2 else bytes([token_id + 30])

    def is_special(self, token_id: int) -> bool:
        return token_id < 2


def ascii_grammars() -> Grammars:
    return Grammars(Ascii, Ascii.vocab_size, (1,))


def guided(asked: list[SubmitRequest], every: int = 3) -> list[SubmitRequest]:
    """One in `every` of the requests gets a grammar; it keeps its other wishes, but for min_tokens."""
    grammars = [json_grammar(), regex_grammar("[a-f ]{30,60}"), choice_grammar(["yes, of course", "yes", "never"])]
    found = []
    for i, request in enumerate(asked):
        if i % every == 0:
            changed = replace(request.params, grammar=grammars[i // every % len(grammars)], min_tokens=0)
            request = replace(request, params=changed)
        found.append(request)
    return found


def requests(seed: int, number: int = 14) -> list[SubmitRequest]:
    """Of every kind: greedy, sampled and filtered, penalties, bias, log-probabilities of answers and prompts."""
    draw = random.Random(seed)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9},
        {"temperature": 1.2, "top_p": 0.8, "top_k": 30},
        {"temperature": 0.7, "min_p": 0.05},
        {"presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"repetition_penalty": 1.3, "temperature": 0.8},
        {"logit_bias": {5: 4.0, 6: -100.0}},
        {"min_tokens": 12, "max_tokens": 20},
        {"logprobs": 3},
        {"logprobs": 0, "temperature": 1.0},
        {"prompt_logprobs": 2},
        {"stop_token_ids": tuple(range(40, 60))},
    ]
    asked = []
    for i in range(number):
        prompt = [draw.randrange(2, 96) for _ in range(draw.randint(1, 30))]
        how = {"confidence": draw.choice([0.0, 0.3, 0.5, 0.8, 1.0]), "max_tokens": draw.randint(10, 40), "seed": i}
        asked.append(SubmitRequest(str(i), prompt, params(**{**how, **draw.choice(kinds)}), 0.0))
    return asked


def assert_same(ours: dict[str, list[GroupOutput]], plain: dict[str, list[GroupOutput]]) -> None:
    for request_id, expected in plain.items():
        found = ours[request_id]
        assert [o.token_ids for o in found] == [o.token_ids for o in expected], request_id
        for a, b in zip(found, expected, strict=True):
            assert a.stop_probs == pytest.approx(b.stop_probs, abs=1e-5)
            assert (a.logprobs is None) == (b.logprobs is None)
            for x, y in zip(a.logprobs or [], b.logprobs or [], strict=True):
                assert x.logprob == pytest.approx(y.logprob, abs=1e-4)
                assert [token_id for token_id, _ in x.top] == [token_id for token_id, _ in y.top]
