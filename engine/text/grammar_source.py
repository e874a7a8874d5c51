"""GrammarSource: a grammar as a client wrote it, before anybody has looked at it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from hamburger.engine.text.grammar import choice_grammar, json_grammar, lark_grammar, regex_grammar
from hamburger.engine.types.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """value: of `json` a JSON Schema, or None for any object; of `json_text` the text of one; of `regex` and `lark` a
    text; of `choice` a list of texts."""

    kind: Literal["json", "json_text", "regex", "choice", "lark"]
    value: Any

    def write(self) -> str:
        """llguidance's own text of it. Raises InvalidRequest for what cannot be read, or is too large to be tried."""
        match self.kind:
            case "regex":
                return regex_grammar(self.value)
            case "choice":
                return choice_grammar(self.value)
            case "lark":
                return lark_grammar(self.value)
            case "json":
                return json_grammar(self.value)
        try:
            schema = json.loads(self.value)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"structured_outputs.json is no JSON: {error}.") from error
        if not isinstance(schema, (dict, bool)):
            raise InvalidRequest("structured_outputs.json is no JSON Schema.")
        return json_grammar(schema)
