"""What IFEval's checks measure of a text: its language, sentences, words and words in capitals.

Sentences are those of Punkt with its English parameters and words in capitals those of Penn Treebank tokenisation, as
in the published scorer. The two packages for it are imported when a TextTools is made, so the other tasks need neither.
"""

from __future__ import annotations

import re

from hamburger.clients.evaluation.errors import EvalError

_CLITICS = re.compile(r"(?i)(n't|'(?:s|m|d|ll|re|ve))(?=\W|$)|(?<=\bcan)(?=not\b)")
_BETWEEN_WORDS = re.compile(r"[\s;@#$%&?!*\[\](){}<>\"`“”„«»‘’…]+|\.{2,}|--|[:,](?!\d)")


class TextTools:
    """Language detection (seeded) and sentence splitting, their tables loaded once. Raises EvalError without them."""

    def __init__(self, seed: int = 0) -> None:
        try:
            import punkt
            from langdetect import LangDetectException  # type: ignore[import-untyped]
            from langdetect.detector_factory import (  # type: ignore[import-untyped]
                PROFILES_DIRECTORY,
                DetectorFactory,
            )
        except ImportError as error:
            raise EvalError(
                f"the task ifeval needs the package of the module {error.name}: "
                "install it with pip install 'hamburger-serve[eval]', or leave ifeval out of --tasks."
            ) from None
        self._undetectable: type[Exception] = LangDetectException
        self._languages = DetectorFactory()  # one of our own: langdetect.detect has a global one without a seed
        self._languages.load_profile(PROFILES_DIRECTORY)
        self._languages.set_seed(seed)
        self._sentences = punkt.PunktSentenceTokenizer(punkt.load_model("english"))

    def language(self, text: str) -> str | None:
        """The ISO 639-1 code of the text's language; None where nothing in it tells (digits, emoji)."""
        detector = self._languages.create()
        detector.append(text)
        try:
            return str(detector.detect())
        except self._undetectable:
            return None

    def count_sentences(self, text: str) -> int:
        return len(self._sentences.tokenize(text))


def count_words(text: str) -> int:
    """Runs of letters, digits and underscores."""
    return len(re.findall(r"\w+", text))


def count_capital_words(text: str) -> int:
    """Words whose letters are all capitals: "NASA", "I", "A-1"; "NASA's" is one and its clitic."""
    return sum(word.isupper() for word in _BETWEEN_WORDS.split(_CLITICS.sub(lambda m: f" {m[0]} ", text)))
