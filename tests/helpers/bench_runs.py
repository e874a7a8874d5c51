"""Runs of `hamburger bench` against a scripted server."""

from __future__ import annotations

import argparse

from hamburger.clients import bench
from scripted_server import ScriptedServer


def run_bench(server: ScriptedServer, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(["--url", server.url, *arguments]))
