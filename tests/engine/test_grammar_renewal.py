"""A grammar whose lexer others have used up is made anew: an answer that goes well alone goes well in any company."""

from __future__ import annotations

import pytest

from fakes import EOS, VOCAB_SIZE, ByteTokenizer
from hamburger.engine.core.core import EngineCore
from hamburger.engine.grammar import matching
from hamburger.engine.grammar.matching import Grammars
from hamburger.engine.grammar.writing import regex_grammar
from hamburger.engine.types.messages import RequestFailed, SubmitRequest
from hamburger.model.config import ModelConfig
from small_models import core_of, graft_config, params, random_model, trunk_config
from verified import free_rows

PATTERN = regex_grammar("[a-z]*[a-m][a-z]{9}[b-z]*x")  # whose states are many: what came in the last nine letters
CONFIG = ModelConfig(trunk=trunk_config(vocab_size=VOCAB_SIZE), graft=graft_config())
NUM_ANSWERS, NUM_TOKENS = 8, 40


@pytest.fixture(autouse=True)
def _few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as one answer needs, not eight."""
    monkeypatch.setattr(matching, "_MAX_LEXER_STATES", 200)


def core(*, verified: bool) -> EngineCore:
    grammars = Grammars(ByteTokenizer, VOCAB_SIZE, [EOS])
    policy = free_rows(3) if verified else None
    return core_of(random_model(CONFIG, seed=2), max_model_len=96, grammars=grammars, policy=policy)


def request(seed: int, confidence: float) -> SubmitRequest:
    chosen = params(temperature=1.5, seed=seed, max_tokens=NUM_TOKENS, grammar=PATTERN, confidence=confidence)
    return SubmitRequest(str(seed), [1, 2, 3], chosen, 0.0)


def run(core: EngineCore, requests: list[SubmitRequest]) -> tuple[dict[str, list[int]], list[RequestFailed]]:
    tokens: dict[str, list[int]] = {one.request_id: [] for one in requests}
    failures = list[RequestFailed]()
    for one in requests:
        core.add(one)
    while core.has_work:
        step = core.step()
        core._scheduler.check_integrity()
        failures += step.failures
        for output in step.outputs:
            tokens[output.request_id] += output.token_ids
    return tokens, failures


@pytest.mark.parametrize("verified", [True, False])
def test_in_company_and_with_drafts_as_alone(verified: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    alone: dict[str, list[int]] = {}
    for seed in range(NUM_ANSWERS):  # each compiles the grammar anew
        found, failures = run(core(verified=verified), [request(seed, 1.0)])
        assert not failures
        alone |= found
    requests = [request(seed, 0.0 if verified else 1.0) for seed in range(NUM_ANSWERS)]
    assert run(core(verified=verified), requests) == (alone, [])
    monkeypatch.setattr(Grammars, "renewed", lambda *_: None)
    assert run(core(verified=verified), requests)[1]  # they need it


def test_one_that_is_too_much_alone_fails_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "_MAX_LEXER_STATES", 12)
    for verified in (True, False):
        one = core(verified=verified)
        found, [failure] = run(one, [request(1, 0.0)])
        assert (failure.kind, len(found["1"]) < NUM_TOKENS) == ("grammar", True)
        assert "too complex" in failure.message
        assert "states" in failure.message
        assert not one.has_work


def test_what_takes_long_to_compile_is_not_compiled_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(ByteTokenizer, VOCAB_SIZE, [EOS])
    first = grammars.matcher(PATTERN)
    second = grammars.renewed(PATTERN, first)
    assert second is not None
    assert second.source is not first.source
    third = grammars.renewed(PATTERN, first)  # another answer of the first: what was compiled since
    assert third is not None
    assert third.source is second.source
    monkeypatch.setattr(matching, "_MOST_SECONDS_AGAIN", -1)
    assert grammars.renewed(PATTERN, second) is None
