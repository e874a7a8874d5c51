"""Runs `hamburger chat` in this process, with standard input as a pipe or as a terminal that types."""

from __future__ import annotations

import argparse
import io
import sys

import pytest

from hamburger.clients.chat import command
from scripted_server import ScriptedServer

Captured = pytest.CaptureFixture[str]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run_chat(server: ScriptedServer, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(["--url", server.url, *arguments]))


def say(stdin: io.StringIO, *lines: str) -> None:
    stdin.write("".join(f"{line}\n" for line in lines))
    stdin.seek(0)


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """Make standard input a terminal at which these lines, then Ctrl-D, are typed; an exception is raised instead."""
    typed = iter([*lines, EOFError])

    def read(prompt: str = "") -> str:
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", read)
