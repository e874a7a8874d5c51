#!/usr/bin/env python3
"""The image's health check: exits 0 when the server in this container lives, else 1 with a line that says why.

It reads the server's own HAMBURGER_* variables and the file of HAMBURGER_CONFIG; what was given as an option is not
seen. A draining server lives. Where there are API keys it sends one, as `public_operation` may be off. An answer of 401
counts as life: the HTTP side works, and /health is closed to us.
"""

from __future__ import annotations

import contextlib
import os
import re
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

PREFIX = "HAMBURGER_"
TIMEOUT_SECONDS = 4.0


def settings_of(env: Mapping[str, str]) -> dict[str, str]:
    """What the server was told: its settings' names and what stands in the environment, or else in its YAML file."""
    found: dict[str, str] = {}
    if path := env.get(f"{PREFIX}CONFIG"):
        import yaml  # the server's own dependency, which needs a tenth of a second

        with contextlib.suppress(OSError, ValueError, yaml.YAMLError):  # the server says it
            read = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
            for name, value in read.items() if isinstance(read, dict) else ():
                if value is not None:
                    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
                    found[str(name).replace("-", "_")] = text
    return found | {name[len(PREFIX) :].lower(): env[name] for name in env if name.startswith(PREFIX) and env[name]}


def health_url(settings: Mapping[str, str]) -> str:
    """Where the server's /health is, from inside the container."""
    scheme = "https" if settings.get("ssl_certfile") else "http"
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(found := settings.get("host", ""), found)
    name = f"[{host}]" if ":" in host else host
    return f"{scheme}://{name}:{settings.get('port', 8000)}/health"


def key_of(settings: Mapping[str, str]) -> str | None:
    """The first of the API keys, if there are some that can be read."""
    keys = settings.get("api_key", "").split(",")
    if path := settings.get("api_key_file"):
        with contextlib.suppress(OSError, ValueError):
            lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
            keys += [re.split(r"(?:^|\s)#", line)[0] for line in lines]
    return next(filter(None, map(str.strip, keys)), None)


def fault(url: str, key: str | None = None) -> str | None:
    """Why the server is not healthy, or None."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the certificate names another host than this
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )  # a proxy of the environment is for the hub, not for ourselves
    try:
        headers = {} if key is None else {"X-Api-Key": key}
        with opener.open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_SECONDS):
            return None
    except urllib.error.HTTPError as error:
        if error.code == 401:
            return None
        return f"{url} answers {error.code}: {error.read().decode(errors='replace')}"
    except OSError as error:
        return f"{url} does not answer: {error}"


def main(env: Mapping[str, str]) -> int:
    settings = settings_of(env)
    found = fault(health_url(settings), key_of(settings))
    if found is not None:
        print(found, file=sys.stderr)
    return 0 if found is None else 1


if __name__ == "__main__":
    sys.exit(main(os.environ))
