"""The environment of all tests. Where there is no GPU, Triton's kernels run in its interpreter: it must be told before
anything imports triton, which transformers does, so here. Settings of whoever runs the tests are not the tests' own.
"""

from __future__ import annotations

import gc
import os
import shutil

from hypothesis import settings

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
for name in [name for name in os.environ if name.startswith("HAMBURGER_")]:
    del os.environ[name]
settings.register_profile("unhurried", deadline=None)  # how long a test takes says what else the machine does
settings.load_profile("unhurried")


def pytest_collection_finish() -> None:
    """What was imported stays: the collector need not look through it again and again (a twentieth of all time)."""
    gc.collect()
    gc.freeze()
