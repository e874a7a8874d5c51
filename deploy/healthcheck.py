#!/usr/bin/env python3
"""The image's health check: exits 0 when the server in this container lives, else 1 with a line that says why.

It reads the server's own HAMBURGER_* variables; a host or port that was given as an option is not seen. A draining
server lives. An answer of 401 counts as life: the HTTP side works, and /health is closed to us by `public_operation`.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping

TIMEOUT_SECONDS = 4.0


def health_url(env: Mapping[str, str]) -> str:
    """Where the server's /health is, from inside the container."""
    scheme = "https" if env.get("HAMBURGER_SSL_CERTFILE") else "http"
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(found := env.get("HAMBURGER_HOST", ""), found)
    name = f"[{host}]" if ":" in host else host
    return f"{scheme}://{name}:{env.get('HAMBURGER_PORT') or 8000}/health"


def fault(url: str) -> str | None:
    """Why the server is not healthy, or None."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the certificate names another host than this
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )  # a proxy of the environment is for the hub, not for ourselves
    try:
        with opener.open(url, timeout=TIMEOUT_SECONDS):
            return None
    except urllib.error.HTTPError as error:
        if error.code == 401:
            return None
        return f"{url} answers {error.code}: {error.read().decode(errors='replace')}"
    except OSError as error:
        return f"{url} does not answer: {error}"


def main(env: Mapping[str, str]) -> int:
    found = fault(health_url(env))
    if found is not None:
        print(found, file=sys.stderr)
    return 0 if found is None else 1


if __name__ == "__main__":
    sys.exit(main(os.environ))
