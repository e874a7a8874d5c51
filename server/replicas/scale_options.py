"""Options of a server that is scaled out over replicas, beside the settings of each. Knows no ray."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hamburger.server.config import ServeSettings, SettingsError, first_fault
from hamburger.server.load_settings import load_settings

logger = logging.getLogger(__name__)
Affinity = Literal["prefix", "session", "none"]
_SET_BY_RAY = {
    "host": "http_options.host of the Serve configuration",
    "port": "http_options.port of the Serve configuration",
    "ssl_certfile": "http_options.ssl_certfile of the Serve configuration",
    "ssl_keyfile": "http_options.ssl_keyfile of the Serve configuration",
    "access_log": "logging_config.enable_access_log of the Serve configuration",
    "max_connections": "nothing: Ray's proxy holds the connections, max_queued_requests bounds what waits",
    "log_format": "logging_config.encoding of the Serve configuration",
    "otlp_traces_endpoint": "nothing: a replica sends no spans",
    "response_file": "nothing: each replica stores its own, in memory",
    "engine_restarts": "nothing: a replica whose engine died is replaced as a whole",
}
_PROMISED = ("ssl_certfile", "ssl_keyfile", "response_file")  # to go on without them would break what users rely on


class ScaleOptions(BaseModel):
    """How many replicas there are, what each is given, and how requests reach them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    replicas: int = Field(1, ge=1, description="engines that run; with max_replicas, the fewest")
    max_replicas: int | None = Field(None, ge=1, description="most engines: their number follows the load")
    target_ongoing_requests: float | None = Field(
        None, gt=0, description="running and waiting requests an engine that the number of engines aims at"
    )
    max_ongoing_requests: int | None = Field(None, ge=1, description="most requests that one engine is given at once")
    max_queued_requests: int = Field(1024, ge=1, description="most requests that wait in one router")
    routers: int = Field(1, ge=1, description="processes that spread the requests")
    affinity: Affinity = Field("prefix", description="which requests go to the same engine")
    retries: int = Field(3, ge=0, description="how often a request is given to another engine after one was lost")
    drain_seconds: float = Field(
        300, ge=0, allow_inf_nan=False, description="how long running answers may go on in a replica that is replaced"
    )
    cpus: float = Field(1, ge=0, description="CPUs that a replica reserves, and threads of its engine")
    gpus: float = Field(0, ge=0, description="GPUs that a replica reserves; above 1, one for each rank of its engine")
    bundles: list[dict[str, float]] | None = Field(
        None, min_length=1, description="placement group of a replica, which runs in the first bundle"
    )

    @model_validator(mode="after")
    def _check_fit(self) -> ScaleOptions:
        if any(bundle.get("GPU", 0) for bundle in (self.bundles or [])[1:]):
            raise ValueError("bundles after the first ask for GPUs, but an engine uses the first one: put them there")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas is {self.max_replicas}: it must be at least replicas ({self.replicas})")
        if self.target_ongoing_requests is not None and self.max_replicas is None:
            raise ValueError("target_ongoing_requests is given without max_replicas")
        if self.bundles is not None and not self.model_fields_set.isdisjoint({"cpus", "gpus"}):
            raise ValueError("bundles and cpus or gpus are given: the first bundle says what a replica has")
        return self


def read_arguments(arguments: Mapping[str, Any]) -> tuple[ScaleOptions, ServeSettings]:
    """The arguments of the Serve application: fields of ScaleOptions, and settings of `hamburger serve`.

    Settings that are not among them come from the environment and the YAML file as ever, the default of drain_seconds
    too; those of them that mean nothing here are told in the log. Raises SettingsError, or ConfigError where settings
    do not fit together.
    """
    own = {name: value for name, value in arguments.items() if name in ScaleOptions.model_fields}
    given = {name: value for name, value in arguments.items() if name not in own}
    known = [*ScaleOptions.model_fields, *(name for name in ServeSettings.model_fields if name not in _SET_BY_RAY)]
    for name in given:
        if name in _SET_BY_RAY:
            raise SettingsError(f"{name} is no setting of a replica. What sets it here: {_SET_BY_RAY[name]}.")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f": did you mean {near[0]}?" if near else f". Known are {', '.join(known)}."
            raise SettingsError(f"there is no option {name!r}{hint}")
    settings = load_settings(given)
    _check_found(settings)
    if "drain_seconds" in settings.model_fields_set:
        own.setdefault("drain_seconds", settings.drain_seconds)
    try:
        options = ScaleOptions(**own)
    except ValidationError as error:
        name, value, reason = first_fault(error)
        raise SettingsError(f"{name} is {value!r}: {reason}" if name else reason) from error
    if settings.also:
        raise SettingsError("also is given, but a replica has one engine: deploy an application for each model.")
    if settings.allow_lora_loading:
        raise SettingsError(
            "allow_lora_loading is on, but one replica alone would load what a request asks for: name the adapters in "
            "lora, which each replica loads."
        )
    _check_gpus(options, settings)
    return options, settings


def _check_found(settings: ServeSettings) -> None:
    """What the environment or the YAML file say that no replica can do: refused if it was promised, else told."""
    for name in (name for name in _SET_BY_RAY if name in settings.model_fields_set):
        message = (
            f"{name} is set in the environment or the file of HAMBURGER_CONFIG, but is no setting of a replica. What "
            f"sets it here: {_SET_BY_RAY[name]}."
        )
        if name in _PROMISED:
            raise SettingsError(message)
        logger.warning("%s It is ignored.", message)


def _check_gpus(options: ScaleOptions, settings: ServeSettings) -> None:
    """An engine uses one GPU, or part of one, or one for each of its ranks."""
    given = options.gpus if options.bundles is None else options.bundles[0].get("GPU", 0)
    args = settings.engine_args()
    size = args.tensor_parallel_size
    if 0 < given < 1 and args.kv_cache_memory is None:
        raise SettingsError(
            f"a replica reserves {given:g} of a GPU, but its KV pool takes a share of the whole: set kv_cache_memory."
        )
    if given > 1 and given != size:
        raise SettingsError(
            f"a replica reserves {given:g} GPUs, but tensor_parallel_size is {size}: make them equal, or use replicas."
        )
    if 0 < given < size and size > 1:
        raise SettingsError(f"tensor_parallel_size is {size}, but a replica reserves {given:g} GPUs: make them equal.")


def seats(options: ScaleOptions, settings: ServeSettings) -> tuple[int, float]:
    """(max_ongoing_requests, target_ongoing_requests) of an engine, where they are not set.

    An engine is given a few more requests than run at once, so that a seat which gets free is taken at once. All others
    wait in the router: there they can still go anywhere. Another engine is wanted before the seats are all taken.
    """
    num_seats = settings.engine_args().max_num_seqs
    most = options.max_ongoing_requests or num_seats + max(1, num_seats // 4)
    return most, options.target_ongoing_requests or max(1.0, 0.75 * num_seats)
