"""Grammars over a vocabulary of bytes: which texts they take."""

from __future__ import annotations

from typing import Any

import numpy as np

from fakes import EOS, VOCAB_SIZE, ByteTokenizer
from hamburger.engine.grammar.matching import Grammars

BYTES = Grammars(ByteTokenizer, VOCAB_SIZE, [EOS])


def takes(grammar: str, text: str) -> bool:
    """Whether the whole text fits, and an end may follow."""
    matcher = BYTES.matcher(grammar)
    for token_id in text.encode():
        if not allowed(matcher)[token_id]:
            return False
        matcher.advance(token_id)
    return bool(allowed(matcher)[EOS])


def allowed(matcher: Any) -> Any:
    """1 for each token that may come next, 0 for all others."""
    masks = np.zeros((1, -(-VOCAB_SIZE // 32)), dtype=np.int32)
    matcher.allow(masks, 0)
    return np.unpackbits(masks.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
