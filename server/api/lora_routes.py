"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: adapters that come and go while the server runs."""

from __future__ import annotations

import logging

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse

from hamburger.engine.types.errors import InvalidRequest, shown
from hamburger.server.api.errors import ApiError
from hamburger.server.api.model_context import is_alias
from hamburger.server.api.openapi import REFUSED, TEXT, body_of
from hamburger.server.api.request_body import read_body
from hamburger.server.api.served_models import ServedModels
from hamburger.server.bodies.lora import LoadLoraBody, UnloadLoraBody
from hamburger.server.config import ServeSettings

logger = logging.getLogger(__name__)


def lora_routes(models: ServedModels, settings: ServeSettings) -> APIRouter:
    """Both answer 403 unless the operator allows them: a request names a path on the server's disk."""
    router = APIRouter(tags=["model"], responses=REFUSED)
    loading: set[str] = set()  # of all models: an engine knows only its own

    @router.post("/v1/load_lora_adapter", responses=TEXT, openapi_extra=body_of(LoadLoraBody))
    async def load_lora_adapter(request: Request) -> PlainTextResponse:
        """Load a LoRA adapter; requests name it as their model from then on."""
        _check_allowed(settings)
        body = await read_body(request, LoadLoraBody, settings)
        context = models.choose(request, body.model)
        if context.lora is not None:
            raise InvalidRequest(f"model is {shown(body.model)}, an adapter itself: name the model it is of.", "model")
        name = body.lora_name
        if name in loading or models.serves(name):
            raise InvalidRequest(
                f"The name {shown(name)} is served already, or on its way: unload it, or take another.", "lora_name"
            )
        for other in [*loading, *(name for served in models.served() for name in served.names)]:
            if is_alias(name, other) or is_alias(other, name):
                raise InvalidRequest(
                    f"{shown(name)} and {shown(other)} would be one name with a confidence (NAME@c): take another.",
                    "lora_name",
                )
        loading.add(name)
        try:
            await context.engine.load_lora(name, body.lora_path)
        finally:
            loading.remove(name)
        logger.info("The LoRA adapter %s was loaded from %s.", shown(name), shown(body.lora_path))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", responses=TEXT, openapi_extra=body_of(UnloadLoraBody))
    async def unload_lora_adapter(request: Request) -> PlainTextResponse:
        """Unload a LoRA adapter. Answers that it has begun are finished by it."""
        _check_allowed(settings)
        body = await read_body(request, UnloadLoraBody, settings)
        context = models.find_lora(body.lora_name)
        if body.model is not None and models.find(body.model).engine is not context.engine:
            raise InvalidRequest(
                f"model is {shown(body.model)}, but {shown(body.lora_name)} is of another one: leave model out.",
                "model",
            )
        context.engine.unload_lora(body.lora_name)
        logger.info("The LoRA adapter %s was unloaded.", shown(body.lora_name))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return router


def _check_allowed(settings: ServeSettings) -> None:
    if not settings.allow_lora_loading:
        raise ApiError(
            403,
            "This server loads no LoRA adapters for requests, as these name folders of its disk: whoever runs it may "
            "allow that (allow_lora_loading), or name adapters at its start (lora).",
        )
