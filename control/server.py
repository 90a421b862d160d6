"""Running control as a process of its own. Of several one leads; all of them answer."""

from __future__ import annotations

from collections.abc import Callable

from llmops.control.app import MakeJobs, create_app
from llmops.gateway.auth.exposure import keys_required
from llmops.gateway.http.server import DrainingServer, bind, tune_garbage_collector, uvicorn_config
from llmops.gateway.settings import GatewaySettings


def run(
    settings: GatewaySettings, duties: MakeJobs, gateway: str | None, on_listening: Callable[[str, bool], None]
) -> bool:
    """Serve until SIGTERM or Ctrl-C. `on_listening` gets the base URL, and whether keys are asked for. True when a
    second signal ended it.

    Raises InputError for a host that opens it to others without keys, and what `open_store` raises.
    """
    asked = keys_required(settings)
    listener = bind(settings.host, settings.port)
    try:
        host, port = listener.getsockname()[:2]
        on_listening(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}", asked)
        app = create_app(settings, duties, gateway)
        tune_garbage_collector()
        server = DrainingServer(uvicorn_config(app, settings), lambda: None)
        server.run(sockets=[listener])
        return server.force_exit
    finally:
        listener.close()
