"""ThreadPlaces with a scripted system, and the kernels' threads on the system's own cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from hamburger.engine.device.cpu_threads import StepThreads
from hamburger.engine.device.thread_places import ThreadPlaces, thread_places
from hamburger.model.cpu.library import load_kernels

# In a process of its own, whose threads nobody else needs: where each thread of a team may run, before and after.
TIED = """
import json, os, sys
import torch
from hamburger.engine.device.thread_places import thread_places
from hamburger.model.cpu.library import load_kernels

def allowed():
    tasks = sorted(map(int, os.listdir("/proc/self/task")))
    return {task: sorted(os.sched_getaffinity(task)) for task in tasks}

torch.set_num_threads(2)
os.sched_setaffinity(0, {int(cpu) for cpu in sys.argv[1].split(",")})
kernels = load_kernels()
places = thread_places(kernels, 2)
torch.ones(1 << 22).add_(1)  # the team is there
before = allowed()
if places is not None:
    places.follow(anew=True)
print(json.dumps([os.getpid(), places is not None, list(before.items()), list(allowed().items())]))
"""


def test_the_others_keep_off_the_core_of_the_first() -> None:
    tied, on = list[list[int]](), [4]
    places = ThreadPlaces(lambda cpus: tied.append(list(cpus)), [6, 2, 4], lambda: on[0])
    places.follow()
    places.follow()
    assert tied == [[2, 6]]
    on[0] = 2
    places.follow()
    assert tied == [[2, 6], [4, 6]]
    places.follow(anew=True)  # threads that were made since
    assert tied[2:] == [[4, 6]]
    on[0] = 7  # a core that was not this process's at first: somebody else says where it runs
    places.follow(anew=True)
    assert len(tied) == 3


def test_steps_of_all_threads_are_placed_and_those_of_fewer_are_not() -> None:
    told, number = list[bool](), [2]

    class Places(ThreadPlaces):
        def follow(self, *, anew: bool = False) -> None:
            told.append(anew)

    places = Places(lambda cpus: None, [0, 1], lambda: 0)
    threads = StepThreads(lambda: 2, lambda n: number.__setitem__(0, n), switches=lambda: 0, places=places)
    for most in (2, 2, 1, 1, 2, 2):
        threads.number = most
        with threads.step(decodes=True):
            pass
    assert told == [False, False, True, False]  # after steps of fewer, threads may be new


def test_places_are_given_up_where_somebody_changes_the_number() -> None:
    told, number = list[int](), [2]
    places = ThreadPlaces(lambda cpus: told.append(len(cpus)), [0, 1], lambda: 0)
    threads = StepThreads(lambda: number[0], lambda n: None, switches=lambda: 0, places=places)
    for most in (2, 3, 2):
        number[0] = most
        with threads.step(decodes=True):
            pass
    assert told == [1]


def test_none_where_the_system_has_a_choice() -> None:
    kernels = load_kernels()
    if kernels is None:
        pytest.skip("This machine runs no kernels.")
    assert thread_places(kernels, 1) is None
    assert thread_places(kernels, len(os.sched_getaffinity(0)) + 1) is None


def test_each_other_thread_has_one_core() -> None:
    cpus = sorted(os.sched_getaffinity(0))[:2]
    if load_kernels() is None or len(cpus) < 2:
        pytest.skip("It takes kernels and two cores.")
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", TIED, ",".join(map(str, cpus))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    pid, found, before, after = json.loads(done.stdout)
    assert found
    was, now = dict(before), dict(after)
    assert now[pid] == cpus  # the first thread may be moved
    changed = {task: now[task] for task in was if now[task] != was[task]}
    assert len(changed) == 1
    assert next(iter(changed.values())) in ([cpus[0]], [cpus[1]])
