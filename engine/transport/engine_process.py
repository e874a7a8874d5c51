"""How every process of an engine is set up, and how its end is put into words. No torch."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import socket
import sys

from hamburger.engine.transport.wire import Failed
from hamburger.model.checkpoints.sources import CheckpointError
from hamburger.model.config import ConfigError

FAILED = 1
_PR_SET_PDEATHSIG = 1
_ONEDNN_KERNELS = "512"  # that it keeps, one for each linear shape and number of rows; its own 1,024 take 300 MB

logger = logging.getLogger(__name__)


def set_up_process(descriptor: int) -> socket.socket:
    """Returns the connection to the process that started this one. When that one dies, so does this one."""
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)  # a program that is started here must not keep it open
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _ONEDNN_KERNELS)
    _die_with_the_parent()
    # The server's process decides when to end: a Ctrl-C in its terminal is not the engine's, nor is the terminal's end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the server's watchdog asks for the stacks of an engine that hangs
    return connection


def _die_with_the_parent() -> None:
    """Have the kernel kill this process when its parent dies, even while a step holds the interpreter."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died meanwhile
        os._exit(FAILED)


def failed_message(error: BaseException) -> Failed:
    """The message that tells the other side of an error; logs one that is no fault of the user's."""
    match error:
        case ConfigError():
            return Failed("config", str(error))
        case CheckpointError():
            return Failed("checkpoint", str(error))
    logger.error("The engine stopped on an error.", exc_info=error)
    return Failed("error", f"{type(error).__name__}: {error}")


def describe_exit_code(code: int) -> str:
    """A process's exit code (negative: minus the signal), in words."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    # The kernel's answer to too little memory looks like anybody's kill.
    return f"was ended by {name}" + (" (out of memory, or killed by hand)" if -code == signal.SIGKILL else "")
