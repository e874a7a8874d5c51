"""Where there is no GPU, Triton's kernels run in its interpreter. It must be told before anything imports triton, which
transformers does, so here.
"""

from __future__ import annotations

import os
import shutil

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
