"""The settings of `hamburger serve`, their checks and what they become. No torch, no HTTP."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, create_model, field_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from hamburger.engine.dial.confidence_dial import AutoConfidence
from hamburger.engine.logs import LogFormat
from hamburger.engine.types.config import ENGINE_SETTINGS, SETTLE_SETTINGS, EngineArgs
from hamburger.engine.types.setting import Setting
from hamburger.server.additional_models import NOT_INHERITED, AdditionalModel, parse_additional_models
from hamburger.server.lora_adapters import NamedLora, parse_loras
from hamburger.server.setting_values import (
    comma_separated,
    confidence_or_auto,
    number_only,
    on_or_off,
    parse_bytes,
    sampling_values,
    template_values,
    web_origins,
)

ENV_PREFIX = "HAMBURGER_"


class SettingsError(ValueError):
    """A setting that cannot be used; the message is one line that names it as the user wrote it."""


def _engine_field(declared: Setting) -> Any:
    """The field of ServeSettings for a setting of the engine."""
    kind: Any = Literal[declared.choices] if declared.choices else declared.type
    if "on" in declared.choices:
        kind = Annotated[kind, BeforeValidator(on_or_off)]
    if declared.is_size:
        kind = Annotated[kind, BeforeValidator(parse_bytes)]
    bounds: Any = {"ge": declared.at_least, "gt": declared.above, "le": declared.at_most}
    return kind, Field(declared.default, description=declared.help, **bounds)


_CONFIG = SettingsConfigDict(
    env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, protected_namespaces=()
)
if TYPE_CHECKING:
    # What EngineArgs declares is known when this module runs: whoever wants such a setting asks engine_args() for it.
    _EngineSettings = BaseSettings
else:
    _EngineSettings = create_model(
        "_EngineSettings",
        __base__=BaseSettings,
        **{name: _engine_field(declared) for name, declared in ENGINE_SETTINGS.items() if name != "confidence"},
    )


class ServeSettings(_EngineSettings):
    """What `hamburger serve` can be told: the settings of EngineArgs, and those of the server, which are declared here.

    Each field is the option --field-name, the variable HAMBURGER_FIELD_NAME and the YAML key field_name.
    """

    model_config = _CONFIG

    served_model_name: str | None = Field(None, min_length=1, description="name that clients ask for")
    model_alias: Annotated[list[str], NoDecode, BeforeValidator(comma_separated)] = Field(
        [], description="further name that clients may ask for it by; several with commas between them"
    )
    also: Annotated[list[AdditionalModel], NoDecode, BeforeValidator(parse_additional_models)] = Field(
        [],
        description="a further model to serve beside it, in an engine of its own: NAME=MODEL[,SETTING=VALUE...], such "
        "as base=builtin; several as further options, or with ; between them",
    )
    lora: Annotated[list[NamedLora], NoDecode, BeforeValidator(parse_loras)] = Field(
        [],
        description="a LoRA adapter of the model, served beside it under a name of its own: NAME=PATH, a folder that "
        "PEFT wrote; several as further options, or with ; between them",
    )
    allow_lora_loading: bool = Field(
        False, description="whether requests may load LoRA adapters from folders of this machine, and unload them"
    )
    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    api_key: Annotated[list[str], NoDecode, BeforeValidator(comma_separated)] = Field(
        [], repr=False, description="key that clients must send; several with commas between them"
    )
    api_key_file: Path | None = Field(None, description="file with further keys, one a line")
    key_requests: int | None = Field(
        None, ge=1, description="most requests of one API key at once; each choice of an answer is one"
    )
    key_tokens_per_minute: int | None = Field(
        None, ge=1, description="tokens of prompts and answers that one API key may use in a minute"
    )
    key_queue_share: float = Field(
        1.0, gt=0, le=1, description="share of the places in the queue that one API key may take"
    )
    allow_priority: bool = Field(True, description="whether a request may set its priority")
    public_operation: bool = Field(
        True, description="whether /health, /ready, /metrics and /version answer without a key"
    )
    playground: bool = Field(True, description="whether / is a page to try the models on")
    cors_origin: Annotated[list[str], NoDecode, BeforeValidator(web_origins)] = Field(
        [], description="web origin whose pages may call the server; several with commas between them, * for all"
    )
    ssl_certfile: Path | None = Field(None, description="certificate chain (PEM) to serve HTTPS with")
    ssl_keyfile: Path | None = Field(None, description="its private key (PEM), if it is not in the same file")
    # As EngineArgs.confidence, but it may be auto, too.
    confidence: Annotated[float | Literal["auto"] | None, BeforeValidator(confidence_or_auto)] = Field(
        None,
        description="confidence of requests that name none, or auto to lower it under load (default: the checkpoint's)",
    )
    target_tpot_ms: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="milliseconds a token that confidence auto holds"
    )
    min_confidence: float | None = Field(
        None, ge=0, le=1, description="lowest that confidence auto chooses (default: 0.2 below the highest)"
    )
    max_confidence: float | None = Field(
        None, ge=0, le=1, description="highest that confidence auto chooses (default: the checkpoint's)"
    )
    response_store: Annotated[int, BeforeValidator(parse_bytes)] = Field(
        64 * 2**20, ge=0, description="memory for stored responses (/v1/responses), the oldest of which make room"
    )
    response_file: Path | None = Field(
        None, description="file that keeps stored responses when the server ends (SQLite; default: none)"
    )
    max_body_size: Annotated[int, BeforeValidator(parse_bytes)] = Field(
        8 * 2**20, ge=1, description="largest body of a request, such as 8MiB"
    )
    max_connections: int = Field(2048, ge=1, description="most connections that may be open")
    client_seconds: float = Field(
        60, gt=0, allow_inf_nan=False, description="longest that a client may take to send a request, or to read on"
    )
    sse_keep_alive_seconds: float = Field(
        30,
        ge=0,
        allow_inf_nan=False,
        description="seconds of silence after which a stream is sent a comment; 0: never",
    )
    max_stop_strings: int = Field(256, ge=0, description="most stop strings of a request")
    compact_json: bool = Field(
        False, description="whether JSON of schemas and forced calls is one line, without indentation"
    )
    tool_parser: Literal["auto", "hermes", "llama3", "granite", "mistral", "olmo3", "pythonic", "json"] = Field(
        "auto", description="how the model writes tool calls; auto reads its chat template"
    )
    chat_template: Path | None = Field(
        None, description="file with the chat template (jinja) that chats are written by (default: the model's own)"
    )
    chat_template_kwargs: Annotated[dict[str, Any], NoDecode, BeforeValidator(template_values)] = Field(
        {}, description="JSON object of variables that the chat template is given where a chat does not set them"
    )
    sampling_defaults: Annotated[
        Literal["model", "openai"] | dict[str, int | float], NoDecode, BeforeValidator(sampling_values)
    ] = Field(
        "model",
        description="how requests are sampled that do not say: as the model's files recommend (model), at temperature "
        "1 and no more (openai), or by a JSON object with temperature, top_p, top_k, min_p, repetition_penalty",
    )
    drain_seconds: float = Field(
        5.0, ge=0, allow_inf_nan=False, description="how long running answers may go on after a signal to stop"
    )
    engine_restarts: int = Field(
        0, ge=0, description="how often an engine that died is started again; 0 ends the server for its supervisor"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("warning", description="what is logged to stderr")
    log_format: LogFormat = Field("text", description="text for people, or json: one object a line")
    access_log: bool = Field(True, description="log one line about each request, without its text")
    otlp_traces_endpoint: str | None = Field(
        None, description="URL of an OpenTelemetry collector that is sent a span of each request (needs the extra otel)"
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_no_flags(cls, value: Any, of: ValidationInfo) -> Any:
        kind = cls.model_fields[of.field_name or ""].annotation
        return number_only(value) if kind in (int, float, int | None, float | None) else value

    def api_keys(self) -> list[str]:
        """Those of the command line and those of the file. Raises SettingsError when the file cannot be used, and for
        limits of keys without keys."""
        if self.api_key_file is None:
            for name in ("key_requests", "key_tokens_per_minute", "key_queue_share"):
                if getattr(self, name) != type(self).model_fields[name].default and not self.api_key:
                    raise SettingsError(f"{name} is given, but there are no API keys: add --api-key or --api-key-file.")
            return _sendable(self.api_key, "api_key")
        try:
            text = self.api_key_file.read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as error:
            raise SettingsError(f"api_key_file {self.api_key_file} cannot be read: {error}.") from error
        keys = [key for line in text.splitlines() if (key := re.split(r"(?:^|\s)#", line)[0].strip())]
        if not keys:  # an empty file must not open the server to everyone
            raise SettingsError(f"api_key_file {self.api_key_file} holds no key: write one a line.")
        return [*_sendable(self.api_key, "api_key"), *_sendable(keys, f"api_key_file {self.api_key_file}")]

    def models(self) -> list[ServeSettings]:
        """The settings of each model: these, and what they become for each of `also`. Raises SettingsError."""
        return [self.model_copy(update={"also": []}), *map(self._for_additional, self.also)]

    def _for_additional(self, additional: AdditionalModel) -> ServeSettings:
        shared = {name: getattr(self, name) for name in type(self).model_fields.keys() - NOT_INHERITED}
        own: dict[str, Any] = {
            "also": [],
            "model": additional.model,
            "served_model_name": additional.name,
            **additional.settings,
        }
        # In full, or the environment would fill the gaps with what it says of the first model.
        unset = {name: type(self).model_fields[name].default for name in NOT_INHERITED}
        try:
            made = ServeSettings(**(shared | unset | own))
        except ValidationError as error:
            name, value, reason = first_fault(error)
            raise SettingsError(f"also {additional.name}: {name} is {value!r}: {reason}") from error
        if not made.model_dump(include={"settle"})["settle"]:  # how others settle means nothing to it
            return made.model_copy(update=dict.fromkeys(SETTLE_SETTINGS - additional.settings.keys()))
        return made

    def engine_args(self) -> EngineArgs:
        """What its engine is asked for. Raises ConfigError or SettingsError when settings do not fit together."""
        given = {name: getattr(self, name) for name in ENGINE_SETTINGS}
        if self.confidence == "auto":  # its upper bound is what the engine falls back to
            given["confidence"] = self.max_confidence
        named = len(self.lora)
        if named > given["max_loras"] > 0:
            raise SettingsError(
                f"lora names {named} adapters, but max_loras is {given['max_loras']}: raise it, or name fewer."
            )
        given["max_loras"] = given["max_loras"] or named
        return EngineArgs(**given)

    def auto_confidence(self) -> AutoConfidence | None:
        """What confidence auto is asked to do, None without it. Raises SettingsError for one without the other."""
        if self.confidence != "auto":
            for name in ("target_tpot_ms", "min_confidence", "max_confidence"):
                if getattr(self, name) is not None:
                    raise SettingsError(f"{name} is given, but confidence is not auto: add --confidence auto.")
            return None
        if self.target_tpot_ms is None:
            raise SettingsError("confidence is auto, but nothing says what for: add --target-tpot-ms.")
        return AutoConfidence(target_seconds=self.target_tpot_ms / 1000, min_confidence=self.min_confidence)


def _sendable(keys: list[str], where: str) -> list[str]:
    """Raises SettingsError for a key that the usual clients cannot put into a header."""
    for n, key in enumerate(keys, start=1):
        if not key.isascii() or not key.isprintable() or key != key.strip():
            raise SettingsError(f"{where}: key {n} of {len(keys)} must be printable ASCII, without spaces around it.")
    return keys


def first_fault(error: ValidationError) -> tuple[str, Any, str]:
    """The setting that is wrong, its value, and why: the end of a sentence. "" where they do not fit together."""
    first = error.errors(include_url=False, include_context=False)[0]
    reason = first["msg"].removeprefix("Value error, ")
    return str(first["loc"][0] if first["loc"] else ""), first["input"], f"{reason[0].lower()}{reason[1:]}."
