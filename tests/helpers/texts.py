"""Random texts of many scripts, emoji and code, for tests."""

from __future__ import annotations

import random

_SCRIPTS = (
    "The quick brown fox jumps over the lazy dog. ",
    "Größe, Füße und Übermut: «Schluß» – €42. ",
    "Съешь же ещё этих мягких французских булок. ",
    "いろはにほへと、東京都は日本の首都です。",
    "我能吞下玻璃而不伤身体。",
    "다람쥐 헌 쳇바퀴에 타고파. ",
    "نص حكيم له سر قاطع وذو شأن عظيم. ",
    "ऋषियों को सताने वाले दुष्ट राक्षसों. ",
    "😀👩‍👩‍👧‍👦🏳️‍🌈🇩🇪👍🏽 e\u0301 \u200b\ufeff",
    "def f(x: int) -> str:\n\treturn f\"{x!r}\\n\" if x else ''\n\n",
    '{"a": [1, 2.5e-3, null], "b": "\\u00e4"}\r\n',
    "∑ᵢ αᵢ² ≥ 0 ⇒ ∀x∈ℝ: √x² = |x|; ⟨ψ|φ⟩ ",
    "\x00\x07\x1b[31m\u2028\u2029\x7f  \t  ",
)


def random_text(draw: random.Random) -> str:
    """Pieces of several scripts, cut anywhere between characters, now and then a character of any kind."""
    parts = []
    for _ in range(draw.randint(1, 8)):
        script = draw.choice(_SCRIPTS)
        start = draw.randrange(len(script))
        parts.append(script[start : start + draw.randint(1, 40)])
        if draw.random() < 0.3:
            parts.append(chr(draw.choice([draw.randrange(32, 0xD800), draw.randrange(0xE000, 0x20000)])))
    return "".join(parts)
