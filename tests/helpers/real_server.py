"""Starts `hamburger serve` as a process of its own, on a free port, and stops it."""

from __future__ import annotations

import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import httpx
from openai import OpenAI


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


class RealServer:
    """`with RealServer("--max-model-len", "512") as server:`; arguments are those of `hamburger serve`."""

    def __init__(
        self,
        *arguments: str,
        env: dict[str, str] | None = None,
        trusted: ssl.SSLContext | None = None,
        closed: str = "",
    ) -> None:
        """trusted: what to check an HTTPS server's certificate with. closed: of its standard streams, as a shell
        writes it."""
        self._trusted = trusted
        # One client, since each makes a TLS context anew, and none of its connections outlives its request.
        self._http = httpx.Client(
            verify=trusted or False, timeout=120, limits=httpx.Limits(max_keepalive_connections=0)
        )
        self._command = [str(Path(sys.executable).parent / "hamburger"), "serve", *arguments, "--port"]
        if closed:
            self._command = ["sh", "-c", f'exec "$@" {closed}', "sh", *self._command]
        self._env = {**os.environ, **(env or {})}
        self._log: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the server

    def __enter__(self) -> RealServer:
        while not self._starts():
            if f"port {self.port}: Address already in use" not in self.log():
                raise RuntimeError(f"the server did not become healthy:\n{self.log()}")
        self.client = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)
        return self

    def _starts(self) -> bool:
        self.port = free_port()  # which tests in another process may take first
        self.url = f"{'http' if self._trusted is None else 'https'}://127.0.0.1:{self.port}"
        command = [*self._command, str(self.port)]
        self.process = subprocess.Popen(command, env=self._env, stdout=self._log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if self.get("/health").status_code == 200:
                    return True
            except httpx.TransportError:
                time.sleep(0.02)
        self.stop()
        return False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
        self.client.close()  # a socket that is left to the garbage collector is a warning in a later test
        self._http.close()
        self._log.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait(self, seconds: float) -> int:
        """The exit code of a server that ends by itself."""
        return self.process.wait(seconds)

    def stop(self, sig: signal.Signals = signal.SIGINT) -> int:
        """Signal the server and wait; returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(sig)
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def log(self) -> str:
        self._log.flush()
        self._log.seek(0)
        return self._log.read()

    def get(self, path: str) -> httpx.Response:
        return self._http.get(self.url + path)

    def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        return self._http.post(self.url + path, json=body, headers=headers)

    def metric(self, name: str, labels: str = "") -> float:
        """The sum of a metric's samples whose label text holds `labels`."""
        lines = self.get("/metrics").text.splitlines()
        found = [line for line in lines if re.match(rf"{name}(\{{|\s)", line) and labels in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def wait_idle(self) -> None:
        """Until nothing runs or waits; fails after 20 s."""
        deadline = time.monotonic() + 20
        while self.metric("hamburger_num_requests_running") + self.metric("hamburger_num_requests_waiting"):
            if time.monotonic() > deadline:
                raise AssertionError("requests are still running or waiting")
            time.sleep(0.05)
