"""The thread of the engine's process that compiles grammars."""

from __future__ import annotations

import queue
import threading
from typing import Any, cast

from hamburger.engine.grammar.matching import Grammars
from hamburger.engine.hosts.engine_loop import LoraRead
from hamburger.engine.types.events import Message, Stop
from hamburger.engine.types.messages import AbortRequest, SubmitRequest, UnloadLora
from hamburger.engine.worker import GrammarCompiler
from small_models import params


class SlowGrammars:
    """Compiles when it may, and fails on each."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()

    def compile(self, grammar: str) -> Any:
        assert self.may_go_on.wait(10)
        raise ValueError(grammar)

    def forget_unused(self, seconds: float) -> None:
        """Nothing is held."""


def submit(request_id: str, grammar: str | None) -> SubmitRequest:
    return SubmitRequest(request_id, [1], params(grammar=grammar), 0.0)


def test_others_overtake_a_grammar_and_its_own_abort_does_not() -> None:
    grammars, inbox = SlowGrammars(), queue.SimpleQueue[Message | LoraRead]()
    compiler = GrammarCompiler(cast(Grammars, grammars), inbox)
    slow: list[Message] = [submit("slow", "a"), AbortRequest("slow"), submit("second", "b")]
    assert all(compiler.take_if_it_waits(message) for message in slow)
    others: list[Message] = [submit("plain", None), AbortRequest("plain"), Stop()]
    assert not any(compiler.take_if_it_waits(message) for message in others)
    assert inbox.empty()
    grammars.may_go_on.set()
    # What cannot be compiled goes on as well: the core refuses it.
    assert [inbox.get(timeout=10) for _ in slow] == slow
    deadline = threading.Event()
    while compiler.take_if_it_waits(AbortRequest("second")):  # until the thread has let go of it
        assert not deadline.wait(0.01)
        inbox.get(timeout=10)


def test_the_next_request_of_an_id_overtakes_nothing_of_the_one_before_it() -> None:
    grammars, inbox = SlowGrammars(), queue.SimpleQueue[Message | LoraRead]()
    compiler = GrammarCompiler(cast(Grammars, grammars), inbox)
    one: list[Message] = [submit("a", "x"), AbortRequest("a"), submit("a", None), AbortRequest("a"), submit("a", "y")]
    assert all(compiler.take_if_it_waits(message) for message in one)
    grammars.may_go_on.set()
    assert [inbox.get(timeout=10) for _ in one[:-2]] == one[:-2]  # the first with a grammar has gone on
    one.append(AbortRequest("a"))
    if not compiler.take_if_it_waits(one[-1]):
        inbox.put(one[-1])
    assert [inbox.get(timeout=10) for _ in one[-3:]] == one[-3:]


def test_the_end_of_an_adapter_does_not_overtake_a_request_that_names_it() -> None:
    grammars, inbox = SlowGrammars(), queue.SimpleQueue[Message | LoraRead]()
    compiler = GrammarCompiler(cast(Grammars, grammars), inbox)
    asked = SubmitRequest("a", [1], params(grammar="x"), 0.0, lora=2)
    assert compiler.take_if_it_waits(asked)
    assert not compiler.take_if_it_waits(UnloadLora(1))
    assert not compiler.take_if_it_waits(SubmitRequest("b", [1], params(), 0.0, lora=2))
    assert compiler.take_if_it_waits(UnloadLora(2))
    grammars.may_go_on.set()
    assert [inbox.get(timeout=10) for _ in range(2)] == [asked, UnloadLora(2)]
