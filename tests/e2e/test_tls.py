"""HTTPS on a real server, with a certificate for 127.0.0.1 that is made for this test alone."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

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
        heard = _chat(server.url, SSL_CERT_FILE=str(cert))
        assert (heard.returncode, heard.stdout.strip() != "") == (0, True), heard.stderr
        refused = _chat(server.url)
        assert refused.returncode == 1
        assert f"the certificate of {server.url} is not trusted" in refused.stderr
        assert "SSL_CERT_FILE" in refused.stderr
        misnamed = _chat(server.url, SSL_CERT_FILE="/none.pem")
        assert misnamed.returncode == 2
        assert misnamed.stderr.startswith("hamburger: SSL_CERT_FILE names no certificates")


def test_sighup_has_certificate_and_keys_read_anew(grafted_folder: Path, tmp_path: Path) -> None:
    """Also where SIGHUP was ignored as the process started, as nohup has it."""
    pair, keys = tmp_path / "pair.pem", tmp_path / "keys"
    pair.write_bytes((TLS / "cert.pem").read_bytes() + (TLS / "key.pem").read_bytes())
    keys.write_text("the-first-key\n")
    trusted = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
    renewed = ssl.create_default_context(cafile=str(TLS / "renewed.pem"))
    options = (
        "--served-model-name",
        "burger",
        "--dtype",
        "float32",
        "--kv-cache-memory",
        "64MiB",
        "--log-format",
        "json",
    )
    files = ("--ssl-certfile", str(pair), "--api-key-file", str(keys))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with RealServer(str(grafted_folder), *options, *files, trusted=trusted) as server:
        signal.signal(signal.SIGHUP, before)

        def status(key: str, trusts: ssl.SSLContext) -> int:
            return httpx.get(f"{server.url}/v1/models", headers={"X-Api-Key": key}, verify=trusts).status_code

        assert [status("the-first-key", trusted), status("the-second-key", trusted)] == [200, 401]
        pair.write_bytes((TLS / "renewed.pem").read_bytes())
        keys.write_text("the-second-key\n")
        server.process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 60
        while "the file of API keys was read anew" not in server.log():
            assert time.monotonic() < deadline, server.log()
            time.sleep(0.02)
        assert [status("the-first-key", renewed), status("the-second-key", renewed)] == [401, 200]
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            status("the-second-key", trusted)
        assert server.stop(signal.SIGTERM) == 0


def _chat(url: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("SSL_CERT_")} | variables
    return subprocess.run(
        [HAMBURGER, "chat", "--url", url, "--max-tokens", "8"],
        input="Hi\n", capture_output=True, text=True, timeout=60, env=env,
    )  # fmt: skip


def test_a_certificate_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.pem")
    done = subprocess.run(
        [HAMBURGER, "serve", "--port", "0", "--ssl-certfile", missing], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "ssl_certfile" in done.stderr
    assert "Traceback" not in done.stderr
