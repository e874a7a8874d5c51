"""Patterns of a JSON Schema, which are JavaScript's, as the library reads them: Rust's, over JSON's escapes."""

from __future__ import annotations

import re

# With look-around, which the library lacks, and the same without: Pydantic 2.12's Decimal and zod 4's email.
_PLAIN = {
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)$",
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+\-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    ),
}
# Fractions of a second, and numbers in durations, may have digits without end in these.
_DIGITS_IN_A_ROW = "^([0-9]{0,9}[^0-9])*[0-9]{0,9}$"
# The library has a 29th of February in all years.
_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DAYS = f"^([0-9]{{4}}-(0[13-9]|1[0-2]|02-([01][0-9]|2[0-8]))|{_LEAP}-02-29)([^0-9][0-9]{{0,9}})*$"
# What holds beside a format.
OF_FORMATS = {
    "date": _DAYS, "date-time": _DAYS, "time": _DIGITS_IN_A_ROW, "duration": _DIGITS_IN_A_ROW
}  # fmt: skip
# An escaped character, or a class: whether it leaves out what it lists, and what; what stands first is meant.
_CLASS = re.compile(r"\\.|\[(\^?)(\]?)((?:\\.|[^\\\]])*)\]", re.DOTALL)
# In Rust's classes a bracket begins another class (but for [:alpha:] and its like), and signs that are doubled compute.
_COMPUTES = re.compile(r"\\.|\[(?!:\^?[a-z]+:)|&&|~~|--", re.DOTALL)


def readable_pattern(pattern: str) -> str:
    return _CLASS.sub(_readable, _PLAIN.get(pattern, pattern))


def _readable(found: re.Match[str]) -> str:
    if found[1] is None:
        return found[0]
    first, rest = (r"\]", found[3]) if found[2] else ("", re.sub("^-", r"\-", found[3]))
    listed = first + _COMPUTES.sub(_meant, rest)
    # One that leaves out some characters but no control character lets a quote and a backslash pass that are left out,
    # as their escaped forms; one that leaves out U+0000, too, is read rightly.
    return rf"[^\x00{listed}]" if found[1] else f"[{listed}]"


def _meant(found: re.Match[str]) -> str:
    return found[0] if found[0].startswith("\\") else rf"{found[0][:-1]}\{found[0][-1]}"
