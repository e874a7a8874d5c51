"""What a request to one model is given: its engine, tokenizer, metrics and settings, and its names."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from hamburger.engine.async_engine import AsyncEngine
from hamburger.engine.grammar.processes import GrammarProcesses
from hamburger.engine.loras import LoraAdapter
from hamburger.engine.sampling_defaults import SamplingDefaults
from hamburger.engine.types.errors import InvalidRequest, shown
from hamburger.engine.types.messages import EngineInfo
from hamburger.server.api.long_texts import LongTexts
from hamburger.server.config import ServeSettings
from hamburger.server.operation.metrics import ServerMetrics
from hamburger.server.server_tokenizer import ServerTokenizer
from hamburger.server.tools.reasoning import Markers
from hamburger.server.tools.tool_parsers import Family

_NUMBER = re.compile(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)")
_WRITTEN_NUMBER = re.compile(rf"{_NUMBER.pattern}([eE][+-]?[0-9]{{1,3}})?")  # as programs write small ones


def is_alias(model: str, name: str) -> bool:
    """Whether it is NAME@c of this name, whatever number c is."""
    of, _, number = model.rpartition("@")
    return of == name and _NUMBER.fullmatch(number) is not None


class ServedModel:
    """A model that is served, and its aliases NAME@c, which set the confidence of clients that cannot add fields.

    names: its own, and those of model_alias.
    fingerprint: the `system_fingerprint` of answers; it changes with whatever may change their text.
    """

    def __init__(
        self,
        name: str,
        info: EngineInfo,
        text_settings: str,
        of: str | None = None,
        adapter: LoraAdapter | None = None,
        aliases: Sequence[str] = (),
    ) -> None:
        """text_settings: whatever else its answers depend on. of: the model that it is an adapter of, and which
        adapter; None for a model itself. aliases: its further names."""
        self.names = (name, *aliases)
        self.name = name
        self.info = info
        self._text_settings = text_settings
        self._parent = of
        self.created = int(time.time()) if adapter is None else adapter.created
        self._root = info.model if adapter is None else adapter.path
        build = (
            f"{version('hamburger-serve')} {info.model} {info.dtype} {info.quantization} {info.device} {info.groups} "
            f"{info.kv_cache_dtype} {info.settling} {text_settings}"
        )
        if adapter is not None:
            build += f" {adapter.number} {adapter.path}"
        self.fingerprint = "fp_" + hashlib.sha256(build.encode()).hexdigest()[:10]

    def of_lora(self, adapter: LoraAdapter) -> ServedModel:
        return ServedModel(adapter.name, self.info, self._text_settings, self.name, adapter)

    def confidence_of(self, model: str | None) -> float | None:
        """The confidence that a name of this model asks for; None for the plain name or none at all.

        Raises InvalidRequest for an alias outside [0, 1].
        """
        if model is None or model in self.names:
            return None
        number = model.rpartition("@")[2]
        if not 0 <= float(number) <= 1:
            raise InvalidRequest(f"model is {shown(model)}: the confidence after @ must be in [0, 1].", "model")
        return float(number)

    def has_alias(self, model: str) -> bool:
        """Whether it is NAME@c of this model, whatever number c is."""
        return any(is_alias(model, name) for name in self.names)

    def card(self, model_id: str) -> dict[str, Any]:
        """One entry of /v1/models."""
        return {
            "id": model_id,
            "object": "model",
            "created": self.created,
            "owned_by": "hamburger",
            # The same for Anthropic's clients.
            "type": "model",
            "display_name": model_id,
            "created_at": datetime.fromtimestamp(self.created, UTC).isoformat(timespec="seconds"),
            "root": self._root,
            "parent": self._parent if model_id == self.name else self.name,
            "max_model_len": self.info.max_model_len,
            "max_input_tokens": self.info.max_model_len,  # as Anthropic's clients know it
            "max_tokens": self.info.max_model_len,
            "aliases": [*self.names[1:], f"{self.name}@c, with a confidence c in [0, 1]"],
        }


CONFIDENCE_HEADER = "X-HAMburger-Confidence"


def choose_confidence(field: float | None, alias: float | None, headers: Mapping[str, str]) -> float | None:
    """The confidence of a request: its field, else its model alias, else its header, else None (the server's default).

    Raises InvalidRequest when it falls to a header that is no number in [0, 1].
    """
    header = headers.get(CONFIDENCE_HEADER)
    if field is not None or alias is not None or header is None:
        return alias if field is None else field
    if not _WRITTEN_NUMBER.fullmatch(header.strip()) or not 0 <= float(header) <= 1:
        raise InvalidRequest(f"{CONFIDENCE_HEADER} is {shown(header)}: it must be in [0, 1].", CONFIDENCE_HEADER)
    return float(header)


@dataclass(frozen=True, slots=True)
class ModelContext:
    """One for each model. Routes get all of them (served_models.py) and nothing global.

    settings: this model's. tool_family: how it writes calls. markers: of what it writes for itself.
    sampling_defaults: of requests that do not say. counted_texts: of which no answer is made. lora: the LoRA adapter
    that answers; None: the model itself. All else is then that of its model.
    """

    engine: AsyncEngine
    tokenizer: ServerTokenizer
    metrics: ServerMetrics
    settings: ServeSettings
    served: ServedModel
    grammars: GrammarProcesses
    tool_family: Family
    markers: Markers | None
    sampling_defaults: SamplingDefaults
    long_prompts: LongTexts
    counted_texts: LongTexts
    lora: str | None = None

    def close(self) -> None:
        self.grammars.close()
        self.long_prompts.close()
        self.counted_texts.close()

    def of_lora(self, adapter: LoraAdapter) -> ModelContext:
        return replace(self, served=self.served.of_lora(adapter), lora=adapter.name)
