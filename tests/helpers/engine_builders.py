"""Engines for ProcessHost's tests: worker.py imports this in its process. EngineArgs.model says which runner."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable

from fake_engines import fake_config, fake_core, fake_info
from fakes import ScriptedRunner
from hamburger.engine.core.batch import BatchResult, ScheduledBatch
from hamburger.engine.core.core import EngineCore
from hamburger.engine.core.loras import CoreLoras
from hamburger.engine.ranks.ranks import OnLost
from hamburger.engine.transport.wire import LENGTH, Encoder
from hamburger.engine.types.config import EngineArgs
from hamburger.engine.types.messages import EngineInfo
from hamburger.model.checkpoints.sources import CheckpointError
from hamburger.model.config import ConfigError
from lora_stores import HeldFolders
from reference import CONTEXT, random_case

BUILDER = "engine_builders:build"
ENDLESS_LOAD = "endless load"


class Troubled:
    """A scripted runner to which something happens in its third step."""

    def __init__(self, trouble: str) -> None:
        self.runner = ScriptedRunner(eos_chance=0)
        self.trouble = trouble
        self.num_steps = 0

    def run(self, batch: ScheduledBatch) -> BatchResult:
        self.num_steps += 1
        if self.num_steps == 3:
            if self.trouble == "raise":
                raise ValueError("a broken kernel")
            if self.trouble == "exit":
                raise SystemExit("a library called sys.exit")
            if self.trouble == "linger":
                threading.Thread(target=hang_for_the_test).start()  # keeps the process from exiting
                raise ValueError("a broken kernel")
            if self.trouble == "vanish":
                os._exit(7)
            hang_for_the_test()
        return self.runner.run(batch)


def hang_for_the_test() -> None:
    time.sleep(600)


def break_frames(kind: str, fault: str) -> None:
    """From now on something happens in this process to every frame of one kind, which is the name of its class."""
    frame = Encoder.frame

    def broken(self: Encoder, value: object) -> bytes:
        data = frame(self, value)
        if type(value).__name__ != kind:
            return data
        head, body = data[: LENGTH.size + 1], data[LENGTH.size + 1 :]
        match fault:
            case "no MessagePack":
                return head + b"\xc1" * len(body)
            case "another type":
                return LENGTH.pack(3) + head[LENGTH.size :] + b"\xa1x"
            case "unknown kind":
                return data[: LENGTH.size] + b"\xff" + body
            case "huge":
                return b"\xff" * LENGTH.size + data[LENGTH.size :]
            case "not encodable":
                raise OverflowError("Integer value out of range")
            case "cut":
                threading.Timer(0.1, os._exit, [9]).start()
                return data[: len(data) // 2]
            case "exit before":
                os._exit(9)
        raise ValueError(fault)

    Encoder.frame = broken  # type: ignore[method-assign]


def build(args: EngineArgs, on_progress: Callable[[str], None], on_lost: OnLost) -> tuple[EngineCore, EngineInfo]:
    """model: `cases SEED` for the random cases of reference.py, `slow` for endless answers, `talkative` for those with
    many lines in the log, `endless load` for one that never ends to read its adapters, `frames KIND FAULT` for endless
    answers with broken frames, else a trouble."""
    name = args.model or ""
    if name.startswith("frames"):
        _, kind, fault = name.split(maxsplit=2)
        break_frames(kind, fault)
        name = "slow"
    on_progress(f"building {name}")
    if name == "no config":
        raise ConfigError("max_model_len is 9: lower it.")
    if name == "no checkpoint":
        raise CheckpointError("there is no such model.")
    if name == "broken":
        raise RuntimeError("no kernel image")
    if name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "long to load":
        hang_for_the_test()
    if name.startswith("cases"):
        draw = random.Random(int(name.split()[1]))
        cases = {str(i): random_case(draw) for i in range(300)}
        runner = ScriptedRunner({key: case.groups for key, case in cases.items()})
        config = fake_config(max_model_len=CONTEXT, num_blocks=256)
        return fake_core(runner, config), fake_info(config)
    config = fake_config(max_num_seqs=64, max_num_batched_slots=64, num_blocks=4096)
    if name == ENDLESS_LOAD:  # of a LoRA adapter
        return fake_core(ScriptedRunner(), config, loras=CoreLoras(HeldFolders(), 1)), fake_info(config)
    if name == "late end":
        threading.Thread(target=hang_for_the_test).start()
        name = "slow"
    if name == "talkative":
        for _ in range(200):
            logging.getLogger("hamburger").warning("%s", "x" * 1000)
        name = "slow"
    if name == "slow":
        return fake_core(_Slow(eos_chance=0), config), fake_info(config)
    troubled = Troubled(name)
    core = fake_core(troubled.runner, config)
    return EngineCore(config, troubled), fake_info(core.config)


class _Slow(ScriptedRunner):
    def run(self, batch: ScheduledBatch) -> BatchResult:
        time.sleep(0.01)
        return super().run(batch)
