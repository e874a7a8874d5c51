"""A small HTTP server in a thread, for what asks one: its answers come from a function."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def answering(answer: Callable[[str], tuple[int, bytes]], *, needs_key: str | None = None) -> Iterator[int]:
    """Answer each GET with the status and body that `answer` gives for its path and query; gives the port. needs_key: a
    401 for who sends another X-Api-Key."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known = needs_key is None or self.headers["X-Api-Key"] == needs_key
            status, body = answer(self.path) if is_known else (401, b"")
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))  # how often it looks whether it ends
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
