"""LoadLoraBody and UnloadLoraBody: POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, field_validator

from hamburger.server.bodies.refusals import if_on
from hamburger.server.schema import Schema


class LoadLoraBody(Schema):
    """A LoRA adapter in a folder that the server sees."""

    refused: ClassVar[Mapping[str, Any]] = {
        "load_inplace": if_on("unload the adapter first"),
        "is_3d_lora_weight": if_on(),
    }

    lora_name: str = Field(min_length=1, max_length=256, description="what requests call it, as their model")
    lora_path: str = Field(
        min_length=1, max_length=4096, description="a folder of the server's machine, as PEFT writes it"
    )
    model: str | None = Field(None, description="the served model that it is of; the first if not named")

    @field_validator("lora_name")
    @classmethod
    def _is_printable(cls, name: str) -> str:
        if not name.isprintable() or not name.strip():
            raise ValueError("a name has printable characters alone")
        return name


class UnloadLoraBody(Schema):
    """A LoRA adapter that is loaded."""

    lora_name: str
    model: str | None = Field(None, description="the served model that it is of; names are of one adapter anyway")
