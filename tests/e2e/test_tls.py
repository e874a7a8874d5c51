"""HTTPS on a real server, with a certificate for 127.0.0.1 that is made for this test alone."""

from __future__ import annotations

import ssl
import subprocess
import sys
from pathlib import Path

import httpx

from real_server import RealServer

TLS = Path(__file__).parents[1] / "data" / "tls"
HAMBURGER = str(Path(sys.executable).parent / "hamburger")


def test_https(grafted_folder: Path) -> None:
    cert, key = TLS / "cert.pem", TLS / "key.pem"
    trusted = ssl.create_default_context(cafile=str(cert))
    options = ("--served-model-name", "burger", "--dtype", "float32", "--kv-cache-memory", "64MiB")
    tls = ("--ssl-certfile", str(cert), "--ssl-keyfile", str(key))
    with RealServer(str(grafted_folder), *options, *tls, trusted=trusted) as server:
        assert server.url.startswith("https://")
        body = {"model": "burger", "prompt": "a", "max_tokens": 3, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, verify=trusted, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 3
        assert server.url in server.log()  # the greeting's curl line


def test_a_certificate_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.pem")
    done = subprocess.run(
        [HAMBURGER, "serve", "--port", "0", "--ssl-certfile", missing], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "ssl_certfile" in done.stderr
    assert "Traceback" not in done.stderr
