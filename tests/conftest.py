"""The environment of all tests. They are of the CPU, and Triton's kernels run in its interpreter, also where there is a
GPU, unless TRITON_INTERPRET=0 asks for the tests of one: this must be said before anything imports torch or triton, so
here. Settings of whoever runs the tests are not the tests' own.
"""

from __future__ import annotations

import gc
import os

from hypothesis import settings

if os.environ.setdefault("TRITON_INTERPRET", "1") == "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
for name in [name for name in os.environ if name.startswith("HAMBURGER_")]:
    del os.environ[name]
settings.register_profile("unhurried", deadline=None)  # how long a test takes says what else the machine does
settings.load_profile("unhurried")


def pytest_collection_finish() -> None:
    """What was imported stays: the collector need not look through it again and again (a twentieth of all time)."""
    gc.collect()
    gc.freeze()
