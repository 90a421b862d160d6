"""Metrics that no process of the stack has: those of evaluations, which the node exporter reads from a file, and of a
ledger. One HTTP server serves whatever it is given."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Told:
    """`values`: what each series is, by its name with its labels."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.address = ""

    def page(self) -> bytes:
        return "".join(f"{name} {value}\n" for name, value in self.values.items()).encode()


@contextmanager
def told() -> Iterator[Told]:
    """Serve the exporter on a free port."""
    what = Told()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = what.page()
            self.send_response(200)
            self.send_header("content-type", "text/plain; version=0.0.4")
            self.send_header("content-length", str(len(page)))
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the name is the library's
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    what.address = f"127.0.0.1:{server.server_address[1]}"
    try:
        yield what
    finally:
        server.shutdown()
        server.server_close()
