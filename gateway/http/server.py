"""Serving an application: binding the port, bounds for who connects, and letting open streams end before leaving."""

from __future__ import annotations

import asyncio
import errno
import gc
import math
import os
import socket
import threading
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from llmops.errors import ResourceError
from llmops.gateway.http.connection_limits import connection_limits
from llmops.gateway.http.limited_protocol import check_uvicorn_internals, protocol_class
from llmops.gateway.settings import GatewaySettings

SEND_BUFFER_BYTES = 128 * 1024
# after a second signal: seconds that what closes may take (its store may be away), and the exit code
FORCED_SHUTDOWN_TIMEOUT, INTERRUPTED_EXIT_CODE = 2.0, 130


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ResourceError when the port is taken or the host is not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        advice = "choose another with --port, or 0 for any"
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            advice = "give --host an address of this machine, such as 127.0.0.1"
        elif error.errno == errno.EACCES:
            advice = "ports below 1024 need rights; choose a higher one with --port"
        raise ResourceError(f"llmops cannot listen on {host}:{port} ({error.strerror}); {advice}.") from error
    # accepted connections inherit it: what the system keeps for a client that does not read would be up to 4 MB each
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    listener.listen(2048)
    listener.setblocking(False)
    return listener


class DrainingServer(uvicorn.Server):
    """On SIGTERM or Ctrl-C: not ready any more, no new connections, open streams may end within the drain time.

    A second signal waits for no answer. Either way `run` returns: the process decides its own exit code. Only where
    closing takes too long after a second signal, the process ends at once.
    """

    def __init__(self, config: uvicorn.Config, on_draining: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_draining = on_draining
        self._last = threading.Timer(FORCED_SHUTDOWN_TIMEOUT, os._exit, [INTERRUPTED_EXIT_CODE])
        self._last.daemon = True

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            super().run(sockets)
        finally:
            self._last.cancel()

    def handle_exit(self, sig: int, frame: object) -> None:
        if self.should_exit and not self.force_exit:
            self.force_exit = True
            self._last.start()
        self.should_exit = True
        self._on_draining()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:
            # uvicorn would leave all of it to be cancelled, and write tracebacks of that: here answers end as if their
            # clients had left, and the application as ever
            for connection in list(self.server_state.connections):
                connection.transport.abort()
            while self.server_state.tasks:
                await asyncio.sleep(0.01)
            await self.lifespan.shutdown()


def tune_garbage_collector() -> None:
    """What was imported lives as long as the process, and tokens make short-lived objects without cycles: looking
    through all of it every 700 allocations costs CPU and finds nothing (docs/decisions/0003)."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def uvicorn_config(app: FastAPI, settings: GatewaySettings) -> uvicorn.Config:
    """How uvicorn serves the application. Raises ResourceError for a uvicorn that it does not know."""
    check_uvicorn_internals()
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=protocol_class(connection_limits(settings, getattr(app.state, "metrics", None))),
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        # its start and stop lines say nothing that ours do not
        log_level="warning" if settings.log_level == "info" else settings.log_level,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=math.ceil(settings.timeouts.connection),
        timeout_graceful_shutdown=max(round(settings.timeouts.drain), 1),
    )
