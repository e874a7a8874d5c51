"""GBNF, llama.cpp's form of grammars, in llguidance's dialect of Lark.

The library's converter makes a terminal of each rule that is of characters alone, and a terminal takes as many as it
can. Where what follows may begin with one of them (`ws "\\n"` with `ws ::= [ \\n]*`), nothing would be left for that:
such a rule stays a rule, all readings of which count. The others are terminals, which are matched much faster.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping

from llguidance.gbnf_to_lark import (
    AlternativeNode,
    ASTNode,
    GrammarParser,
    LiteralNode,
    RegexNode,
    RepetitionNode,
    RuleNode,
    RuleRefNode,
    SequenceNode,
    gbnf_to_lark,
    resolve,
)

Begins = frozenset[tuple[str, str]]  # characters, each with the rule of characters that it stands in ("": in none)
_UNIT = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{1,4}|U[0-9a-fA-F]{1,8}|.)|.", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


def lark_of(text: str) -> str:
    """Raises Exception, as the library does, for what is no GBNF."""
    try:
        return _lark_of(text)
    except RecursionError:  # rules that lead to others a hundred times, of which the library may still make something
        return gbnf_to_lark(text)


def _lark_of(text: str) -> str:
    rules = GrammarParser().parse(text)
    follows = _Follows(rules)
    greedy = follows.greedy()
    begins = frozenset[str]().union(*(follows.goes_on(name) for name in greedy))
    for name in greedy:
        rules[name].alternatives = _Rule([_by_characters(rules[name].alternatives, None)])
    for name, rule in rules.items() if greedy else ():
        if not follows.is_plain(name):
            rule.alternatives = _by_characters(rule.alternatives, begins)
    resolve(rules)
    return "\n".join(["%llguidance {}\n", *map(str, sorted(rules.values(), key=lambda rule: rule.order)), ""])


def _by_characters(node: ASTNode, begins: frozenset[str] | None) -> ASTNode:
    """With texts that begin so (None: all) as one character each, as a longer terminal wins over a shorter one."""
    if isinstance(node, LiteralNode):
        units = _UNIT.findall(node.value)
        if len(units) < 2 or (begins is not None and _meant(units[0]) not in begins):
            return node
        return SequenceNode([LiteralNode(unit) for unit in units])
    if isinstance(node, SequenceNode):
        return SequenceNode([_by_characters(part, begins) for part in node.nodes])
    if isinstance(node, AlternativeNode):
        return AlternativeNode([_by_characters(part, begins) for part in node.alternatives])
    if isinstance(node, RepetitionNode):
        return RepetitionNode(_by_characters(node.node, begins), node.min_times, node.max_times)
    return node


class _Rule(SequenceNode):
    """Of which no terminal is made."""

    def is_terminal(self) -> bool:
        return False

    def simplify(self) -> ASTNode:
        self.nodes = [node.simplify() for node in self.nodes]
        return self


class _Follows:
    """Which characters follow a rule, and which go on with what it has matched. Of all characters those stand for the
    others that the grammar names, with their neighbours, as ends of ranges."""

    def __init__(self, rules: Mapping[str, RuleNode]) -> None:
        self._rules = {name: rule.alternatives for name, rule in rules.items()}
        named = {unit for node in self._all_nodes() for unit in _units(node)} | set(string.printable)
        near = {ord(unit) + step for unit in named for step in (-1, 0, 1)}
        self._known = frozenset(chr(i) for i in near if 0 <= i < 0x110000)
        self._classes: dict[str, frozenset[str]] = {}
        self._going_on: dict[str, frozenset[str]] = {}
        self._letters: dict[str, frozenset[str]] = {}  # all that rules of characters alone have
        self._plain = dict[str, bool]()  # whether a rule is of characters alone
        self._firsts: dict[str, tuple[Begins, bool]] = dict.fromkeys(rules, (frozenset(), False))
        for name in rules:
            self._is_plain(name)
        changes = True
        while changes:
            changes = False
            for name, node in reversed(self._rules.items()):  # rules mostly name those behind them
                changes |= self._firsts[name] != (found := self._first(node))
                self._firsts[name] = found

    def greedy(self) -> set[str]:
        """Rules of characters alone that would take what belongs to what follows them, and such that follow those."""
        greedy = set[str]()
        while True:
            follows, found = self._follows(greedy), set[str]()
            for name, is_plain in self._plain.items():
                if is_plain and (taken := self._taken(name, follows[name])):
                    found |= {name, *taken} - {""}
            if found <= greedy:
                return greedy
            greedy |= found

    def _taken(self, name: str, follows: Begins) -> set[str]:
        """From which rules of characters alone ("": from others) a rule would take the beginning."""
        more, is_optional = self.goes_on(name), self._firsts[name][1]
        # Of one that may be empty, twice in a row, the first may have all.
        return {of for of, character in follows if character in more and not (is_optional and of == name)}

    def goes_on(self, name: str) -> frozenset[str]:
        """Which characters may go on with what a rule of characters alone has matched."""
        if name not in self._going_on:
            self._going_on[name] = self._more(self._rules[name])
        return self._going_on[name]

    def is_plain(self, name: str) -> bool:
        return self._plain[name]

    def _follows(self, greedy: set[str]) -> dict[str, Begins]:
        """By rule. greedy: of the rules of characters alone those that are no terminals."""
        found: dict[str, Begins] = dict.fromkeys(self._rules, frozenset())
        while True:
            before = dict(found)
            for name, node in self._rules.items():
                if not self._plain[name] or name in greedy:
                    self._walk(node, found[name], found)
            if found == before:
                return found

    def _walk(self, node: ASTNode, follows: Begins, found: dict[str, Begins]) -> None:
        if isinstance(node, RuleRefNode):
            found[node.name] |= follows
        elif isinstance(node, SequenceNode):
            for part in reversed(node.nodes):
                self._walk(part, follows, found)
                begins, is_optional = self._first(part)
                follows = begins | follows if is_optional else begins
        else:
            if isinstance(node, RepetitionNode) and node.max_times != 1:
                follows |= self._first(node.node)[0]
            for part in node.children():
                self._walk(part, follows, found)

    def _first(self, node: ASTNode) -> tuple[Begins, bool]:
        """What it may begin with, and whether it may be empty."""
        if isinstance(node, RuleRefNode):
            begins, is_optional = self._firsts[node.name]
            if self._plain[node.name]:
                begins = frozenset((node.name, character) for _, character in begins)
            return begins, is_optional
        if isinstance(node, LiteralNode | RegexNode):
            return frozenset(("", character) for character in self._begins(node)), not (
                isinstance(node, RegexNode) or node.value
            )
        parts = [self._first(part) for part in node.children()]
        if isinstance(node, AlternativeNode):
            return frozenset().union(*(begins for begins, _ in parts)), any(optional for _, optional in parts)
        begins = frozenset()
        for part, is_optional in parts:
            begins |= part
            if not is_optional:
                return begins, isinstance(node, RepetitionNode) and not node.min_times
        return begins, True

    def _more(self, node: ASTNode) -> frozenset[str]:
        """What may go on with a match of characters alone."""
        if isinstance(node, RuleRefNode):
            return self.goes_on(node.name)
        if isinstance(node, RepetitionNode):
            is_fixed = node.min_times == node.max_times
            return self._more(node.node) | (frozenset() if is_fixed else _characters(self._first(node.node)[0]))
        if isinstance(node, SequenceNode):
            more = frozenset[str]()
            for part in reversed(node.nodes):
                more |= self._more(part)
                begins, is_optional = self._first(part)
                if not is_optional:
                    break
                more |= _characters(begins)
            return more
        if isinstance(node, AlternativeNode):
            firsts = [_characters(self._first(part)[0]) for part in node.alternatives]
            if sum(map(len, firsts)) > len(frozenset().union(*firsts)):  # one may go on where another ends
                return self._all_of(node)
            more = frozenset().union(*(self._more(part) for part in node.alternatives))
            return more | _characters(self._first(node)[0]) if self._first(node)[1] else more
        return frozenset()

    def _all_of(self, node: ASTNode) -> frozenset[str]:
        if isinstance(node, RuleRefNode):
            if node.name not in self._letters:
                self._letters[node.name] = self._all_of(self._rules[node.name])
            return self._letters[node.name]
        if isinstance(node, RegexNode):
            return self._begins(node)
        return frozenset(_units(node)).union(*map(self._all_of, node.children()))

    def _begins(self, node: LiteralNode | RegexNode) -> frozenset[str]:
        if isinstance(node, LiteralNode):
            return frozenset(map(_meant, _UNIT.findall(node.value)[:1]))
        if node.rx not in self._classes:
            self._classes[node.rx] = _class(node.rx, self._known)
        return self._classes[node.rx]

    def _is_plain(self, name: str) -> bool:
        """Raises Exception where a rule is named that is not there."""
        if name not in self._plain:
            if name not in self._rules:
                raise Exception(f"Rule '{name}' not found")
            self._plain[name] = False  # of one that leads to itself
            called = [node.name for node in _nodes(self._rules[name]) if isinstance(node, RuleRefNode)]
            self._plain[name] = all(self._is_plain(other) for other in called) and name != "root"
        return self._plain[name]

    def _all_nodes(self) -> Iterator[ASTNode]:
        for node in self._rules.values():
            yield from _nodes(node)


def _nodes(node: ASTNode) -> Iterator[ASTNode]:
    yield node
    for part in node.children():
        yield from _nodes(part)


def _units(node: ASTNode) -> list[str]:
    """The characters that a text or a class names."""
    written = node.value if isinstance(node, LiteralNode) else node.rx if isinstance(node, RegexNode) else ""
    return [_meant(unit) for unit in _UNIT.findall(written)]


def _meant(unit: str) -> str:
    if unit[0] != "\\" or len(unit) == 1:
        return unit
    return chr(min(int(unit[2:], 16), 0x10FFFF)) if len(unit) > 2 else _ESCAPES.get(unit[1], unit[1])


def _class(written: str, known: frozenset[str]) -> frozenset[str]:
    """Of the known characters those of a class, or of `.`."""
    units = [*_UNIT.findall(written)][1:-1]
    if written == ".":
        return known - {"\n"}
    is_negated = units[:1] == ["^"]
    found, i = set[str](), int(is_negated)
    while i < len(units):
        low = high = _meant(units[i])
        if units[i + 1 : i + 2] == ["-"] and i + 2 < len(units):
            high, i = _meant(units[i + 2]), i + 2
        found |= {character for character in known if low <= character <= high}
        i += 1
    return known - found if is_negated else frozenset(found)


def _characters(begins: Begins) -> frozenset[str]:
    return frozenset(character for _, character in begins)
