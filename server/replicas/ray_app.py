"""build: HAMburger Serve on Ray Serve, several replicas behind one address. docs/ray.md says how it is run.

    HTTP proxy (Ray's) -> router (forwarding.py) -> engine replicas (replica.py), each with its engine process

Ray (the extra `scale`) is imported here, only where it is used, and in ray_seats.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hamburger.engine.types.errors import QueueFull
from hamburger.server.config import ServeSettings
from hamburger.server.launch import engine_arguments
from hamburger.server.replicas.forwarding import ReplicaLost, create_front, replica_settings
from hamburger.server.replicas.replica import Replica, WholeRequest, WholeResponse
from hamburger.server.replicas.scale_options import ScaleOptions, read_arguments, seats

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger(__name__)
_ROUTER = "hamburger.server.replicas.ray_seats.SeatedRouter"
_RESERVED = 8  # seats of a replica for what only asks: metrics, health
_DIED = 1


def build(arguments: Mapping[str, Any]) -> Application:
    """The Serve application; `arguments` are those of scale.read_arguments. Raises SettingsError."""
    from ray import serve
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig

    options, settings = read_arguments(arguments)
    engine_arguments(settings)
    settings.api_keys()
    most, target = seats(options, settings)
    engine_options: dict[str, Any] = {
        "max_ongoing_requests": most + _RESERVED,
        "request_router_config": RequestRouterConfig(
            request_router_class=_ROUTER, request_router_kwargs={"reserved": _RESERVED}
        ),
        "max_queued_requests": options.max_queued_requests,
        "graceful_shutdown_timeout_s": options.drain_seconds,
    }
    if options.max_replicas is None:
        engine_options["num_replicas"] = options.replicas
    else:
        engine_options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=options.replicas, max_replicas=options.max_replicas, target_ongoing_requests=target
        )
    if options.bundles is None:
        engine_options["ray_actor_options"] = {"num_cpus": options.cpus, "num_gpus": options.gpus}
    else:
        first = options.bundles[0]
        engine_options["placement_group_bundles"] = options.bundles
        engine_options["ray_actor_options"] = {"num_cpus": first.get("CPU", 0), "num_gpus": first.get("GPU", 0)}
    engines = serve.deployment(EngineReplica).options(name="engine", **engine_options)
    router = serve.deployment(serve.ingress()(Router)).options(
        name="router",
        num_replicas=options.routers,
        # All that wait and all that run, with room for what only asks.
        max_ongoing_requests=2 * (options.max_queued_requests + most * (options.max_replicas or options.replicas)),
        graceful_shutdown_timeout_s=options.drain_seconds,
        ray_actor_options={"num_cpus": 0},
    )
    application: Application = router.bind(engines.bind(replica_settings(settings), most), options, settings)
    return application


class EngineReplica:
    """A deployment: one engine. A replica whose engine is dead for good ends, so that Ray makes another.

    most: requests that it takes at once. Ray lets in some more, which are asked for metrics and health.
    """

    async def __init__(self, settings: ServeSettings, most: int) -> None:  # type: ignore[misc]  # Ray awaits it
        from ray import serve

        self._most, self._num_taken = most, 0
        name = serve.get_replica_context().replica_id.unique_id
        self._replica = await Replica.launch(settings, name, _end)

    async def answer(self, call: WholeRequest) -> AsyncGenerator[list[Message]]:
        """Nothing where it is full: routers do not know of each other, and not at once of what they sent themselves."""
        if self._num_taken >= self._most:
            return
        self._num_taken += 1
        try:
            async with contextlib.aclosing(self._replica.answer(call)) as batches:
                async for batch in batches:
                    yield batch
        finally:
            self._num_taken -= 1

    async def whole(self, call: WholeRequest) -> WholeResponse:
        return await self._replica.whole(call)

    async def check_health(self) -> None:
        """Ray asks; an exception has it replace the replica."""
        fault = self._replica.fault()
        if fault is not None:
            raise RuntimeError(fault)


class Router:
    """The deployment that answers HTTP, for any of the engines."""

    def __init__(self, engines: DeploymentHandle[Any], options: ScaleOptions, settings: ServeSettings) -> None:
        self._app = create_front(RayReplicas(engines), options, settings)
        self._app.add_middleware(Leaving)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app


class Leaving:
    """Tells the application that a client left as servers do: Ray cancels the call by which it is asked."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from ray.exceptions import TaskCancelledError

        async def told() -> Message:
            try:
                return await receive()
            except TaskCancelledError:
                return {"type": "http.disconnect"}

        await self._app(scope, told, send)


class RayReplicas:
    """The replicas (forwarding.Replicas) behind a handle of the deployment `engine`."""

    def __init__(self, engines: DeploymentHandle[Any]) -> None:
        self._engines = engines

    async def send(self, call: WholeRequest, key: str | None) -> AsyncGenerator[list[Message]]:
        from ray.exceptions import RayError, RayTaskError
        from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException

        handle = self._engines.options(method_name="answer", stream=True, session_id=key or "")
        response = handle.remote(call)
        try:
            async for batch in response:
                yield batch
        except BackPressureError as error:
            raise QueueFull(f"{error.message} Try again later.") from error
        except RayTaskError:  # it answered, with a fault of ours
            raise
        except (asyncio.CancelledError, GeneratorExit) as error:
            with contextlib.suppress(RayError, RayServeException):  # what it had failed with
                response.cancel()
            task = asyncio.current_task()
            if isinstance(error, GeneratorExit) or task is None or task.cancelling():
                raise  # our client went away
            raise ReplicaLost("the replica gave the call up") from error
        except (RayError, DeploymentUnavailableError) as error:  # the actor, its machine or its network is gone
            raise ReplicaLost(f"{type(error).__name__}: {error}") from error

    async def ask_all(self, call: WholeRequest) -> list[WholeResponse]:
        from ray.serve.exceptions import DeploymentUnavailableError

        try:
            found = await self._engines.broadcast("whole", call).results_async(return_exceptions=True)
        except DeploymentUnavailableError as error:
            raise ReplicaLost(error.message) from error
        return [answer for answer in found if isinstance(answer, WholeResponse)]


def _end() -> None:
    logger.error("The engine is dead: this replica ends.")
    os._exit(_DIED)
