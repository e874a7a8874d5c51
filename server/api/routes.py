"""The endpoints beside generating and tokenizing: models, health, metrics, version."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from hamburger.engine.health import liveness_fault
from hamburger.server.api.model_context import ModelContext
from hamburger.server.api.openapi import REFUSED
from hamburger.server.api.served_models import ServedModels
from hamburger.server.operation.metrics import CONTENT_TYPE


def model_routes(models: ServedModels) -> APIRouter:
    """What is served."""
    router = APIRouter(tags=["model"], responses=REFUSED)

    @router.head("/v1/models", include_in_schema=False)
    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """The served models, and what else each may be called."""
        cards = [served.card(name) for served in models.served() for name in served.names]
        # As Anthropic's clients know pages.
        ends = {"has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
        return {"object": "list", "data": cards, **ends}

    @router.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> dict[str, Any]:
        """One model; any alias NAME@c with c in [0, 1] is one."""
        served = models.find(model_id).served
        served.confidence_of(model_id)
        return served.card(model_id)

    return router


def operation_routes(models: ServedModels) -> APIRouter:
    """What operators and load balancers ask; open without a key."""
    router = APIRouter(tags=["operation"])
    unavailable: dict[int | str, dict[str, Any]] = {
        "4XX": REFUSED["4XX"],
        503: {"description": "It is not.", "content": {"application/json": {}}},
    }

    @router.head("/health", include_in_schema=False)
    @router.get("/health", responses=unavailable)
    async def health() -> JSONResponse:
        """Liveness: 503 when an engine is dead or hangs. Draining, restarting and a long prefill are alive."""
        health = {context.served.name: context.engine.health() for context in models}
        words = {name: "restarting" if state.restarting else "ok" for name, state in health.items()}
        return _status({name: liveness_fault(state) for name, state in health.items()}, "ok", words)

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", responses=unavailable)
    async def ready() -> JSONResponse:
        """Readiness: 503 when new requests should go elsewhere: an engine is dead, hangs or drains, a queue is full."""
        return _status({context.served.name: _readiness_fault(context) for context in models}, "ready")

    @router.head("/metrics", include_in_schema=False)
    @router.get("/metrics", response_class=PlainTextResponse, responses=REFUSED)
    async def metrics() -> Response:
        """Prometheus text."""
        return Response(models.first.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    @router.get("/version", responses=REFUSED)
    async def server_version() -> dict[str, str]:
        """The version of this server."""
        return {"version": version("hamburger-serve")}

    return router


def _readiness_fault(context: ModelContext) -> str | None:
    state = context.engine.health()
    fault = "the engine starts again" if state.restarting else liveness_fault(state)
    if fault is None and state.draining:
        fault = "draining"
    if fault is None and state.num_waiting >= context.engine.max_queue:
        fault = f"full: {state.num_waiting} requests wait"
    return fault


def _status(faults: Mapping[str, str | None], word: str, words: Mapping[str, str] | None = None) -> JSONResponse:
    """faults: of each model by its name, None for one that is well. One fault is enough for a 503. words: for models
    that are well, if not `word`."""
    models = {name: fault or (words or {}).get(name, word) for name, fault in faults.items()}
    found = {name: fault for name, fault in faults.items() if fault is not None}
    if not found:
        return JSONResponse({"status": word, "models": models})
    reasons = [fault if len(faults) == 1 else f"{name}: {fault}" for name, fault in found.items()]
    return JSONResponse({"status": "unavailable", "reason": "; ".join(reasons), "models": models}, status_code=503)
