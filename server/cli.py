"""The command `hamburger`. It parses and reports; what does a command's work is imported when it runs."""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import version
from typing import Any, NoReturn

from hamburger.server.config import ENV_PREFIX, ServeSettings, SettingsError
from hamburger.server.exits import DIED, FAILED, INTERRUPTED, UNREAD, Hangup, Terminated, on_sigterm
from hamburger.server.load_settings import load_settings
from hamburger.server.serve_arguments import add_serve_arguments


@dataclass(frozen=True, slots=True)
class _Command:
    """arguments and run: "module:function" below hamburger; the first adds options to a parser and needs no torch.

    extra: the optional dependencies that it needs.
    """

    name: str
    help: str
    arguments: str
    run: str
    extra: str | None = None


_COMMANDS = (
    _Command("chat", "chat in the terminal", "clients.chat.command:add_arguments", "clients.chat.command:run"),
    _Command("bench", "measure a server's speed under load", "clients.bench:add_arguments", "clients.bench:run"),
    _Command(
        "plan",
        "what a machine can serve: slots, requests at once, limits of speed",
        "server.plan_arguments:add_plan_arguments",
        "engine.plan.report:run",
    ),
    _Command(
        "run-batch",
        "ask a server all requests of a file",
        "clients.batch.command:add_arguments",
        "clients.batch.command:run",
    ),
    _Command(
        "eval-tasks",
        "score a server on IFEval, GSM8K, ARC-Easy and PIQA",
        "clients.evaluation.command:add_arguments",
        "clients.evaluation.command:run",
        extra="eval",
    ),
    _Command(
        "distill",
        "let a base model write the answers to train on",
        "training.cli.data:add_distill_arguments",
        "training.prepare.distill:run",
    ),
    _Command(
        "segment",
        "cut answers into groups",
        "training.cli.data:add_segment_arguments",
        "training.prepare.segment:run",
    ),
    _Command(
        "regroup",
        "group a data set as a trained model would",
        "training.cli.data:add_regroup_arguments",
        "training.prepare.regroup:run",
    ),
    _Command(
        "inspect",
        "look at a segmented example",
        "training.cli.data:add_inspect_arguments",
        "training.prepare.inspect:run",
    ),
    _Command(
        "train",
        "train a HAMburger",
        "training.cli.train:add_train_arguments",
        "training.run.train:run",
        extra="train",
    ),
    _Command(
        "export",
        "write a trained or published checkpoint as a folder to serve",
        "training.cli.export:add_export_arguments",
        "training.export.export:run",
    ),
    _Command(
        "eval-quality",
        "measure tokens per KV against quality",
        "training.cli.quality:add_eval_quality_arguments",
        "training.quality.evaluate:run",
        extra="train",
    ),
    _Command(
        "eval-settle",
        "measure what settled slots cost",
        "training.cli.settle:add_eval_settle_arguments",
        "training.settling.evaluate:run",
    ),
    _Command(
        "fit-settle",
        "fit a model's choice of settled slots",
        "training.cli.settle:add_fit_settle_arguments",
        "training.settling.fit:run",
    ),
)


class _Parser(argparse.ArgumentParser):
    """Wrong usage is one line, not a page.

    add_own_arguments: called once the command is, so that no command loads what the others need for their arguments.
    """

    add_own_arguments: Callable[[argparse.ArgumentParser], None] | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        add_own_arguments, self.add_own_arguments = self.add_own_arguments, None
        if add_own_arguments is None:
            return super().parse_known_args(args, namespace)
        add_own_arguments(self)
        # Intermixed: `inspect DATA --html FILE 3` names example 3. What is left over is this command's own mistake.
        return self.parse_intermixed_args(args, namespace), []

    def error(self, message: str) -> NoReturn:
        unknown, _, name = message.partition(": ")
        if unknown == "unrecognized arguments":
            options = [option for option in self._option_string_actions if option.startswith("--")]
            if near := difflib.get_close_matches(name.split(" ")[0].split("=")[0], options, n=1, cutoff=0.7):
                message += f", did you mean {near[0]}?"
        self.exit(FAILED, f"hamburger: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 for success, 1 for a dead engine, 2 a wrong option, 130 Ctrl-C. A
    server that SIGTERM ends, loading or not, ends with 0."""
    _open_standard_streams()
    args = build_parser().parse_args(argv)
    commands = {command.name: command for command in _COMMANDS}
    try:
        return _serve(args) if args.command == "serve" else _run(commands[args.command], args)
    except KeyboardInterrupt as stop:
        print("hamburger: stopped.", file=sys.stderr)
        return 0 if isinstance(stop, Terminated) else INTERRUPTED


def _open_standard_streams() -> None:
    """Those that were closed, as by what starts a daemon, lead nowhere; else sockets would take their numbers, here and
    in the engine's process."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            try:
                os.fstat(number)
            except OSError:
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - as long as the process lives


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
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
    serve.add_own_arguments = add_serve_arguments
    for command in _COMMANDS:
        text = f"{command.help[0].upper()}{command.help[1:]}."
        command_parser = commands.add_parser(command.name, help=command.help, description=text)
        command_parser.add_own_arguments = partial(_add_arguments, command)
    return parser


def _serve(args: argparse.Namespace) -> int:
    from hamburger.engine.hosts.process_host import EngineProcessError, Worker
    from hamburger.engine.types.errors import HamburgerError

    given: dict[str, Any] = {name: value for name, value in vars(args).items() if name in ServeSettings.model_fields}
    # As Ctrl-C, until the server serves: for the first process of a container the system ignores it otherwise.
    signal.signal(signal.SIGTERM, on_sigterm)
    hangup = Hangup()
    signal.signal(signal.SIGHUP, hangup.on_signal)
    log_format = given.get("log_format", os.environ.get(f"{ENV_PREFIX}LOG_FORMAT"))
    try:
        if "model_argument" in args:
            if "model" in given:
                raise SettingsError("the model is given twice: as MODEL and as --model.")
            given["model"] = args.model_argument
        settings = load_settings(given, getattr(args, "config", None))
        log_format = settings.log_format
        # Before what HTTP needs is imported: the engine's process needs seconds for its own imports.
        with Worker(log_level=settings.log_level, log_format=settings.log_format) as worker:
            from hamburger.server.serve import serve

            return serve(settings, worker, hangup)
    except EngineProcessError as error:
        _tell(f"the engine died while it was loading: {error}", log_format)
        return DIED
    except (ValueError, HamburgerError, OSError) as error:  # settings, checkpoints and files that cannot be used
        _tell(_reason(error), log_format)
        return FAILED


def _tell(message: str, log_format: str | None) -> None:
    """Why the server does not start, as it would have logged: a line for people, or of JSON."""
    if log_format != "json":
        print(f"hamburger: {message}", file=sys.stderr)
        return
    from hamburger.engine.logs import JsonFormatter

    record = logging.LogRecord("hamburger.start", logging.ERROR, __file__, 0, message, None, None)
    print(JsonFormatter().format(record), file=sys.stderr)


def _run(command: _Command, args: argparse.Namespace) -> int:
    from hamburger.engine.types.errors import HamburgerError

    try:
        code: int = _load(command.run)(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # who reads the output, such as `head`, has enough of it; but the work may not be done
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left goes nowhere
        return UNREAD
    except ModuleNotFoundError as error:
        if command.extra is None or (error.name or "").startswith("hamburger"):
            raise
        remedy = f"pip install 'hamburger-serve[{command.extra}]'"
        print(f"hamburger: {command.name} needs the package {error.name}: {remedy}", file=sys.stderr)
    except (ValueError, HamburgerError, OSError) as error:  # options, data and checkpoints that cannot be used
        print(f"hamburger: {_reason(error)}", file=sys.stderr)
    return FAILED


def _reason(error: Exception) -> str:
    """One line; of a file that cannot be used its name first, not the system's number of the error."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{os.fsdecode(error.filename)} cannot be used: {error.strerror}."
    return " ".join(str(error).split())


def _add_arguments(command: _Command, parser: argparse.ArgumentParser) -> None:
    _load(command.arguments)(parser)


def _load(where: str) -> Any:
    module, name = where.split(":")
    return getattr(import_module(f"hamburger.{module}"), name)
