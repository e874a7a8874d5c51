"""Schema: the base of everything that clients send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

T = TypeVar("T")
# Its first wrong element is told, and no list made of all the others.
ListOf = Annotated[list[T], Field(fail_fast=True)]


def one_of(forms: str) -> WrapValidator:
    """Of a type with several forms: what is none of them is told all, where pydantic would name its own parts."""

    def check(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError as error:
            raise ValueError(f"it must be {forms}") from error

    return WrapValidator(check)


class Schema(BaseModel):
    """Types are strict (a bool is no int, "1" is no number), unknown fields are ignored, NaN is refused."""

    refused: ClassVar[Mapping[str, Any]] = {}  # fields of other servers (bodies/known_fields.py)

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())
