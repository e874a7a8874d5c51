"""Structured output: response_format and structured_outputs of a request, as a grammar that was compiled once."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from pydantic import ConfigDict, Field, model_validator

from hamburger.engine.text.grammar_processes import GrammarProcesses
from hamburger.engine.text.grammar_source import GrammarSource
from hamburger.engine.types.errors import InvalidRequest
from hamburger.server.schema import ListOf, Schema


class JsonSchema(Schema):
    """strict changes nothing: the schema always holds."""

    model_config = ConfigDict(serialize_by_alias=True)

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Schema):
    """OpenAI's response_format."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type json_schema, and no other")
        return self


class StructuredOutputs(Schema):
    """vLLM's structured_outputs: one of its fields."""

    json_: dict[str, Any] | str | bool | None = Field(None, alias="json", description="A JSON Schema.")
    json_object: bool | None = None
    regex: str | None = Field(None, description="In the syntax of Rust's regex, matched as a whole.")
    choice: ListOf[str] | None = Field(None, min_length=1)
    grammar: str | None = Field(None, description="A context-free grammar in llguidance's dialect of Lark.")

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        values = (self.json_, self.json_object or None, self.regex, self.choice, self.grammar)
        if sum(value is not None for value in values) != 1:
            raise ValueError("give exactly one of json, json_object, regex, choice and grammar")
        return self


def source_of_format(wanted: ResponseFormat) -> GrammarSource:
    """The grammar that a response_format other than text asks for."""
    return GrammarSource("json", None if wanted.json_schema is None else wanted.json_schema.schema_)


def source_of_outputs(wanted: StructuredOutputs) -> GrammarSource:
    """The grammar that structured_outputs asks for."""
    if wanted.regex is not None:
        return GrammarSource("regex", wanted.regex)
    if wanted.choice is not None:
        return GrammarSource("choice", wanted.choice)
    if wanted.grammar is not None:
        return GrammarSource("lark", wanted.grammar)
    return GrammarSource("json_text" if isinstance(wanted.json_, str) else "json", wanted.json_)


class HasAnswerFormat(Protocol):
    """A request's body, as far as it says what the answer must look like."""

    response_format: ResponseFormat | None
    structured_outputs: StructuredOutputs | None


async def grammar_of(grammars: GrammarProcesses, body: HasAnswerFormat) -> str | None:
    """The grammar of an answer, compiled; None for any text. Raises InvalidRequest that names the field."""
    wanted, outputs = body.response_format, body.structured_outputs
    if outputs is not None:
        if wanted is not None and wanted.type != "text":
            raise InvalidRequest("Give either response_format or structured_outputs.", "structured_outputs")
        return await compile_grammar(grammars, source_of_outputs(outputs), "structured_outputs")
    if wanted is None or wanted.type == "text":
        return None
    return await compile_grammar(grammars, source_of_format(wanted), "response_format")


async def compile_grammar(grammars: GrammarProcesses, source: GrammarSource, param: str) -> str:
    """Write a grammar and compile it, in another process. Raises InvalidRequest that names `param`."""
    try:
        return await grammars.write(source)
    except InvalidRequest as error:
        raise InvalidRequest(str(error), param) from error
