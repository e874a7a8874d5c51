"""Grammars in the core: answers always follow them, in company and at every confidence, and what fails, fails alone."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest
import torch

from fake_engines import fake_core
from fakes import EOS, VOCAB_SIZE, ByteTokenizer, ScriptedRunner
from hamburger.engine.core.core import EngineCore
from hamburger.engine.device.runner import Runner
from hamburger.engine.grammar.matching import Grammars
from hamburger.engine.grammar.writing import json_grammar
from hamburger.engine.types.config import EngineConfig
from hamburger.engine.types.messages import AbortRequest, RequestFailed, StepOutputs, SubmitRequest
from hamburger.engine.types.sampling_params import SamplingParams
from hamburger.model.config import ModelConfig
from hamburger.model.kv_cache import PagedKVCache
from slow_cases import slow
from small_models import CPU, graft_config, params, random_model, trunk_config
from tasks.random_schemas import random_schema


def submit(core: EngineCore, name: str, grammar: str, **fields: Any) -> None:
    core.add(SubmitRequest(name, [1, 2], SamplingParams(seed=0, grammar=grammar, **fields), 0.0))


def still() -> float:
    return 0.0


def test_an_answer_ends_inside_a_group_with_its_grammar() -> None:
    core = fake_core(ScriptedRunner({"a": [[*b'{"'], [*b'a":1'], [*b"}xyz"]]}), clock=still)
    submit(core, "a", json_grammar())
    outputs = [core.step().outputs[0] for _ in range(3)]
    assert bytes(token for output in outputs for token in output.token_ids) == b'{"a":1}'
    assert [output.finish_reason for output in outputs] == [None, None, "stop"]
    assert outputs[-1].stop_token_id is None
    assert len(outputs[-1].stop_probs) == 1
    assert not core.has_work
    core.check_integrity()


def test_a_token_that_the_grammar_forbids_fails_the_request_and_no_other() -> None:
    core = fake_core(ScriptedRunner({"a": [[*b"{"], [*b"x"]], "b": [[65], [EOS]]}), clock=still)
    submit(core, "a", json_grammar())
    core.add(SubmitRequest("b", [1], SamplingParams(seed=0), 0.0))
    steps = [core.step(), core.step()]
    assert [(f.request_id, f.kind) for f in steps[1].failures] == [("a", "grammar")]
    assert [o.finish_reason for o in steps[1].outputs if o.request_id == "b"] == ["stop"]
    assert not core.has_work
    core.check_integrity()


def test_a_grammar_that_does_not_compile_fails_its_request() -> None:
    core = fake_core(ScriptedRunner(), clock=still)
    submit(core, "a", json_grammar({"type": "foo"}))
    assert core.has_work
    [failure] = core.step().failures
    assert isinstance(failure, RequestFailed)
    assert (failure.request_id, failure.kind) == ("a", "grammar")
    assert not core.has_work
    submit(core, "b", json_grammar({"type": "foo"}))
    assert [f.request_id for f in core.fail_all("draining", "x").failures] == ["b"]
    assert not core.has_work


class Pieces:
    """Every byte, some pieces of JSON of several characters, two special tokens, and room that no token fills."""

    vocab_size = 290

    def __init__(self) -> None:
        several = ['{"', '":', "true", "false", "null", "name", "12", "00", "ä", "cat", "dog", "日", "本"]
        self.tokens = [b"", b"", *(bytes([b]) for b in range(256)), b'": ', b'", "', b"\n  "]
        self.tokens += [piece.encode() for piece in several]

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [2 + byte for byte in text.encode()]

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        return self.tokens[token_id] if token_id < len(self.tokens) else b""

    def is_special(self, token_id: int) -> bool:
        return token_id < 2


PIECES = Pieces()


def core_with_pieces(short_list: int | None, num_blocks: int) -> EngineCore:
    graft = graft_config(short_list_size=short_list) if short_list else graft_config()
    model = random_model(ModelConfig(trunk=trunk_config(vocab_size=300), graft=graft), seed=1)
    config = EngineConfig(
        max_model_len=256, max_num_seqs=16, max_num_batched_slots=64, block_size=4, num_blocks=num_blocks,
        eos_token_ids=(1,), max_group=4,
    )  # fmt: skip
    runner = Runner(model, PagedKVCache(model.config.trunk, num_blocks, 4, torch.float32, CPU))
    return EngineCore(config, runner, still, Grammars(lambda: PIECES, 300, (1,)))


def answers(core: EngineCore, grammars: Sequence[str], confidence: float) -> tuple[list[str | None], list[int]]:
    """The text of each answer that ended with its grammar, else None; and the sizes of all groups."""
    for i, grammar in enumerate(grammars):
        sampling = params(confidence=confidence, temperature=1.0, seed=i, max_tokens=200, grammar=grammar)
        core.add(SubmitRequest(str(i), [2 + i % 90, 3], sampling, 0.0))
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(grammars))}
    ends: dict[str, str] = {}
    sizes: list[int] = []
    while core.has_work:
        step: StepOutputs = core.step()
        core.check_integrity()
        assert step.failures == []
        for output in step.outputs:
            tokens[output.request_id] += output.token_ids
            sizes.append(len(output.token_ids))
            if output.finish_reason is not None:
                ends[output.request_id] = output.finish_reason
    texts: list[str | None] = []
    for name, ids in tokens.items():
        data = b"".join(PIECES.token_bytes(i) for i in ids if i != 1)
        texts.append(data.decode() if ends[name] == "stop" else None)
    return texts, sizes


@pytest.mark.parametrize(
    ("confidence", "short_list", "number"),
    [
        slow(0.0, None, 100),
        slow(0.5, None, 100),
        slow(1.0, None, 100),
        (0.0, None, 30),
        (1.0, None, 20),
        (0.0, 120, 30),
    ],
)
def test_random_schemas_are_followed_at_every_confidence(
    confidence: float, short_list: int | None, number: int
) -> None:
    draw = random.Random(11)
    schemas = [random_schema(draw) for _ in range(number)]
    core = core_with_pieces(short_list, num_blocks=120)  # short of what 16 answers need, so some are preempted
    texts, sizes = answers(core, [json_grammar(schema) for schema in schemas], confidence)
    finished = [(schema, text) for schema, text in zip(schemas, texts, strict=True) if text is not None]
    for schema, text in finished:
        jsonschema.validate(json.loads(text), schema)
    assert len(finished) > 0.6 * number
    assert (max(sizes) > 1) == (confidence < 1)


def test_rows_without_a_grammar_are_what_they_were() -> None:
    def tokens(*, beside: bool) -> list[list[int]]:
        core = core_with_pieces(None, 256)
        core.add(SubmitRequest("free", [5, 6, 7], params(max_tokens=30, temperature=0.7, confidence=0.0), 0.0))
        if beside:
            core.add(SubmitRequest("bound", [5, 6], params(max_tokens=30, grammar=json_grammar(), confidence=0.0), 0.0))
        found = []
        while core.has_work:
            found += [output.token_ids for output in core.step().outputs if output.request_id == "free"]
        return found

    assert tokens(beside=True) == tokens(beside=False)


def test_an_aborted_answer_leaves_nothing() -> None:
    core = core_with_pieces(None, 256)
    core.add(SubmitRequest("a", [5, 6], params(max_tokens=90, grammar=json_grammar()), 0.0))
    core.step()
    core.abort(AbortRequest("a"))
    core.check_integrity()
    assert not core.has_work


def test_a_grammar_that_failed_is_compiled_anew_for_the_next() -> None:
    core = fake_core(ScriptedRunner({"a": [[*b"{"], [*b"x"]]}), clock=still)
    submit(core, "a", json_grammar())
    assert core.grammars is not None
    before = core.grammars.compile(json_grammar())
    assert core.grammars.compile(json_grammar()) is before
    core.step()
    step = core.step()
    assert [output.request_id for output in step.outputs] == []  # what it chose last says nothing
    assert [failure.kind for failure in step.failures] == ["grammar"]
    assert core.grammars.compile(json_grammar()) is not before


def test_answers_of_one_grammar_share_it_only_so_often() -> None:
    grammars = Grammars(ByteTokenizer, VOCAB_SIZE, [EOS])
    first = grammars.compile(json_grammar())
    for _ in range(64):
        grammars.matcher(json_grammar())
    assert grammars.compile(json_grammar()) is not first
