"""What HTTP and streaming cost: our server's tokens/s over those of its engine alone, by turns in one run.

    python benchmarks/http_cost.py --streams 1,16 --rounds 20

compare.py's ratio of `hamburger` to `engine` has a client in it that parses every event. This one only counts bytes:
it shares the cores with what is measured, and is no part of it. Both answer the same requests, streams at a time, each
exactly `--output-tokens` long; whoever is not measured is stopped.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import cast

from comparison.contestants import Contestant, Server
from comparison.roster import Setup, build_roster
from comparison.workload import Lengths, PromptWriter, Request
from hamburger.clients.arguments import count, list_of
from hamburger.engine.text.tokenizer import Tokenizer
from hamburger.model.checkpoints.sources import resolve_source

TIMEOUT = 300.0  # seconds, of one round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=list_of(count), default=[1, 16], metavar="N,N", help="requests in flight")
    parser.add_argument("--rounds", type=count, default=20)
    parser.add_argument("--prompt-tokens", type=count, default=64)
    parser.add_argument("--output-tokens", type=count, default=96)
    parser.add_argument("--threads", type=count, default=2)
    args = parser.parse_args()
    writer = PromptWriter(Tokenizer.load(resolve_source(None).tokenizer_path))
    lengths = Lengths("equal", args.prompt_tokens, args.output_tokens)
    with tempfile.TemporaryDirectory() as logs:
        setup = Setup(
            model=None, base="builtin", context=512, threads=args.threads, kv_cache_memory=1 << 31, confidences=(),
            most_streams=max(args.streams), logs=Path(logs),
        )  # fmt: skip
        roster = build_roster(setup)
        roster.keep(["hamburger", "engine"])
        contestants = list(roster.processes.values())
        try:
            for contestant in contestants:
                contestant.start()
                contestant.tree.pause()
            for streams in args.streams:
                ratios = []
                for round_ in range(args.rounds + 1):
                    requests = writer.requests([lengths] * (2 * streams), round_)
                    speeds = {}
                    for contestant in contestants[:: 1 if round_ % 2 else -1]:
                        speeds[isinstance(contestant, Server)] = _speed(contestant, requests, streams)
                    if round_ > 0:  # the first warms up
                        ratios.append(speeds[True] / speeds[False])
                middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
                print(f"{streams} streams: {middle:.3f} ({low:.2f} to {high:.2f})", flush=True)
        finally:
            for contestant in contestants:
                contestant.end()


def _speed(contestant: Contestant, requests: Sequence[Request], streams: int) -> float:
    """Tokens/s over everything."""
    contestant.tree.resume()
    try:
        if isinstance(contestant, Server):
            start = time.perf_counter()
            _ask_all(contestant, requests, streams)
            seconds = time.perf_counter() - start
        else:
            answers = contestant.answer(requests, streams, None, TIMEOUT)
            seconds = max(a.ended or 0.0 for a in answers) - min(a.started for a in answers)
    finally:
        contestant.tree.pause()
    return sum(request.output_tokens for request in requests) / seconds


def _ask_all(server: Server, requests: Sequence[Request], streams: int) -> None:
    """Without asyncio, whose client takes half as long as our server.

    Raises RuntimeError for an answer that is not a whole stream, TimeoutError where nothing comes.
    """
    waiting = iter(requests)
    deadline = time.monotonic() + TIMEOUT
    with selectors.DefaultSelector() as selector:
        for request in islice(waiting, streams):
            selector.register(_post(server, request), selectors.EVENT_READ, bytearray())
        while selector.get_map():
            for key, _ in selector.select(TIMEOUT):
                connection, text = cast(socket.socket, key.fileobj), key.data
                if chunk := connection.recv(1 << 16):
                    text += chunk
                    continue
                selector.unregister(connection)
                connection.close()
                if not text.startswith(b"HTTP/1.1 200 ") or b"[DONE]" not in text[-64:]:
                    raise RuntimeError(f"{bytes(text[:64])!r} ... {bytes(text[-64:])!r}")
                for request in islice(waiting, 1):
                    selector.register(_post(server, request), selectors.EVENT_READ, bytearray())
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(selector.get_map())} answers have not ended in {TIMEOUT:g} s")


def _post(server: Server, request: Request) -> socket.socket:
    body = json.dumps(
        {
            "model": server.model, "prompt": request.prompt_ids, "max_tokens": request.output_tokens,
            "temperature": 0, "ignore_eos": True, "stream": True,
        }
    ).encode()  # fmt: skip
    host = server.url.removeprefix("http://")
    name, port = host.split(":")
    connection = socket.create_connection((name, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


if __name__ == "__main__":
    main()
