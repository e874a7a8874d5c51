"""Schema: the base of everything that clients send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field

T = TypeVar("T")
# Its first wrong element is told, and no list made of all the others.
ListOf = Annotated[list[T], Field(fail_fast=True)]


class Schema(BaseModel):
    """Types are strict (a bool is no int, "1" is no number), unknown fields are ignored, NaN is refused."""

    refused: ClassVar[Mapping[str, Any]] = {}  # fields of other servers (bodies/known_fields.py)

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())
