"""Fields of the OpenAI, vLLM and llama.cpp APIs that this server knows and does not serve: a clear 400, never ignored.

A value that asks for nothing (what the API does anyway) passes, and so does null.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hamburger.engine.types.errors import InvalidRequest

AsksNothing = Callable[[Any], bool]


def _only(*values: Any) -> AsksNothing:
    # By type too: True == 1 and 0 == False in Python, but not on the wire.
    return lambda value: any(type(value) is type(harmless) and value == harmless for harmless in values)


_OFF = _only(False)
_EMPTY = _only([], {}, "")

_COMMON: dict[str, AsksNothing] = {
    "store": _OFF,
    "service_tier": _only("auto", "default"),
    "use_beam_search": _OFF,
    "length_penalty": _only(1, 1.0),
    "include_stop_str_in_output": _OFF,
    "spaces_between_special_tokens": _only(True),
    "truncate_prompt_tokens": _only(),
    "prompt_logprobs": _only(),
    "allowed_token_ids": _EMPTY,
    "bad_words": _EMPTY,
    "logits_processors": _EMPTY,
    "return_token_ids": _OFF,
    "return_tokens_as_token_ids": _OFF,
    "guided_json": _only(),
    "guided_regex": _only(),
    "guided_choice": _only(),
    "guided_grammar": _only(),
    "guided_whitespace_pattern": _only(),
    "structural_tag": _only(),
}

# llama.cpp's own; its cache_prompt, id_slot and the like change no answer.
_LLAMA_CPP: dict[str, AsksNothing] = {
    "n_predict": _only(-1),
    "n_probs": _only(0),
    "repeat_penalty": _only(1, 1.0),
    "typical_p": _only(1, 1.0),
    "mirostat": _only(0),
    "dynatemp_range": _only(0, 0.0),
    "dry_multiplier": _only(0, 0.0),
    "xtc_probability": _only(0, 0.0),
    "top_n_sigma": _only(-1, -1.0),
    "t_max_predict_ms": _only(0, -1),
    "grammar": _EMPTY,
    "json_schema": _only(),
    "samplers": _EMPTY,
    "lora": _EMPTY,
}
UNSUPPORTED_CHAT: dict[str, AsksNothing] = (
    _COMMON
    | _LLAMA_CPP
    | {
        "functions": _EMPTY,
        "function_call": _only("none", "auto"),
        "echo": _OFF,
        "add_special_tokens": _OFF,
        "chat_template": _only(),
        "documents": _EMPTY,
        "modalities": _only(["text"]),
        "audio": _only(),
        "reasoning_effort": _only("none"),
        "verbosity": _only("medium"),
        "web_search_options": _only(),
    }
)

UNSUPPORTED_COMPLETION: dict[str, AsksNothing] = (
    _COMMON
    | _LLAMA_CPP
    | {
        "suffix": _EMPTY,
        "prompt_embeds": _only(),
        "prediction": _only(),
    }
)


def reject_unsupported(fields: Mapping[str, AsksNothing], body: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for the first field of `body` that asks for something which `fields` says is not served."""
    for name, asks_nothing in fields.items():
        value = body.get(name)
        if value is not None and not asks_nothing(value):
            raise InvalidRequest(f"{name} is not supported by this server with this value: leave it out.", name)
