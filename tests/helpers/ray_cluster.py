"""Our application on Ray Serve in processes of its own, for tests, and what is to be known of its processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import httpx

from client_programs import ROOT
from processes import is_alive
from real_server import free_port

# float32: a text does not depend on what else is in the batch, so an answer that was begun anew is the same.
SETTINGS: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory": "256MiB", "dtype": "float32", "max_num_seqs": 8}


class Cluster:
    """Ray in processes of its own, with our application; see programs/cluster.py."""

    def __init__(self, python: Path, home: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = tempfile.mkdtemp(prefix="ray")  # short: Ray's socket paths are in it
        kept = ("PATH", "LANG", "LC_ALL", "PYTHONPATH")
        env = {name: os.environ[name] for name in kept if name in os.environ}
        env |= {"HOME": str(home), "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
        program = ROOT / "tests/scale/programs/cluster.py"
        command = [str(python), str(program), str(self.port), "2", self._folder]
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )

    def ask(self, command: str, given: Any = None) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({command: given}) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise AssertionError(f"the cluster ended with {self._process.wait()}")

    def deploy(self, *deployments: dict[str, Any], **args: Any) -> None:
        answer = self.ask("deploy", {"args": {**SETTINGS, **args}, "deployments": list(deployments)})
        assert answer == "RUNNING", answer

    def replicas(self) -> dict[str, int]:
        """Process ids of the engine replicas, by the name that is the label `engine` of their metrics."""
        found: dict[str, int] = self.ask("replicas")
        return found

    def wait_for_replicas(self, number: int, without: Collection[int] = ()) -> dict[str, int]:
        """Until so many run, none of them in the processes `without`; fails after 240 s."""
        deadline = time.monotonic() + 240
        while len(found := self.replicas()) != number or not set(without).isdisjoint(found.values()):
            assert time.monotonic() < deadline, f"{found} run"
            time.sleep(0.5)
        return found

    def running(self) -> dict[str, int]:
        """Answers that each engine generates now."""
        page = httpx.get(f"{self.url}/metrics", timeout=30)
        assert page.status_code == 200, page.text
        text = page.text
        lines = [line for line in text.splitlines() if line.startswith("hamburger_num_requests_running{")]
        return {line.split('engine="')[1].split('"')[0]: int(float(line.rsplit(" ", 1)[1])) for line in lines}

    def has_logged(self, words: str) -> bool:
        """Whether any of its processes did."""
        logs = [path for path in Path(self._folder).glob("session_*/logs/**/*.err") if path.is_file()]
        assert logs
        return any(words in path.read_text(errors="replace") for path in logs)

    def stop(self) -> None:
        with self._process:  # without commands it ends, and Ray with it
            self._process.communicate(timeout=120)
        shutil.rmtree(self._folder, ignore_errors=True)


def engine_of(replica: int) -> int:
    """The engine process that a replica's process started."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            command = stat.with_name("cmdline").read_text()
        except OSError:
            continue
        if int(fields[1]) == replica and "hamburger.engine.worker" in command:
            return int(stat.parent.name)
    raise AssertionError(f"{replica} has no engine")


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 30
    while is_alive(pid):
        assert time.monotonic() < deadline, f"{pid} still runs"
        time.sleep(0.1)
