"""Starts a module of a room as a program: python benchmarks/start.py peers.llama '{...}'

compare.py and gpu.py start their workers with it. A file inside a room cannot be started by its path: Python would look
for other rooms in its folder.
"""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
