"""Setting: what is declared of one thing that a user may set. EngineArgs declares them; everybody else reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
_KEY = "setting"  # where the metadata of a dataclass field keeps the declaration


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """help: one line for `hamburger serve --help`. at_least, above, at_most: the range of a number; None is no bound.

    choices: all values that there are, else (). is_size: bytes, which people write as 4GiB. of_server: it bounds the
    server's queue, so LLM, which has none, does not take it. name, type and default are those of the field.
    """

    help: str
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    choices: tuple[str, ...] = ()
    is_size: bool = False
    of_server: bool = False
    name: str = ""
    type: Any = None
    default: Any = None

    def fault(self, value: Any) -> str | None:
        """What is wrong with a value, as the end of "NAME is VALUE: ..."; None for one that may be set."""
        if value is None and self.default is None:
            return None
        if self.choices and value not in self.choices:
            return f"it must be one of {', '.join(self.choices)}."
        kinds = get_args(self.type) or (self.type,)
        if bool in kinds and not isinstance(value, bool):
            return "it must be True or False."
        if str in kinds and not isinstance(value, str):
            return "it must be a text."
        if int in kinds or float in kinds:
            unit = " of bytes" if self.is_size else ""
            if isinstance(value, bool) or not isinstance(value, int | float):
                return f"it must be a number{unit}."
            if float not in kinds and not isinstance(value, int):
                return f"it must be a whole number{unit}."
        # Each comparison is false for a NaN.
        if self.at_least is not None and self.at_most is not None and not self.at_least <= value <= self.at_most:
            return f"it must be in [{self.at_least:g}, {self.at_most:g}]."
        if self.at_least is not None and not value >= self.at_least:
            return f"it must be at least {self.at_least:g}."
        if self.above is not None and not value > self.above:
            return f"it must be above {self.above:g}."
        return None


def setting(default: T, help: str, **declared: Any) -> T:
    """A field of a dataclass that users may set; declared: fields of Setting."""
    field: T = dataclasses.field(default=default, metadata={_KEY: Setting(help=help, **declared)})
    return field


def declared_settings(dataclass: type) -> Mapping[str, Setting]:
    """The declarations of a dataclass's fields by their names, in the order of the fields."""
    types = get_type_hints(dataclass)
    found: dict[str, Setting] = {}
    for field in dataclasses.fields(dataclass):
        if (declared := field.metadata.get(_KEY)) is not None:
            hint = types[field.name]
            choices = get_args(hint) if get_origin(hint) is Literal else declared.choices
            found[field.name] = dataclasses.replace(
                declared, name=field.name, type=hint, default=field.default, choices=choices
            )
    return MappingProxyType(found)
