"""benchmarks/structured.py on a stand-in for the engine: of which groups, and what comes before its clock runs."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import structured
from hamburger.engine import SamplingParams
from hamburger.engine.generation_result import GenerationResult


class FakeLLM:
    """Whatever it is asked, its answer is cut after one token."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.asked: list[list[SamplingParams]] = []

    def __call__(self, model: str | None, **options: Any) -> FakeLLM:
        self.options = options
        return self

    def chat(self, chats: list[Any], params: list[SamplingParams]) -> list[GenerationResult]:
        self.asked.append(params)
        return [GenerationResult([], "[", [1], [[1]], [0.0], None, "length", None, 1) for _ in chats]


def test_confidences_are_of_composed_groups_and_grammars_are_made_before(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = FakeLLM()
    monkeypatch.setattr(structured, "LLM", llm)
    monkeypatch.setattr(sys, "argv", ["structured.py", "--schemas", "3", "--confidences", "0.3,1"])
    assert structured.main() == 1  # nothing ended
    assert llm.options["groups"] == "composed"
    warm_up, *measured = llm.asked
    assert [params.max_tokens for params in warm_up] == [1, 1, 1]
    assert [params.grammar for params in warm_up] == [params.grammar for params in measured[0]]
    assert [[params.confidence for params in level] for level in measured] == [[0.3] * 3, [1.0] * 3]
