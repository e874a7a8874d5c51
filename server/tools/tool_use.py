"""ToolUse: what is made of the tools of one request, before its answer and of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from hamburger.engine.grammar.source import GrammarSource
from hamburger.engine.types.errors import InvalidRequest, shown
from hamburger.server.server_tokenizer import ServerTokenizer
from hamburger.server.tools.answer_or_calls import answer_or_calls_parser
from hamburger.server.tools.call_rules import format_or_calls, free_or_calls
from hamburger.server.tools.call_schemas import format_or_call, list_of_calls
from hamburger.server.tools.reasoning import Markers
from hamburger.server.tools.tool_fields import AllowedTools, Function, NamedChoice, Tool, ToolChoice
from hamburger.server.tools.tool_parsers import (
    BARE,
    MARKERS,
    Family,
    Parser,
    arguments_parser,
    list_parser,
    parser_of,
)
from hamburger.server.tools.tool_stream import ToolStream

_MOST_CALLS = 16  # that a grammar lets a model make at once


class ToolUse:
    """`family` is the model's way to write calls, where no grammar says another.

    grammar: what the answer must be, where a call is forced; else None (see open_grammar).
    form: what an answer must be that is no call, as JSON of a schema; None: free text. It says nothing of forced calls.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice | None,
        family: Family,
        *,
        parallel: bool = True,
        form: GrammarSource | None = None,
    ) -> None:
        """Raises InvalidRequest that names tools or tool_choice."""
        functions = [tool.function for tool in tools]
        if len({function.name for function in functions}) < len(functions):
            raise InvalidRequest("tools holds two functions of one name.", "tools")
        self.for_template = [tool.model_dump(exclude_none=True) for tool in tools]
        self.grammar: GrammarSource | None = None
        self.form: GrammarSource | None = None
        self._family, self._parallel, self._most = family, parallel, _MOST_CALLS if parallel else 1
        self._functions = _allowed(functions, choice)
        self._is_narrowed = len(self._functions) < len(functions)
        self._is_named = isinstance(choice, NamedChoice)
        mode = choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice
        self.parser: Parser
        if self._is_named:
            [function] = self._functions
            self.grammar = GrammarSource("json", function.arguments_schema())
            self.parser = arguments_parser(function.name)
        elif mode == "required":
            self.grammar = GrammarSource("json", list_of_calls(self._functions, self._most))
            self.parser = list_parser
        else:
            self.form = form
            asked = {function.name: function.arguments_schema() for function in self._functions}
            if form is None:
                self.parser = parser_of(family, asked, is_held=self._is_held())
            else:
                self.parser = answer_or_calls_parser(family, asked)

    def schemas(self) -> dict[str, dict[str, Any]]:
        """What holds a call's arguments, by the names of the functions that may be called."""
        is_open = self.grammar is None
        return {f.name: f.own_schema() if is_open else f.arguments_schema() for f in self._functions}

    def open_grammar(self, tokenizer: ServerTokenizer, thought: Markers | None) -> GrammarSource | None:
        """What holds an answer that may call or not: its calls to the functions that may be called and to the schemas
        of strict ones, and what is no call to the form. None where all is free, or a call is forced.

        thought: the markers of what the model may write before, where the answer has a form; the first one is empty
        where that has begun. None: nothing.
        """
        if self.grammar is not None or not (self._is_held() or self.form):
            return None
        token = partial(_special_token, tokenizer)
        names = [function.name for function in self._functions]
        schemas = [*self.schemas().values()]
        if self.form is None:
            return GrammarSource("calls", (free_or_calls(self._family, names, token), schemas))
        form = self.form.schema()
        if self._family in BARE:  # calls are JSON, too
            form = format_or_call(form, self._functions, self._most)
        if not MARKERS[self._family] and thought is None:
            return GrammarSource("json", form, self.form.compact)
        rules = format_or_calls(self._family, names, token, self._most, thought)
        return GrammarSource("calls", (rules, [*schemas, form]), self.form.compact)

    def _is_held(self) -> bool:
        """Whether a grammar holds the calls that the model chooses to make."""
        return self._is_narrowed or any(function.strict for function in self._functions)

    def lets_think(self, thought: Markers | None) -> bool:
        """Whether the answer's grammar has room for what the model writes for itself. thought: of open_grammar."""
        return self.grammar is None and (self.form is None or thought is not None)

    def shows_special_tokens(self, tokenizer: ServerTokenizer) -> bool:
        """Whether the model writes a call with a special token, which its text must not lack then."""
        if self.grammar is not None:
            return False
        return any(_special_token(tokenizer, marker) is not None for marker in MARKERS[self._family])

    def stream(self, end_texts: Sequence[str] = ()) -> ToolStream:
        """For one choice. end_texts: what the model's end tokens look like, where special tokens are shown."""
        return ToolStream(
            self.parser, self._family, parallel=self._parallel, is_named=self._is_named, end_texts=end_texts
        )


def _allowed(functions: Sequence[Function], choice: ToolChoice | None) -> list[Function]:
    """Those that may be called. Raises InvalidRequest for a choice of what there is not."""
    if isinstance(choice, NamedChoice):
        names = [choice.function.name]
    elif isinstance(choice, AllowedTools):
        names = [tool.function.name for tool in choice.allowed_tools.tools]
    else:
        return [*functions]
    known = {function.name for function in functions}
    for name in names:
        if name not in known:
            raise InvalidRequest(f"tool_choice names {shown(name)}, which is no tool here.", "tool_choice")
    return [function for function in functions if function.name in names]


def _special_token(tokenizer: ServerTokenizer, marker: str) -> int | None:
    """The id of a marker that is one special token."""
    ids = tokenizer.encode(marker)
    return ids[0] if len(ids) == 1 and tokenizer.is_special(ids[0]) else None
