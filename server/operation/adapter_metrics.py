"""What Prometheus sees of each LoRA adapter of one model: series that come and go with the adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from prometheus_client import Counter, Gauge

_TOKEN_KINDS = ("prompt", "generated")
_MOST_ADAPTERS = 256  # that are told of between two scrapes, beside those that are there


class AdapterMetrics:
    """By name; "" is the model itself."""

    def __init__(self, values: Sequence[str], requests: Counter, tokens: Counter, open_requests: Gauge) -> None:
        """values: of the labels that all series of the model have; `lora_name` follows, of tokens `kind` too."""
        self._values, self._requests, self._tokens, self._open = tuple(values), requests, tokens, open_requests
        self._open_by_lora: Callable[[], Mapping[str, int]] | None = None
        self._names: dict[str, None] = {}  # that have series
        self._add("")

    def follow(self, open_by_lora: Callable[[], Mapping[str, int]]) -> None:
        """Ask for the open requests of each adapter that is there whenever they are to be told."""
        self._open_by_lora = open_by_lora

    def count_tokens(self, lora: str | None, kind: str, number: int) -> None:
        name = lora or ""
        self._add(name)
        self._tokens.labels(*self._values, name, kind).inc(number)

    def count_request(self, lora: str | None) -> None:
        name = lora or ""
        self._add(name)
        self._requests.labels(*self._values, name).inc()

    def update(self) -> list[str]:
        """Series for all adapters that are there. Returns those that have some, but are gone, as are their requests."""
        if self._open_by_lora is None:
            return []
        open_requests = self._open_by_lora()
        for name in [*open_requests, *self._names]:
            self._add(name)
            self._open.labels(*self._values, name).set(open_requests.get(name, 0))
        return [name for name in self._names if name not in open_requests]

    def forget(self, names: Sequence[str]) -> None:
        for name in names:
            del self._names[name]
            self._open.remove(*self._values, name)
            self._requests.remove(*self._values, name)
            for kind in _TOKEN_KINDS:
                self._tokens.remove(*self._values, name, kind)

    def _add(self, name: str) -> None:
        if name in self._names:
            return
        if len(self._names) >= _MOST_ADAPTERS and self._open_by_lora is not None:  # nobody scrapes
            self.forget([*self._names.keys() - self._open_by_lora().keys()])
        self._names[name] = None
        self._open.labels(*self._values, name)
        self._requests.labels(*self._values, name)
        for kind in _TOKEN_KINDS:
            self._tokens.labels(*self._values, name, kind)
