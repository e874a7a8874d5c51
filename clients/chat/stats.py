"""`/stats` of the chat: what a HAMburger server does right now, from its /metrics."""

from __future__ import annotations

import contextlib
import re

import httpx

from hamburger.clients.connection import check_answer, transport_error
from hamburger.clients.wire import RequestError

_SAMPLE = re.compile(r"(\w+)\{(.*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ALIAS = re.compile(r"@[\d.]+$")
_TOLD = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "generation_tokens_per_second",
    "tokens_per_macro_step",
    "tokens_per_kv_ratio",
}
_LONGEST_SILENCE = 10.0  # seconds: a server that works tells its figures at once


def server_stats(client: httpx.Client, model: str) -> str:
    """One line of figures. Raises RequestError, also where the server has no such metrics."""
    try:
        response = client.get("/metrics", timeout=_LONGEST_SILENCE)
    except httpx.HTTPError as error:
        raise transport_error(error, client.base_url) from error
    check_answer(response)
    name = _ALIAS.sub("", model)
    found = _gauges(response.text, name) or _gauges(response.text, _parent(client, name))
    if not found.keys() >= _TOLD:
        raise RequestError(f"{response.url} tells nothing of {model}", "Is it a HAMburger server?")
    drafted, accepted = found.get("drafted_tokens_total", 0.0), found.get("accepted_tokens_total", 0.0)
    parts = [
        f"{found['num_requests_running']:.0f} running, {found['num_requests_waiting']:.0f} waiting",
        f"{100 * found['kv_cache_usage_perc']:.1f} % of the KV slots in use",
        f"{found['generation_tokens_per_second']:.1f} tokens/s",
        f"{found['tokens_per_macro_step']:.2f} tokens per step",
        f"{found['tokens_per_kv_ratio']:.2f} tokens per KV",
        f"{100 * accepted / drafted:.0f} % of {drafted:.0f} drafts accepted since its start" if drafted else "",
    ]
    return " · ".join(part for part in parts if part)


def _parent(client: httpx.Client, adapter: str) -> str | None:
    """The model that a LoRA adapter is of, whose metrics tell of both."""
    try:
        models = client.get("/v1/models", timeout=_LONGEST_SILENCE).json()["data"]
        return next((model["parent"] for model in models if model["id"] == adapter), None)
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return None


def _gauges(text: str, model: str | None) -> dict[str, float]:
    """Values of the model's metrics by their names without the prefix, summed over their other labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if (sample := _SAMPLE.fullmatch(line)) is None:
            continue
        name, labels, value = sample.groups()
        if dict(_LABEL.findall(labels)).get("model_name") == model and name.startswith("hamburger_"):
            name = name.removeprefix("hamburger_")
            with contextlib.suppress(ValueError):
                found[name] = found.get(name, 0.0) + float(value)
    return found
