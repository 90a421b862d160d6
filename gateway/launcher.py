"""The entry point of the gateway: one process, or several independent ones behind one port.

Each worker is a complete gateway. Workers share the listening socket and nothing else: state that
more than one of them needs (limits, stored responses, keys) is in Redis or the store. Each worker
also listens on a port of its own, so that Prometheus can scrape it.
"""

from __future__ import annotations

import logging
import resource
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing

from llmops.errors import InputError
from llmops.gateway.app import Plugin, create_app
from llmops.gateway.auth.authentication import keys_required
from llmops.gateway.http.server import DrainingServer, bind, tune_garbage_collector, uvicorn_config
from llmops.gateway.safety.policy import check_filters
from llmops.gateway.settings import GatewaySettings
from llmops.gateway.supervisor import Supervisor

log = logging.getLogger(__name__)


def run(
    settings: GatewaySettings,
    on_listening: Callable[[str, bool], None] | None = None,
    plugins: Sequence[Plugin] = (),
) -> bool:
    """Serve until SIGTERM or Ctrl-C.

    Args:
        settings: The gateway's settings; `workers` is the number of processes.
        on_listening: Called with the base URL, and with whether API keys are required, as soon as
            the port is bound.
        plugins: What every worker serves beside the gateway.

    Returns:
        True if a second signal ended the gateway before its responses were complete.

    Raises:
        InputError: The host exposes the gateway without API keys and `open` is not set, or several
            workers have no store or Redis for the state that they must share, or a safety filter
            cannot be created.
        ResourceError: The port is taken.
    """
    _check_workers(settings)
    check_filters(settings.safety)
    _raise_descriptor_limit()
    with ExitStack() as stack:
        # before the keys: what is said about a host supposes that it is one
        listener = stack.enter_context(closing(bind(settings.host, settings.port)))
        requires_keys = keys_required(settings)
        if on_listening is not None:
            on_listening(_url_of(listener), requires_keys)
        if settings.workers == 1:
            return _serve(settings, [listener], plugins)
        # created before the first fork, so that a signal finds the supervisor, and a restarted
        # worker its old port
        supervisor = Supervisor(settings.workers)
        first = settings.port + 1 if settings.port else 0
        ports = [first and first + index for index in range(settings.workers)]
        own = [stack.enter_context(closing(bind(settings.host, port))) for port in ports]
        log.info("Metrics of each worker: %s", ", ".join(f"{_url_of(one)}/metrics" for one in own))
        # one worker watches the replicas for all: each of them would ask the same
        others = settings.model_copy(update={"quality": settings.quality.model_copy(update={"interval": None})})
        return supervisor.run(lambda index: _serve(others if index else settings, [listener, own[index]], plugins))


def _check_workers(settings: GatewaySettings) -> None:
    """Raise InputError if workers would not share state that callers expect them to share.

    This is the case for limits and responses that each worker would hold for itself.
    """
    if settings.workers == 1:
        return
    if settings.responses.entries and settings.store is None:
        raise InputError(
            f"{settings.workers} workers need a store: a stored response must be found by each of them. Set `store`, "
            "turn stored responses off with `responses: {entries: 0}`, or use one worker."
        )
    limited = settings.quotas.model_fields_set or settings.store is not None
    if limited and settings.redis is None:
        raise InputError(
            f"{settings.workers} workers need Redis: each alone would let callers use their whole limit. Set `redis`, "
            "or use one worker."
        )


def _raise_descriptor_limit() -> None:
    """Raise the limit of open files to the system's maximum.

    Each connection is a file, and shells allow 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _serve(settings: GatewaySettings, sockets: list[socket.socket], plugins: Sequence[Plugin]) -> bool:
    app = create_app(settings, plugins=plugins)
    tune_garbage_collector()
    server = DrainingServer(uvicorn_config(app, settings), app.state.health.drain)
    server.run(sockets=sockets)
    return server.force_exit
