"""EngineLoras: the LoRA adapters of one engine by the names that requests give them. No tensors, no HTTP.

load ── LoadLora ──► read in a thread beside the steps ── LoraLoaded ──► its name is known
unload: its name is unknown at once; the core keeps it until its last request has ended
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hamburger.engine.hosts.host import EngineHost
from hamburger.engine.types.errors import EngineDead, HamburgerError, InvalidRequest, UnknownAdapter, shown
from hamburger.engine.types.messages import LoadLora, LoraLoaded, UnloadLora

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """number: its own for ever, so that no other adapter of its name is taken for it. created: seconds since 1970."""

    name: str
    path: str
    number: int
    created: int


class EngineLoras:
    """For one event loop."""

    def __init__(self) -> None:
        self._adapters: dict[str, LoraAdapter] = {}
        self._loading: dict[str, int] = {}
        self._results: dict[int, asyncio.Future[LoraLoaded]] = {}
        self._num_sent = 0

    @property
    def adapters(self) -> Mapping[str, LoraAdapter]:
        """Those that requests may name."""
        return MappingProxyType(self._adapters)

    def number_of(self, name: str | None) -> int:
        """For SubmitRequest. Raises UnknownAdapter for a name that is not known."""
        if name is None:
            return 0
        if name not in self._adapters:
            raise UnknownAdapter(f"The LoRA adapter {shown(name)} is not loaded.", "model")
        return self._adapters[name].number

    async def load(self, host: EngineHost, name: str, path: str) -> LoraAdapter:
        """Raises InvalidRequest for an adapter that cannot be loaded, EngineDead where the engine ends meanwhile,
        HamburgerError for a fault of ours."""
        if name in self._adapters or name in self._loading:
            raise InvalidRequest(f"The LoRA adapter {shown(name)} is loaded already: unload it first.", "lora_name")
        self._num_sent += 1
        number = self._loading[name] = self._num_sent
        try:
            loaded = await self._ask(host, LoadLora(number, path))
        except BaseException:  # cancelled: nobody will have its name
            host.send(UnloadLora(number))
            raise
        finally:
            del self._loading[name]
        if loaded.error is not None:
            raise HamburgerError(loaded.error) if loaded.is_fault else InvalidRequest(loaded.error, "lora_path")
        self._adapters[name] = adapter = LoraAdapter(name, path, number, int(time.time()))
        return adapter

    def unload(self, host: EngineHost, name: str) -> None:
        """Raises UnknownAdapter for a name that is not known."""
        number = self.number_of(name)
        del self._adapters[name]
        host.send(UnloadLora(number))

    async def load_again(self, host: EngineHost) -> None:
        """All, into an engine that takes the place of one that died. Raises EngineDead where it ends meanwhile."""
        for adapter in [*self._adapters.values()]:
            if (error := (await self._ask(host, LoadLora(adapter.number, adapter.path))).error) is not None:
                logger.error("The LoRA adapter %r is not loaded again: %s", adapter.name, error)
                self._adapters.pop(adapter.name, None)

    def on_loaded(self, event: LoraLoaded) -> None:
        if (result := self._results.pop(event.number, None)) is not None and not result.done():
            result.set_result(event)

    def on_stop(self) -> None:
        """The engine has ended: nothing that is being loaded will be."""
        for result in self._results.values():
            if not result.done():
                result.set_exception(EngineDead("The engine stopped while it loaded a LoRA adapter."))
        self._results.clear()

    async def _ask(self, host: EngineHost, message: LoadLora) -> LoraLoaded:
        result: asyncio.Future[LoraLoaded] = asyncio.get_running_loop().create_future()
        self._results[message.number] = result
        host.send(message)
        return await result
