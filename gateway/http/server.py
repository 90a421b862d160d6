"""The HTTP server, which binds the port, limits connections, and drains streams before it stops."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import math
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import uvicorn
from fastapi import FastAPI
from uvicorn.lifespan.on import LifespanOn, LifespanSendMessage

from llmops.background_output import finish_output
from llmops.errors import LlmopsError, ResourceError
from llmops.gateway.http.connection_limits import connection_limits
from llmops.gateway.http.limited_protocol import protocol_class
from llmops.gateway.settings import GatewaySettings

log = logging.getLogger(__name__)

#: Size of the kernel's send buffer per connection, in bytes. By default the buffer grows to 4 MB
#: for a client that does not read.
SEND_BUFFER_BYTES = 128 * 1024
#: Maximum number of connections that a listener accepts in one iteration of the event loop. libuv
#: accepts one per iteration and file descriptor, so that a new connection would wait for as many
#: iterations as connections came before it.
ACCEPTS_PER_TURN = 16
#: Size, in bytes, from which malloc maps a block of its own, which returns to the system when it is
#: freed. Only whole bodies and answers are as large.
MAPPED_BLOCK_BYTES = 256 * 1024
#: Seconds that shutting down may take after a second signal. An unavailable store must not keep the
#: process alive.
FORCED_SHUTDOWN_TIMEOUT = 2.0
#: Seconds that responses have to end after draining, when their connections are aborted. After that,
#: uvicorn cancels them.
ABORT_TIMEOUT = 2
#: Exit code if shutting down takes longer than FORCED_SHUTDOWN_TIMEOUT. Shells report the same code
#: for a process that SIGINT ended.
INTERRUPTED_EXIT_CODE = 130


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `host` and `port`.

    Raises:
        ResourceError: The port is in use or needs privileges, or the host is not an address of this
            machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ResourceError(
            f"llmops cannot listen on {host}:{port} ({error.strerror}); give --host an address of this machine, such "
            "as 127.0.0.1, and --port another free port, from 1024 on, or 0 for any."
        ) from error
    # Accepted connections inherit the size of the send buffer.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    listener.listen(2048)
    listener.setblocking(False)
    return listener


class _Lifespan(LifespanOn):
    """uvicorn's lifespan, except that an expected error of the start is kept instead of its traceback.

    Attributes:
        error: The error that made the start fail, None for an unexpected one.
    """

    error: LlmopsError | None = None

    async def send(self, message: LifespanSendMessage) -> None:
        if message["type"] == "lifespan.startup.failed" and isinstance(error := sys.exception(), LlmopsError):
            self.error = error
            message = {"type": "lifespan.startup.failed", "message": ""}
        await super().send(message)


class _Config(uvicorn.Config):
    def load(self) -> None:
        super().load()
        self.lifespan_class = _Lifespan


class DrainingServer(uvicorn.Server):
    """A server that drains on SIGTERM or Ctrl-C.

    A draining server accepts no connections, and open streams have `timeouts.drain` seconds to end.
    A second signal ends open streams. `run` returns in both cases, so that the process chooses its
    exit code. If shutting down takes too long after a second signal, the process exits immediately.
    """

    def __init__(self, config: uvicorn.Config, on_draining: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_draining = on_draining
        self._exit_timer = threading.Timer(FORCED_SHUTDOWN_TIMEOUT, _exit_at_once)
        self._exit_timer.daemon = True

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal ends the server."""
        # uvicorn closes all of these sockets when the server drains, so that new connections are
        # refused
        given = sockets or []
        copies = [one.dup() for one in given for _ in range(ACCEPTS_PER_TURN - 1)]
        try:
            super().run([*given, *copies])
        finally:
            self._exit_timer.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application.

        Raises:
            LlmopsError: The application cannot start.
            SystemExit: An unexpected error, which was logged.
        """
        try:
            await super().startup(sockets)
        except SystemExit:
            if isinstance(self.lifespan, _Lifespan) and self.lifespan.error is not None:
                raise self.lifespan.error from None
            raise

    def handle_exit(self, sig: int, frame: object) -> None:
        """Start to drain at the first signal, and stop immediately at the second."""
        if self.should_exit and not self.force_exit:
            self.force_exit = True
            self._exit_timer.start()
        self.should_exit = True
        self._on_draining()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close all connections and shut the application down."""
        drain = (self.config.timeout_graceful_shutdown or 0) - ABORT_TIMEOUT
        end = asyncio.get_running_loop().call_later(drain, self._abort_connections)
        await super().shutdown(sockets)
        end.cancel()
        if self.force_exit:
            self._abort_connections()
            while self.server_state.tasks:
                await asyncio.sleep(0.01)
            await self.lifespan.shutdown()

    def _abort_connections(self) -> None:
        """End the open responses as if their clients had disconnected.

        uvicorn would cancel their tasks and log tracebacks.
        """
        connections = list(self.server_state.connections)
        if connections and not self.force_exit:
            log.warning("Connections that were still open when draining ended: %d; they are closed.", len(connections))
        for connection in connections:
            connection.transport.abort()


def _exit_at_once() -> None:
    finish_output()
    os._exit(INTERRUPTED_EXIT_CODE)


def tune_memory() -> None:
    """Collect garbage rarely and never among imported modules, and bound what glibc's malloc keeps.

    Tokens create short-lived objects without cycles. By default, a collection every 700 allocations
    costs CPU time and finds nothing (docs/decisions/0003).

    By default, every thread has an arena, which keeps what it freed from other threads. It also
    reserves 64 MiB of addresses: under a limit on addresses, such as `ulimit -v`, a new thread has
    no room to start, and CPython's `Thread.start` waits for the thread forever. The threads
    therefore share two arenas.

    By default, the first large block that is freed, up to 32 MiB, makes malloc take blocks of its
    size from the arenas, where smaller blocks that live longer keep them from the system.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    m_mmap_threshold, m_arena_max = -3, -8  # of malloc.h
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(m_arena_max, 2)
        ctypes.CDLL(None).mallopt(m_mmap_threshold, MAPPED_BLOCK_BYTES)


def uvicorn_config(app: FastAPI, settings: GatewaySettings) -> uvicorn.Config:
    """Return uvicorn's configuration."""
    return _Config(
        app,
        loop="uvloop",
        http=protocol_class(connection_limits(settings, getattr(app.state, "metrics", None))),
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        # uvicorn's messages at level info repeat the gateway's own messages about its start and
        # stop.
        log_level="warning" if settings.log_level == "info" else settings.log_level,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=math.ceil(settings.timeouts.connection),
        timeout_graceful_shutdown=max(round(settings.timeouts.drain), 1) + ABORT_TIMEOUT,
    )
