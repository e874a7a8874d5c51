"""ServedModels: which of the models that this server serves a request means. Knows no route."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fastapi import Request
from starlette.types import Scope

from hamburger.engine.loras import LoraAdapter
from hamburger.engine.types.errors import shown
from hamburger.server.api.errors import ApiError
from hamburger.server.api.model_context import ModelContext, ServedModel
from hamburger.server.operation.request_log import CLIENT_LEFT

_CHOSEN = "hamburger_model"  # where a request's scope keeps the model that it chose


class ServedModels:
    """The models in the order in which they were named, each with its engine; at least one.

    A request that names none means the first. One may also name a LoRA adapter that a model's engine has loaded.
    """

    def __init__(self, contexts: Sequence[ModelContext]) -> None:
        self._contexts = list(contexts)
        self.first = self._contexts[0]
        self._of_adapters: dict[LoraAdapter, ModelContext] = {}

    def __iter__(self) -> Iterator[ModelContext]:
        return iter(self._contexts)

    def __len__(self) -> int:
        return len(self._contexts)

    def served(self) -> Iterator[ServedModel]:
        """Each model, and behind it its LoRA adapters."""
        return (context.served for context in self._named())

    def serves(self, name: str) -> bool:
        """Whether a request may name it."""
        return any(name in context.served.names or context.served.has_alias(name) for context in self._named())

    def find(self, model: str | None) -> ModelContext:
        """The one that a model name means. Raises ApiError 404 for a name that is not served."""
        if model is None:
            return self.first
        named = self._named()
        for context in named:
            if model in context.served.names:
                return context
        for context in named:  # second, because a name may look like another's alias
            if context.served.has_alias(model):
                return context
        names = [name for context in named for name in context.served.names]
        alias = f"{names[0]}@c" if len(names) == 1 else "NAME@c of each"
        raise ApiError(
            404,
            f"The model {shown(model)} does not exist. Served: {', '.join(names)} (and {alias} with a confidence c in "
            "[0, 1]).",
            param="model",
            code="model_not_found",
        )

    def find_lora(self, name: str) -> ModelContext:
        """Raises ApiError 404 for a name that is no LoRA adapter's."""
        for context in self._named():
            if context.lora == name:
                return context
        raise ApiError(404, f"The LoRA adapter {shown(name)} is not loaded.", param="lora_name", code="model_not_found")

    def _named(self) -> list[ModelContext]:
        """All that requests may name: engines load and unload adapters."""
        known, self._of_adapters = self._of_adapters, {}
        named: list[ModelContext] = []
        for context in self._contexts:
            named.append(context)
            for adapter in context.engine.loras.values():
                of = self._of_adapters[adapter] = known.get(adapter) or context.of_lora(adapter)
                named.append(of)
        return named

    def choose(self, request: Request, model: str | None) -> ModelContext:
        """`find`, and remember it: an error that follows is this model's."""
        context = self.find(model)
        setattr(request.state, _CHOSEN, context)
        return context

    def count_failure(self, scope: Scope, error: ApiError) -> None:
        """An error was answered: it is counted for the model that the request chose, if it came to that. Not where the
        client has left."""
        if error.status != CLIENT_LEFT:
            self._count(scope.get("state", {}).get(_CHOSEN), error.status, error.code)

    def count_refusal(self, status: int, code: str | None) -> None:
        """An error was answered before there was a request that can be read."""
        self._count(None, status, code)

    def _count(self, chosen: ModelContext | None, status: int, code: str | None) -> None:
        if chosen is None and len(self) == 1:
            chosen = self.first
        if chosen is None:
            self.first.metrics.on_failure_of_no_model(status, code)
        else:
            chosen.metrics.on_failure(status, code)
