"""Writes docs/fields.md: what becomes here of each field that other servers' APIs have. `python deploy/fields.py`

tests/data/generation_fields.json lists those fields, as the sources of each server had them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from hamburger.server.bodies.chat import ChatBody
from hamburger.server.bodies.completion import CompletionBody
from hamburger.server.bodies.generation import GenerationBody
from hamburger.server.bodies.known_fields import IGNORED

ROOT = Path(__file__).resolve().parent.parent
LISTS = ROOT / "tests" / "data" / "generation_fields.json"
DOCUMENT = ROOT / "docs" / "fields.md"
BODIES: dict[str, type[GenerationBody]] = {"chat": ChatBody, "completions": CompletionBody}
_INTRODUCTION = """# The fields of other APIs

What becomes here of each field that a request to generate may have elsewhere. **Served** is what [the API](api.md)
says. **400** is refused by name, with what to do instead; a value that asks for nothing (false, an empty list, what
happens anyway) passes, and so does null. **Ignored** changes no answer. A field that nobody has is ignored, too, and
told in the log at level debug. This table is written from the code (`python deploy/fields.py`), and a test holds it.

"""


def fate(name: str, body: type[GenerationBody]) -> str:
    """Raises KeyError for a field that the code says nothing of."""
    if name in body.model_fields:
        return "served"
    if name in body.refused:
        return f"400: {body.refused[name].instead}"
    return f"ignored: {IGNORED[name]}"


def lines() -> Iterator[str]:
    lists = json.loads(LISTS.read_text(encoding="utf-8"))
    read = "; ".join(f"{server}: {version}" for server, version in lists["read"].items())
    yield f"{_INTRODUCTION}Read: {read}.\n\n| field | whose | chat | completions |\n| --- | --- | --- | --- |\n"
    for name in sorted({name for body in BODIES for names in lists[body].values() for name in names}):
        whose = [server for server in lists["read"] if any(name in lists[body][server] for body in BODIES)]
        fates = [
            fate(name, body) if name in body.refused or any(name in names for names in lists[endpoint].values()) else ""
            for endpoint, body in BODIES.items()
        ]
        yield f"| `{name}` | {', '.join(whose)} | {' | '.join(fates)} |\n"


def main() -> None:
    DOCUMENT.write_text("".join(lines()), encoding="utf-8")


if __name__ == "__main__":
    main()
