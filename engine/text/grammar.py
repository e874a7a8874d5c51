"""Grammars: what an answer must look like, token by token. The only file that knows llguidance; no torch.

The library is loaded with the first grammar: an engine that serves none works without it (benchmarks/gpu.sh).
A grammar crosses from client to core as llguidance's own text (SamplingParams.grammar); the functions below write it.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hamburger.engine.text.grammar_cache import GrammarCache
from hamburger.engine.text.json_numbers import DigitTokens, NumberLimit, is_of_json
from hamburger.engine.text.json_schema import MAX_LEVELS, fault_of, levels_of, usable_schema
from hamburger.engine.text.process_usage import resident_bytes
from hamburger.engine.types.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# JSON allows white space without end, and small models like it: one space, or one line break and its indentation.
WHITE_SPACE = r" ?|\n {0,16}"
# oneOf as anyOf: where its branches cannot be told apart, no grammar can say that only one of them fits.
_READING: Any = {"whitespace_pattern": WHITE_SPACE, "coerce_one_of": True}
# The library follows rules by recursion: some thousand levels would end the process, not raise an error.
MAX_PARTS = 1000
MAX_CHARACTERS = 500_000  # of a grammar, as the client wrote it: beyond, compiling takes seconds and hundreds of MB
# Of Lark or GBNF: a class, a text, a comment, an expression. And a rule of GBNF that has the name of Lark's first.
_LITERAL = re.compile(r"""\[(?:\\.|[^\]\\\n])*\]|"(?:\\.|[^"\\\n])*"|//.*|\#.*|/(?:\\.|[^/\\\n])+/""")
_OF_SCHEMA = re.compile(r"failed to compile JSON schema: (.*)")
_START = re.compile(rf"{_LITERAL.pattern}|(?<![\w-])(start)(?![\w-])")
_OPENINGS = ":([{"  # no level of a grammar is without one
NO_END_TOKEN = "The model has no end token, without which no grammar works."
_MAX_LEXER_STATES = 50_000  # 1 to 2 kB each
_MOST_SECONDS_AGAIN = 0.5  # to compile a grammar between two steps


def json_grammar(schema: Mapping[str, Any] | bool | None = None) -> str:
    """JSON text that a JSON Schema (draft 2020-12) allows; None: any object.

    Raises InvalidRequest for one that is nested too deeply to be read, or too large to be compiled soon.
    """
    from llguidance import LLMatcher

    text = _schema_text(schema)
    _check_size("schema", len(text), "response_format")
    try:
        grammar: str = LLMatcher.grammar_from_json_schema(text, overrides=_READING)
    except ValueError as error:
        raise InvalidRequest(f"The schema cannot be read: {_shown(str(error))}.", "response_format") from error
    return grammar


def grammar_with_schemas(rules: str, schemas: Sequence[Mapping[str, Any] | bool | None]) -> str:
    """Rules in llguidance's dialect of Lark, in which `args0`, `args1`, ... are JSON text that these schemas allow.

    Raises InvalidRequest as json_grammar does.
    """
    from llguidance import LLMatcher

    texts = [json.dumps({**json.loads(_schema_text(schema)), "x-guidance": _READING}) for schema in schemas]
    lark = "\n".join([rules, *(f"args{i}: %json {text}" for i, text in enumerate(texts))])
    _check_size("schemas", len(lark), "response_format")
    grammar: str = LLMatcher.grammar_from_lark(lark)
    return grammar


def _schema_text(schema: Mapping[str, Any] | bool | None) -> str:
    """As the library reads it. Raises InvalidRequest for one that is too much to be tried."""
    if schema is None:
        return json.dumps({"type": "object"})
    if isinstance(schema, bool):
        schema = {"allOf": [schema]}  # the library reads objects only
    if (levels := levels_of(schema)) > MAX_LEVELS:
        raise InvalidRequest(
            f"The schema and all that its references lead to have {levels} levels together, but at most {MAX_LEVELS} "
            "are allowed: use fewer references.",
            "response_format",
        )
    usable = usable_schema(schema)
    if (fault := fault_of(usable)) is not None:
        raise InvalidRequest(f"The schema has {fault}.", "response_format")
    return json.dumps(usable)


def regex_grammar(pattern: str) -> str:
    """Text that a regular expression (Rust's regex syntax) matches as a whole. Raises InvalidRequest if it is large."""
    _check_size("regular expression", len(pattern), "structured_outputs")
    return _regex_grammar(pattern)


def choice_grammar(choices: Sequence[str]) -> str:
    """One of several texts. Raises InvalidRequest where they are large together."""
    _check_size("choice", sum(len(choice) + 1 for choice in choices), "structured_outputs")  # empty ones count too
    return _regex_grammar("|".join(f"({re.escape(choice)})" for choice in choices))


def context_free_grammar(text: str) -> str:
    """A context-free grammar, in llguidance's dialect of Lark (it has a rule `start`) or in GBNF (`root`).

    Raises InvalidRequest for one that is too large, or no GBNF.
    """
    _check_size("grammar", len(text), "structured_outputs")
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        lark = gbnf_to_lark(_START.sub(_other_start, text)) if "::=" in _LITERAL.sub("", text) else text
    except MemoryError:
        raise  # it is not the grammar's form
    except Exception as error:  # llguidance's converter raises bare Exception, and RecursionError for deep ones
        raise InvalidRequest(
            f"The grammar has `::=`, but is no GBNF: {_shown(str(error))}.", "structured_outputs"
        ) from error
    if (num_parts := sum(map(lark.count, _OPENINGS))) > MAX_PARTS:
        raise InvalidRequest(
            f"The grammar has {num_parts} rules and brackets ({' '.join(_OPENINGS)}), but at most {MAX_PARTS} are "
            "allowed.",
            "structured_outputs",
        )
    grammar: str = LLMatcher.grammar_from_lark(lark)
    return grammar


def _other_start(found: re.Match[str]) -> str:
    return "start-of-client" if found[1] else found[0]


def _regex_grammar(pattern: str) -> str:
    from llguidance import LLMatcher

    grammar: str = LLMatcher.grammar_from_regex(pattern)
    return grammar


def _check_size(name: str, num_characters: int, param: str) -> None:
    if num_characters > MAX_CHARACTERS:
        raise InvalidRequest(
            f"The {name} has {num_characters:,} characters, but at most {MAX_CHARACTERS:,} are allowed.", param
        )


class GrammarTokenizer(Protocol):
    """What Grammars needs of a Tokenizer."""

    vocab_size: int

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]: ...
    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes: ...
    def is_special(self, token_id: int) -> bool: ...


class Grammars:
    """Compiles grammars for one vocabulary, and remembers the last ones. Any thread may use it."""

    def __init__(self, load: Callable[[], GrammarTokenizer], vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """load: gives the tokenizer, when the first grammar comes. vocab_size: the model's, which may be padded beyond
        the tokenizer's."""
        self._load = load
        self.vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._vocabulary: LLTokenizer | None = None
        self._digits: DigitTokens | None = None
        self._compiled: GrammarCache[_Compiled] = GrammarCache()
        self._lock = threading.Lock()

    def compile(self, grammar: str) -> LLMatcher:
        """The grammar before its first token; to be copied, never advanced. May take some 100 ms for a complex one.

        Raises InvalidRequest that says what of it is impossible, not supported or too complex.
        """
        return self._source(grammar).matcher

    def _source(self, grammar: str) -> _Compiled:
        from llguidance import LLMatcher, LLParserLimits

        if (found := self._compiled.get(grammar)) is not None:
            return found
        with self._lock:
            vocabulary = self._vocabulary = self._vocabulary or self._build()
        before, began = resident_bytes(), time.monotonic()
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=LLParserLimits(max_lexer_states=_MAX_LEXER_STATES))
        tried = matcher.deep_copy()
        tried.compute_bitmask()  # some are too complex only for their first token
        for error in (matcher.get_error(), tried.get_error()):
            if error:
                # The library's word for a schema that only leads to itself.
                why = "nothing can be written by it" if "NoExtensionBias" in error else _shown(error)
                raise InvalidRequest(f"The grammar cannot be used: {why}.", "response_format")
        # Others may have taken memory meanwhile: it counts for more then, and is compiled anew sooner.
        source = _Compiled(matcher, time.monotonic() - began)
        self._compiled.put(grammar, source, max(len(grammar), resident_bytes() - before))
        return source

    def prepare(self) -> None:
        """Read the vocabulary now. Raises InvalidRequest where no grammar works."""
        with self._lock:
            self._vocabulary = self._vocabulary or self._build()

    def forget(self, grammar: str) -> None:
        """Compile it anew the next time: what answers share of it is used up."""
        self._compiled.forget(grammar)

    def forget_unused(self, seconds: float) -> None:
        """What nobody has used for so long."""
        self._compiled.forget_unused(seconds)

    def matcher(self, grammar: str) -> Matcher:
        """The grammar for one answer. Raises InvalidRequest as `compile` does."""
        source = self._source(grammar)
        limit = NumberLimit(self._digits) if self._digits is not None and is_of_json(grammar) else None
        matcher = Matcher(source, self._eos_token_ids, limit)
        self._compiled.count_use(grammar)
        return matcher

    def renewed(self, grammar: str, used: Matcher) -> Matcher | None:
        """In the place of a matcher that failed: what answers of one compiled grammar share may be used up by others.
        Of what was compiled since, or compiled now; None where that takes long, as steps would wait for it."""
        if used.source.seconds > _MOST_SECONDS_AGAIN:
            return None
        if self._compiled.get(grammar) is used.source:
            self.forget(grammar)
        return self.matcher(grammar)

    def _build(self) -> LLTokenizer:
        if not self._eos_token_ids:
            raise InvalidRequest(NO_END_TOKEN, "response_format")
        from llguidance import LLTokenizer

        vocabulary = _Vocabulary(self._load(), self.vocab_size, self._eos_token_ids[0])
        self._digits = DigitTokens(vocabulary.tokens, -(-self.vocab_size // 32))
        return LLTokenizer(vocabulary, eos_token=self._eos_token_ids)  # type: ignore[arg-type]


class _Compiled(NamedTuple):
    """A grammar before its first token. seconds: that it took to compile."""

    matcher: LLMatcher
    seconds: float


class Matcher:
    """Where one answer stands in its grammar."""

    def __init__(
        self, source: _Compiled, eos_token_ids: Collection[int], number_limit: NumberLimit | None = None
    ) -> None:
        self.source = source
        self._matcher = source.matcher.deep_copy()
        self._number_limit = number_limit
        self._eos_token_ids = eos_token_ids
        self._has_ended = False  # by an end token, which the library does not count

    @property
    def is_complete(self) -> bool:
        """Nothing but an end token may follow."""
        return self._has_ended or (bool(self._matcher.is_stopped()) and not self._matcher.is_error())

    @property
    def error(self) -> str | None:
        """Why it can go on no more: the grammar became too complex, or a token was taken that it does not allow."""
        if not self._matcher.is_error():
            return None
        why = _shown(self._matcher.get_error())
        return f"The grammar became too complex, or the answer left it ({why}): simplify it"

    def allow(self, masks: NDArray[np.int32], row: int) -> None:
        """Write the bit mask of the tokens that may come next into masks[row], int32 [ceil(vocab_size / 32)]."""
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, masks, row)
        if self._number_limit is not None:
            self._number_limit.narrow(masks[row])

    def forced(self) -> list[int]:
        """Tokens in which the text goes on, if there is only one way; others may spell the same. It changes nothing."""
        if self.is_complete or self._matcher.is_error():
            return []
        tokens: list[int] = self._matcher.deep_copy().compute_ff_tokens()  # an error would stay in the matcher
        return [token_id for token_id in tokens if token_id not in self._eos_token_ids]

    def advance(self, token_id: int) -> None:
        """Take a token. One that is not allowed is an `error` from then on."""
        if token_id in self._eos_token_ids:
            self._has_ended = True
            return
        self._matcher.consume_token(token_id)
        if self._number_limit is not None:
            self._number_limit.advance(token_id)

    def go_back(self, num_tokens: int) -> None:
        """Forget the last tokens."""
        if self._has_ended and num_tokens:
            self._has_ended = False
            num_tokens -= 1
        if num_tokens:
            self._matcher.rollback(num_tokens)
            if self._number_limit is not None:
                self._number_limit.go_back(num_tokens)


class _Vocabulary:
    """What LLTokenizer reads: every token's bytes."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: GrammarTokenizer, vocab_size: int, eos_token_id: int) -> None:
        size = min(vocab_size, tokenizer.vocab_size)
        self.eos_token_id = eos_token_id
        self.bos_token_id = None
        # The library's masks have a bit for each of these: what only pads the model's vocabulary has no bytes, and is
        # never allowed.
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(size)] + [b""] * (vocab_size - size)
        self.special_token_ids = [token_id for token_id in range(size) if tokenizer.is_special(token_id)]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode(errors="replace"))


def _shown(message: str) -> str:
    """The library's message on one line, of a length fit for people."""
    message = message.partition("<state>")[0]
    if found := _OF_SCHEMA.search(message):  # what follows are rules of ours, around a client's schema
        message = found[1]
    return " ".join(message.split())[:300].rstrip(".")
