"""What OpenTelemetry's spans cost a request: servers without, with all and with one in a hundred, by turns in one run.

    python benchmarks/tracing_cost.py --rounds 12

Short requests (a prompt of 8 tokens, one token of answer, not streamed) from --clients at once, on connections that
stay open; the embedded model answers. Spans go to a sink that takes all and reads none. Told are requests/s, and the
CPU time that the HTTP process, with the thread that sends spans, takes for a request. Who is not measured is stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from comparison.contestants import Launch, Server
from comparison.roster import SERVE
from hamburger.clients.arguments import count

SAMPLED = {"off": None, "all": "1.0", "one in 100": "0.01"}
_TICKS = os.sysconf("SC_CLK_TCK")


class Sink(BaseHTTPRequestHandler):
    """A collector that forgets."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


def server_of(rate: str | None, sink: int, log: Path) -> Server:
    command = [
        sys.executable,
        "-c",
        SERVE,
        "serve",
        "--port",
        "{port}",
        "--kv-cache-memory",
        "256MiB",
        "--max-model-len",
        "512",
    ]
    env = {"OMP_NUM_THREADS": "1"}
    if rate is not None:
        command += ["--otlp-traces-endpoint", f"http://127.0.0.1:{sink}"]
        env |= {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": rate}
    return Server(Launch(command, env, log), ours=True)


def measure(server: Server, clients: int, requests: int) -> tuple[float, float]:
    """Requests/s, and milliseconds of the HTTP process's CPU time a request."""
    server.tree.resume()
    try:
        before, start = cpu_seconds(server.tree.members()[0]), time.perf_counter()
        asyncio.run(ask_all(server, clients, requests))
        seconds = time.perf_counter() - start
        return requests / seconds, 1000 * (cpu_seconds(server.tree.members()[0]) - before) / requests
    finally:
        server.tree.pause()


def cpu_seconds(pid: int) -> float:
    """Of a process with all its threads, those that have ended included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


async def ask_all(server: Server, clients: int, requests: int) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    left = iter(range(requests))

    async def client() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        for number in left:
            prompt = [100 + number % 1000, 7, 900, 35, 7, 900, 35, 8]
            body = json.dumps({"model": server.model, "prompt": prompt, "max_tokens": 1, "temperature": 0}).encode()
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in answer.split(b"\r\n")[0]:
                raise RuntimeError(answer.decode())
            length = answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0]
            await reader.readexactly(int(length))
        writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=count, default=16)
    parser.add_argument("--requests", type=count, default=400, help="of a round")
    parser.add_argument("--rounds", type=count, default=12)
    args = parser.parse_args()
    sink = ThreadingHTTPServer(("127.0.0.1", 0), Sink)
    threading.Thread(target=sink.serve_forever, daemon=True).start()
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in SAMPLED}
    with tempfile.TemporaryDirectory() as logs:
        servers = {
            name: server_of(rate, sink.server_port, Path(logs) / f"{i}.log")
            for i, (name, rate) in enumerate(SAMPLED.items())
        }
        try:
            for server in servers.values():
                server.start()
                server.tree.pause()
            for round_ in range(args.rounds + 1):
                for name in list(servers)[:: 1 if round_ % 2 else -1]:
                    measured = measure(servers[name], args.clients, args.requests)
                    if round_ > 0:  # the first warms up
                        figures[name].append(measured)
        finally:
            for server in servers.values():
                server.end()
    print(f"{args.clients} clients, {args.rounds} rounds of {args.requests} requests; medians, ratios to off by round")
    print("| spans | requests/s | CPU ms a request | requests/s to off | CPU to off |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, found in figures.items():
        speed, cpu = (statistics.median(column) for column in zip(*found, strict=True))
        ratios = [[a[i] / b[i] for a, b in zip(found, figures["off"], strict=True)] for i in (0, 1)]
        to_off = " | ".join(f"{statistics.median(ratio):.3f}" for ratio in ratios)
        print(f"| {name} | {speed:.0f} | {cpu:.3f} | {to_off} |")


if __name__ == "__main__":
    main()
