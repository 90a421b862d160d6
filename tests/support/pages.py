"""A server of HTTP whose answers a test makes."""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Page:
    """An answer."""

    body: str | bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


class Request(BaseHTTPRequestHandler):
    """A request: `command`, `path`, `headers` and `body`."""

    server: "PageServer"
    body = b""

    def _answer(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("content-length") or 0))
        with suppress(OSError):
            if (page := self.server.page(self)) is not None:
                self._send(page)

    do_GET = do_HEAD = do_POST = _answer

    def _send(self, page: Page) -> None:
        data = page.body.encode() if isinstance(page.body, str) else page.body
        self.send_response(page.status)
        for name, value in {"content-length": str(len(data)), **page.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the name is the library's
        return


class PageServer(ThreadingHTTPServer):
    """Answers with what `page` makes of a request, on a free port of the loopback, until it is closed.

    `page` returns None if it has written the answer by itself.
    """

    request_queue_size = 128

    def __init__(self, page: Callable[[Request], Page | None]) -> None:
        super().__init__(("127.0.0.1", 0), Request)
        self.page = page
        self.address = f"127.0.0.1:{self.server_port}"
        self.url = f"http://{self.address}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def server_close(self) -> None:
        self.shutdown()
        super().server_close()
