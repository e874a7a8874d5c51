"""GrammarSource: a grammar as a client wrote it, before anybody has looked at it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from hamburger.engine.grammar.writing import (
    choice_grammar,
    context_free_grammar,
    grammar_with_schemas,
    json_grammar,
    regex_grammar,
)
from hamburger.engine.types.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """value: of `json` a JSON Schema, or None for any object; of `json_text` the text of one; of `regex` and
    `grammar` (Lark or GBNF) a text; of `choice` a list of texts; of `calls` the
    rules and the schemas of grammar_with_schemas. compact: JSON on one line (json_grammar)."""

    kind: Literal["json", "json_text", "regex", "choice", "grammar", "calls"]
    value: Any
    compact: bool = False

    def write(self) -> str:
        """llguidance's own text of it. Raises InvalidRequest for what cannot be read, or is too large to be tried."""
        match self.kind:
            case "regex":
                return regex_grammar(self.value)
            case "choice":
                return choice_grammar(self.value)
            case "grammar":
                return context_free_grammar(self.value)
            case "calls":
                return grammar_with_schemas(*self.value, compact=self.compact)
        return json_grammar(self.schema(), compact=self.compact)

    @property
    def is_json(self) -> bool:
        return self.kind in ("json", "json_text")

    def schema(self) -> dict[str, Any] | bool | None:
        """Of `json` and `json_text` the JSON Schema. Raises InvalidRequest for a text that is none."""
        if self.kind == "json":
            schema: dict[str, Any] | bool | None = self.value
            return schema
        try:
            schema = json.loads(self.value)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"The schema is no JSON: {error}.") from error
        if not isinstance(schema, (dict, bool)):
            raise InvalidRequest("This is no JSON Schema.")
        return schema
