"""Runs other people's programs that speak to a server, in the environment that `make test-clients` makes for them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HERE = ROOT / "tests/interop"


class Clients:
    """The programs that deploy/clients-requirements.txt installs."""

    def __init__(self, venv: Path, home: Path) -> None:
        self.bin = venv / "bin"
        # An empty home and no hub: what a program keeps or looks up elsewhere must not decide a test.
        kept = ("PATH", "LANG", "LC_ALL", "OMP_NUM_THREADS")
        self.env = {name: os.environ[name] for name in kept if name in os.environ}
        self.env |= {
            "HOME": str(home),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "OPENAI_API_KEY": "none",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }

    def run(self, program: str, *arguments: str, **env: str) -> str:
        """Run one to its end, from this folder; returns what it printed."""
        done = subprocess.run(
            [str(self.bin / program), *arguments],
            cwd=HERE,
            env=self.env | env,
            capture_output=True,
            text=True,
            timeout=800,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"{program} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def program(self, name: str, *arguments: str) -> dict[str, Any]:
        """Run one of our programs/ in their environment; its last line is JSON."""
        found: dict[str, Any] = json.loads(self.run("python", f"programs/{name}", *arguments).splitlines()[-1])
        return found
