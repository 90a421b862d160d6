"""Running the gateway: in one process, or in several workers behind one port."""

from __future__ import annotations

import logging
import resource
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from llmops.gateway.app import Guest, create_app
from llmops.gateway.callers.access.guard import keys_asked
from llmops.gateway.conversations.table import ResponseTable
from llmops.gateway.http.serving import DrainingServer, bind, calm_garbage_collector, server_config
from llmops.gateway.settings import GatewaySettings
from llmops.gateway.siblings import ALONE, Siblings, crew
from llmops.gateway.supervisor import Supervisor
from llmops.gateway.workplace import workplace

log = logging.getLogger(__name__)


def _raise_descriptor_limit() -> None:
    """As many as the system allows: each connection is one, and shells start programs with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run(
    settings: GatewaySettings,
    on_listening: Callable[[str, bool], None] | None = None,
    guests: Sequence[Guest] = (),
) -> bool:
    """Serve until SIGTERM or Ctrl-C. `on_listening` gets the base URL, and whether keys are asked for, as soon as the
    port is bound. True when a second signal ended it. `guests` are served by every worker.

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
            return _serve(settings, [listener], guests=guests)
        return _run_workers(settings, listener, guests)
    finally:
        listener.close()


def _run_workers(settings: GatewaySettings, listener: socket.socket, guests: Sequence[Guest]) -> bool:
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
            _serve(settings, [listener, own], places[index], guests)

        return supervisor.run(work, place.leave)


def _serve(
    settings: GatewaySettings,
    sockets: list[socket.socket],
    siblings: Siblings = ALONE,
    guests: Sequence[Guest] = (),
) -> bool:
    app = create_app(settings, siblings, guests=guests)
    calm_garbage_collector()
    server = DrainingServer(server_config(app, settings), app.state.health.drain)
    server.run(sockets=sockets)
    return server.force_exit
