"""A process that tries grammars: it writes and compiles each for the server, with little memory, and may be killed.

Compiling cannot be interrupted, and what it takes is not known beforehand. GrammarProcesses (processes.py)
starts and ends these processes. All messages are JSON:

    in   {"loader": [...], "vocab_size": n, "eos_token_ids": [...], "memory": bytes},
         then for each grammar {"kind", "value", "compact", "seconds"}, seconds of a processor
    out  {"ready": true},
         then for each {"grammar": its text}, {"refused": why}, {"is_too_large": true} or {"fault": a traceback}
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hamburger.engine.grammar.matching import Grammars
from hamburger.engine.grammar.source import GrammarSource
from hamburger.engine.grammar.vocabulary import GrammarTokenizer
from hamburger.engine.process_usage import give_back
from hamburger.engine.types.errors import InvalidRequest

_NICENESS = 10  # answers that are being made go first
_SPARE_SECONDS = 5  # after which it ends itself, as nobody has


def main() -> None:
    """argv: the file descriptor of the connection."""
    connection = Connection(int(sys.argv[1]))
    os.nice(_NICENESS)
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal sends them to all; who started this one ends it
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(EOFError, ConnectionError):
        hello = json.loads(connection.recv_bytes())
        grammars = Grammars(lambda: _load(*hello["loader"]), hello["vocab_size"], hello["eos_token_ids"])
        grammars.prepare()
        _limit_memory(hello["memory"])
        connection.send_bytes(b'{"ready": true}')
        while True:
            asked = json.loads(connection.recv_bytes())
            signal.setitimer(signal.ITIMER_PROF, asked["seconds"] + _SPARE_SECONDS)
            answer = _try(grammars, GrammarSource(asked["kind"], asked["value"], asked["compact"]))
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(json.dumps(answer).encode())


def _load(name: str, *args: str) -> GrammarTokenizer:
    """name: `module:function`."""
    module, _, function = name.partition(":")
    tokenizer: GrammarTokenizer = getattr(importlib.import_module(module), function)(*args)
    return tokenizer


def _try(grammars: Grammars, source: GrammarSource) -> dict[str, Any]:
    try:
        grammar = source.write()
        grammars.compile(grammar)
        grammars.forget(grammar)
        give_back()
    except InvalidRequest as error:
        return {"refused": str(error)}
    except MemoryError:
        return {"is_too_large": True}
    except Exception:  # a fault of ours or the library's: the server logs it
        return {"fault": traceback.format_exc()}
    return {"grammar": grammar}


def _limit_memory(size: int) -> None:
    """Of what is written, beside what is there already. The library ends the process where it gets no memory."""
    with contextlib.suppress(OSError):  # not Linux
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmData:"):
                most = 1024 * int(line.split()[1]) + size
                resource.setrlimit(resource.RLIMIT_DATA, (most, most))


if __name__ == "__main__":
    main()
