"""ServerTokenizer: what the server needs of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class ServerTokenizer(Protocol):
    """The part of engine.text.tokenizer.Tokenizer that the server uses."""

    vocab_size: int

    @property
    def loader(self) -> tuple[str, ...]: ...
    @property
    def max_token_bytes(self) -> int: ...
    @property
    def bos_token(self) -> str | None: ...
    @property
    def eos_token(self) -> str | None: ...
    @property
    def pad_token(self) -> str | None: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def tool_template(self) -> str | None: ...
    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]: ...
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...
    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes: ...
    def is_special(self, token_id: int) -> bool: ...
    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str: ...
