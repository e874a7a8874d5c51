"""Requests, not HTTP: continuous batching of macro-steps over a paged pool of compressed KV slots.

It must not know HTTP, nor how the model computes a step.

`from hamburger.engine import LLM, SamplingParams` is the offline API. Importing this package never imports torch;
`LLM` is loaded when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hamburger.engine.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from hamburger.engine.llm import LLM as LLM

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from hamburger.engine.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
