"""The entry point of the gateway: one process, or several independent processes behind one port.

Each worker is a complete gateway. Workers share only the listening socket: state that several
workers need (limits, stored responses, keys) is in Redis or the store. Each worker also listens on
its own port, so that Prometheus can scrape each of them.
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
from llmops.gateway.http.server import DrainingServer, bind, tune_memory, uvicorn_config
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
        settings: The gateway's settings. `workers` is the number of processes.
        on_listening: Called as soon as the port is bound, with the base URL and with True if API
            keys are required.
        plugins: Functions that add routes of other packages to every worker.

    Returns:
        True if a second signal ended the gateway before its responses were complete.

    Raises:
        InputError: The host exposes the gateway without API keys and `open` is not set, or several
            workers have no store or Redis for the state that they must share, or a safety filter
            cannot be created.
        ResourceError: The port is in use, or the host is not an address of this machine.
    """
    _check_workers(settings)
    check_filters(settings.safety)
    _raise_descriptor_limit()
    with ExitStack() as stack:
        # The port is bound before keys are checked, because messages about keys assume a valid
        # host.
        listener = stack.enter_context(closing(bind(settings.host, settings.port)))
        requires_keys = keys_required(settings)
        if on_listening is not None:
            on_listening(_url_of(listener), requires_keys)
        if settings.workers == 1:
            return _serve(settings, [listener], plugins)
        # The supervisor and the ports exist before the first fork, so that a signal finds the
        # supervisor and a restarted worker keeps its port.
        supervisor = Supervisor(settings.workers)
        first = settings.port + 1 if settings.port else 0
        ports = [first and first + index for index in range(settings.workers)]
        own = [stack.enter_context(closing(bind(settings.host, port))) for port in ports]
        log.info(
            "Prometheus can scrape each worker at its own address: %s",
            ", ".join(f"{_url_of(one)}/metrics" for one in own),
        )
        # Only one worker sends the golden prompts, because all workers would send the same prompts.
        others = settings.model_copy(update={"quality": settings.quality.model_copy(update={"interval": None})})
        return supervisor.run(lambda index: _serve(others if index else settings, [listener, own[index]], plugins))


def _check_workers(settings: GatewaySettings) -> None:
    """Check that workers share the state that callers expect them to share.

    Raises:
        InputError: Each worker would have its own limits or stored responses, or `quotas.gateways`
            is set without Redis.
    """
    if settings.workers == 1:
        return
    if settings.responses.entries and settings.store is None:
        raise InputError(
            f"{settings.workers} workers need a store: each worker must find all stored responses. Set `store`, "
            "turn stored responses off with `responses: {entries: 0}`, or use one worker."
        )
    if settings.redis is not None:
        return
    if settings.quotas.model_fields_set - {"gateways"} or settings.store is not None:
        raise InputError(
            f"{settings.workers} workers need Redis: without it, each grants callers their whole limit. Set `redis`, "
            "or use one worker."
        )
    if settings.quotas.model_fields_set:
        raise InputError(
            "The setting `quotas.gateways` is the number of gateways that share Redis, and Redis is not set. Set "
            "`redis`, or remove `quotas.gateways`."
        )


def _raise_descriptor_limit() -> None:
    """Raise the limit of open files to the system's maximum.

    Each connection is an open file, and shells usually allow 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _serve(settings: GatewaySettings, sockets: list[socket.socket], plugins: Sequence[Plugin]) -> bool:
    app = create_app(settings, plugins=plugins)
    tune_memory()
    server = DrainingServer(uvicorn_config(app, settings), app.state.health.drain)
    server.run(sockets=sockets)
    return server.force_exit
