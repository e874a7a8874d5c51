"""A headless Chromium, the system's own, for pictures of the playground and for its tests."""

from __future__ import annotations

import os
import shutil

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Its own sandbox needs rights that containers lack; what it opens here is this project's own page.
OPTIONS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip


def chromium() -> str:
    """The program: CHROMIUM, or the first that is installed."""
    found = os.environ.get("CHROMIUM") or next((path for name in _NAMES if (path := shutil.which(name))), None)
    if found is None:
        raise FileNotFoundError("Chromium is needed: apt-get install chromium, or name one in CHROMIUM.")
    return found
