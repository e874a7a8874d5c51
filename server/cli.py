"""The command `hamburger`: serve, chat, bench. It parses and reports; each command's work is imported when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NoReturn

from hamburger.server.config import ENV_PREFIX, ServeSettings, SettingsError, load_settings

_FAILED, _INTERRUPTED = 2, 130


class _Parser(argparse.ArgumentParser):
    """Wrong usage is one line, not a page."""

    def error(self, message: str) -> NoReturn:
        self.exit(_FAILED, f"hamburger: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0 for success, 2 for a wrong option, 130 after Ctrl-C."""
    args = build_parser().parse_args(argv)
    run = {"serve": _serve, "chat": _chat, "bench": _bench}[args.command]
    try:
        return run(args)
    except KeyboardInterrupt:
        print("hamburger: stopped.", file=sys.stderr)
        return _INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    from hamburger.clients import bench, chat

    parser = _Parser(prog="hamburger", description="Serve HAMburger models, and talk to them.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"hamburger {version('hamburger-serve')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve a model over the OpenAI API",
        description="Serve a model over the OpenAI API.",
        epilog=f"Each option is also an environment variable ({ENV_PREFIX}MAX_MODEL_LEN) and a key of the YAML file "
        "(max_model_len); the command line wins over the environment, the environment over the file.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    _add_settings(serve)
    chat.add_arguments(commands.add_parser("chat", help="chat in the terminal", description="Chat in the terminal."))
    measure = commands.add_parser("bench", help="measure a server", description="Measure any OpenAI-compatible server.")
    bench.add_arguments(measure)
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """One option for each field of ServeSettings; only those that are given reach the namespace."""
    parser.add_argument("model_argument", metavar="MODEL", nargs="?", help="the same as --model")
    parser.add_argument("--config", metavar="FILE", help=f"YAML file with settings (also {ENV_PREFIX}CONFIG)")
    for name, field in ServeSettings.model_fields.items():
        help_text = str(field.description)
        if field.default not in (None, []):
            help_text += f" (default: {field.default})"
        option = f"--{name.replace('_', '-')}"
        action = "append" if name == "api_key" else "store"
        parser.add_argument(option, dest=name, action=action, metavar=name.rsplit("_")[-1].upper(), help=help_text)


def _serve(args: argparse.Namespace) -> int:
    from hamburger.engine.errors import HamburgerError
    from hamburger.server.serve import serve

    given: dict[str, Any] = {name: value for name, value in vars(args).items() if name in ServeSettings.model_fields}
    try:
        if "model_argument" in args:
            if "model" in given:
                raise SettingsError("the model is given twice: as MODEL and as --model.")
            given["model"] = args.model_argument
        return serve(load_settings(given, getattr(args, "config", None)))
    except (ValueError, HamburgerError, OSError) as error:  # settings, checkpoints and files that cannot be used
        print(f"hamburger: {' '.join(str(error).split())}", file=sys.stderr)
        return _FAILED


def _chat(args: argparse.Namespace) -> int:
    from hamburger.clients import chat

    return chat.run(args)


def _bench(args: argparse.Namespace) -> int:
    from hamburger.clients import bench

    return bench.run(args)
