"""Running the application: binding the port, telling it, and letting open streams end before leaving."""

from __future__ import annotations

import gc
import logging
import math
import resource
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from llmops.errors import ResourceError
from llmops.gateway.app import create_app
from llmops.gateway.callers.access.guard import keys_asked
from llmops.gateway.conversations.table import ResponseTable
from llmops.gateway.http.chunked import ServerSend
from llmops.gateway.http.private import check_uvicorn
from llmops.gateway.http.protocol import bounds_of, protocol_of
from llmops.gateway.settings import GatewaySettings
from llmops.gateway.siblings import ALONE, Siblings, crew
from llmops.gateway.supervisor import Supervisor
from llmops.gateway.workplace import workplace

log = logging.getLogger(__name__)

SEND_BUFFER = 128 * 1024


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ResourceError when the port is taken or the host is not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ResourceError(
            f"The gateway cannot listen on {host}:{port} ({error.strerror}); choose another with --port, or 0 for any."
        ) from error
    # accepted connections inherit it: what the system keeps for a client that does not read would be up to 4 MB each
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    listener.listen(2048)
    listener.setblocking(False)
    return listener


class DrainingServer(uvicorn.Server):
    """On SIGTERM or Ctrl-C: not ready any more, no new connections, open streams may end within the drain time.

    A second signal ends at once. Either way `run` returns: the process decides its own exit code.
    """

    def __init__(self, config: uvicorn.Config, on_draining: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_draining = on_draining

    def handle_exit(self, sig: int, frame: object) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True
        self._on_draining()


def _raise_descriptor_limit() -> None:
    """As many as the system allows: each connection is one, and shells start programs with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run(settings: GatewaySettings, on_listening: Callable[[str, bool], None] | None = None) -> bool:
    """Serve until SIGTERM or Ctrl-C. `on_listening` gets the base URL, and whether keys are asked for, as soon as the
    port is bound. True when a second signal ended it.

    Raises InputError for a host that opens the gateway to others without keys, unless the settings say so.
    """
    asked = keys_asked(settings)
    listener = bind(settings.host, settings.port)
    _raise_descriptor_limit()
    try:
        host, port = listener.getsockname()[:2]
        if on_listening is not None:
            on_listening(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}", asked)
        if settings.workers == 1:
            return _serve(settings, [listener])
        _run_workers(settings, listener)
        return False
    finally:
        listener.close()


def _run_workers(settings: GatewaySettings, listener: socket.socket) -> None:
    """Each worker also listens on a Unix socket, where the others read its metrics and reach what it generates."""
    # first of all, so that a signal finds somebody who tidies up
    supervisor = Supervisor(settings.workers)
    with workplace() as place:
        places = crew(place.folder, settings.workers)
        # made once, before there is anyone to make it at the same time
        ResponseTable(places[0].responses).close()

        def work(index: int) -> None:
            place.enter()
            own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            Path(places[index].own).unlink(missing_ok=True)
            own.bind(places[index].own)
            _serve(settings, [listener, own], places[index])

        supervisor.run(work, place.leave)


def _serve(settings: GatewaySettings, sockets: list[socket.socket], siblings: Siblings = ALONE) -> bool:
    app = create_app(settings, siblings)
    _calm_garbage_collector()
    server = DrainingServer(server_config(app, settings), app.state.health.drain)
    server.run(sockets=sockets)
    return server.force_exit


def _calm_garbage_collector() -> None:
    """What was imported lives as long as the process, and tokens make short-lived objects without cycles: looking
    through all of it every 700 allocations costs CPU and finds nothing (docs/decisions/0003-garbage-collector.md)."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def server_config(app: FastAPI, settings: GatewaySettings) -> uvicorn.Config:
    """How uvicorn serves the application. Raises ResourceError for a uvicorn that it does not know."""
    check_uvicorn()
    return uvicorn.Config(
        ServerSend(app),
        loop="uvloop",
        http=protocol_of(bounds_of(settings, app.state.metrics)),
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
