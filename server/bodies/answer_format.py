"""What an answer must look like, in all the ways in which clients say it, as a grammar that was compiled once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from hamburger.engine.grammar.processes import GrammarProcesses
from hamburger.engine.grammar.source import GrammarSource
from hamburger.engine.types.errors import InvalidRequest
from hamburger.server.schema import ListOf, Schema, one_of

_SCHEMA = "A JSON Schema, or the text of one."
_NOT_SERVED = ("structural_tag", "whitespace_pattern", "disable_additional_properties")
_GRAMMAR = "A context-free grammar, in llguidance's dialect of Lark (with a rule `start`) or in GBNF (`root`)."

SchemaOrText = Annotated[
    dict[str, Any] | str | bool, one_of("a JSON Schema (an object, true or false), or the text of one")
]
GivenSchema = Annotated[dict[str, Any] | bool, one_of("a JSON Schema: an object, true or false")]


class JsonSchema(Schema):
    """strict changes nothing: the schema always holds."""

    model_config = ConfigDict(serialize_by_alias=True)

    name: str | None = None
    description: str | None = None
    schema_: GivenSchema | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Schema):
    """OpenAI's response_format. schema: as llama.cpp takes it."""

    model_config = ConfigDict(serialize_by_alias=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: GivenSchema | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if self.json_schema is not None and self.type != "json_schema":
            raise ValueError("json_schema goes with the type json_schema, and no other")
        if self.schema_ is not None and (self.type == "text" or self.json_schema is not None):
            raise ValueError("schema goes with the type json_object, or with json_schema in place of json_schema")
        if self.type == "json_schema" and self.json_schema is None and self.schema_ is None:
            raise ValueError("the type json_schema needs json_schema")
        return self

    def source(self) -> GrammarSource | None:
        if self.type == "text":
            return None
        return GrammarSource("json", self.schema_ if self.json_schema is None else self.json_schema.schema_)


class StructuredOutputs(Schema):
    """vLLM's structured_outputs: one of its forms. disable_any_whitespace alone: of another field's form."""

    json_: SchemaOrText | None = Field(None, alias="json", description=_SCHEMA)
    json_object: bool | None = None
    regex: str | None = Field(None, description="In the syntax of Rust's regex, matched as a whole.")
    choice: ListOf[str] | None = Field(None, min_length=1)
    grammar: str | None = Field(None, description=_GRAMMAR)
    disable_any_whitespace: bool | None = Field(None, description="JSON on one line, without indentation.")

    @model_validator(mode="before")
    @classmethod
    def _only_served(cls, value: Any) -> Any:
        for name in _NOT_SERVED if isinstance(value, dict) else ():
            if value.get(name):
                raise ValueError(f"{name} is not supported by this server: leave it out")
        return value

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        values = (self.json_, self.json_object or None, self.regex, self.choice, self.grammar)
        number = sum(value is not None for value in values)
        if number != 1 and not (number == 0 and self.disable_any_whitespace):
            raise ValueError("give exactly one of json, json_object, regex, choice and grammar")
        if number and self.disable_any_whitespace and not (self.json_ is not None or self.json_object):
            raise ValueError("disable_any_whitespace goes with json or json_object: say it in the regex or grammar")
        return self

    def source(self) -> GrammarSource | None:
        """None where it only says how another field's JSON is written."""
        if self.regex is not None:
            return GrammarSource("regex", self.regex)
        if self.choice is not None:
            return GrammarSource("choice", self.choice)
        if self.grammar is not None:
            return GrammarSource("grammar", self.grammar)
        if self.json_ is None and not self.json_object:
            return None
        return _of_schema(self.json_, compact=bool(self.disable_any_whitespace))


class AnswerFormat(Schema):
    """The fields that say what an answer must look like: OpenAI's, vLLM's of today and before, SGLang's, llama.cpp's.
    One of them at most."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = Field(None, description=_SCHEMA)
    guided_regex: str | None = None
    guided_choice: ListOf[str] | None = Field(None, min_length=1)
    guided_grammar: str | None = Field(None, description=_GRAMMAR)
    json_schema: SchemaOrText | None = Field(None, description=_SCHEMA)
    regex: str | None = None
    ebnf: str | None = Field(None, description=_GRAMMAR)
    grammar: str | None = Field(None, description=_GRAMMAR)

    def source(self) -> tuple[str, GrammarSource] | None:
        """The field that says it and what it says; None for any text. Raises InvalidRequest for more than one."""
        found = list(self._sources())
        if len(found) > 1:
            (first, _), (second, _) = found[:2]
            raise InvalidRequest(f"Give either {first} or {second}.", second)
        outputs = self.structured_outputs
        if outputs is None or not outputs.disable_any_whitespace or outputs.source() is not None:
            return found[0] if found else None
        if not found or not found[0][1].is_json:
            message = "disable_any_whitespace says how JSON is written: ask for some, as by json or response_format."
            raise InvalidRequest(message, "structured_outputs")
        [(name, source)] = found
        return name, replace(source, compact=True)

    def _sources(self) -> Iterator[tuple[str, GrammarSource]]:
        if self.response_format is not None and (source := self.response_format.source()) is not None:
            yield "response_format", source
        if self.structured_outputs is not None and (source := self.structured_outputs.source()) is not None:
            yield "structured_outputs", source
        for name in ("guided_json", "json_schema"):
            if (schema := getattr(self, name)) is not None:
                yield name, _of_schema(schema)
        for name in ("guided_regex", "regex"):
            if (pattern := getattr(self, name)) is not None:
                yield name, GrammarSource("regex", pattern)
        if self.guided_choice is not None:
            yield "guided_choice", GrammarSource("choice", self.guided_choice)
        for name in ("guided_grammar", "ebnf", "grammar"):
            if grammar := getattr(self, name):  # llama.cpp's clients send an empty one for none
                yield name, GrammarSource("grammar", grammar)


def _of_schema(schema: dict[str, Any] | str | bool | None, *, compact: bool = False) -> GrammarSource:
    return GrammarSource("json_text" if isinstance(schema, str) else "json", schema, compact)


async def grammar_of(grammars: GrammarProcesses, body: AnswerFormat) -> str | None:
    """The grammar of an answer, compiled; None for any text. Raises InvalidRequest that names the field."""
    found = body.source()
    return None if found is None else await compile_grammar(grammars, found[1], found[0])


async def compile_grammar(grammars: GrammarProcesses, source: GrammarSource, param: str) -> str:
    """Write a grammar and compile it, in another process. Raises InvalidRequest that names `param`."""
    try:
        return await grammars.write(source)
    except InvalidRequest as error:
        raise InvalidRequest(str(error), param) from error
