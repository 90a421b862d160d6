"""The HTTP server: binds the port, limits connections, and lets open streams end before it stops."""

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

#: The kernel's send buffer of a connection. By default it grows to 4 MB for a client that does not
#: read.
SEND_BUFFER_BYTES = 128 * 1024
#: Connections that a listener accepts in one turn of the event loop. libuv accepts one per turn and
#: file descriptor, so a new connection would wait for as many turns as others came before it.
ACCEPTS_PER_TURN = 16
#: Seconds that closing may take after a second signal. A store that is unavailable must not hold
#: the process.
FORCED_SHUTDOWN_TIMEOUT = 2.0
#: The exit code if closing takes longer.
INTERRUPTED_EXIT_CODE = 130


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises ResourceError if the port is taken or the host is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason, advice = error.strerror, "choose another with --port, or 0 for any"
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            named = isinstance(error, socket.gaierror)
            reason = "that is neither an IP address nor a known name" if named else "that is not this machine's address"
            advice = "give --host an address of this machine, such as 127.0.0.1"
        elif error.errno == errno.EACCES:
            advice = "ports below 1024 need rights; choose a higher one with --port"
        raise ResourceError(f"llmops cannot listen on {host}:{port} ({reason}); {advice}.") from error
    # accepted connections inherit the size
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    listener.listen(2048)
    listener.setblocking(False)
    return listener


class DrainingServer(uvicorn.Server):
    """A server that drains on SIGTERM or Ctrl-C.

    It accepts no connections from then on, and open streams may end in `drain`. A second signal
    ends open streams. `run` returns either way, so that the process chooses its exit code; only if
    closing takes too long after a second signal, the process exits immediately.
    """

    def __init__(self, config: uvicorn.Config, on_draining: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_draining = on_draining
        self._exit_timer = threading.Timer(FORCED_SHUTDOWN_TIMEOUT, os._exit, [INTERRUPTED_EXIT_CODE])
        self._exit_timer.daemon = True

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal ends the server."""
        listeners = [one.dup() for one in sockets or () for _ in range(ACCEPTS_PER_TURN)]
        try:
            super().run(listeners)
        finally:
            self._exit_timer.cancel()

    def handle_exit(self, sig: int, frame: object) -> None:
        """Start to drain, or stop immediately on the second signal."""
        if self.should_exit and not self.force_exit:
            self.force_exit = True
            self._exit_timer.start()
        self.should_exit = True
        self._on_draining()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the connections and the application."""
        await super().shutdown(sockets)
        if self.force_exit:
            # uvicorn would cancel its tasks and log their tracebacks: here responses end as if
            # their clients had left, and the application closes as usual
            for connection in list(self.server_state.connections):
                connection.transport.abort()
            while self.server_state.tasks:
                await asyncio.sleep(0.01)
            await self.lifespan.shutdown()


def tune_garbage_collector() -> None:
    """Collect garbage rarely, and never in what has been imported.

    Tokens make short-lived objects without cycles: by default a collection every 700 allocations
    costs CPU and finds nothing (docs/decisions/0003).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def uvicorn_config(app: FastAPI, settings: GatewaySettings) -> uvicorn.Config:
    """Return uvicorn's configuration.

    Raises ResourceError if uvicorn lacks a member that the gateway needs.
    """
    check_uvicorn_internals()
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=protocol_class(connection_limits(settings, getattr(app.state, "metrics", None))),
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        # the gateway logs its own start and stop
        log_level="warning" if settings.log_level == "info" else settings.log_level,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=math.ceil(settings.timeouts.connection),
        timeout_graceful_shutdown=max(round(settings.timeouts.drain), 1),
    )
