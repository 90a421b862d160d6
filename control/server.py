"""Running control as a process of its own. Of several one leads; all of them answer."""

from __future__ import annotations

from collections.abc import Callable

from llmops.control.app import Duties, create_app
from llmops.gateway.callers.access.guard import keys_asked
from llmops.gateway.http.serving import DrainingServer, bind, calm_garbage_collector, server_config
from llmops.gateway.settings import GatewaySettings


def run(
    settings: GatewaySettings, duties: Duties, gateway: str | None, on_listening: Callable[[str, bool], None]
) -> bool:
    """Serve until SIGTERM or Ctrl-C. `on_listening` gets the base URL, and whether keys are asked for. True when a
    second signal ended it.

    Raises InputError for a host that opens it to others without keys, and what `open_store` raises.
    """
    asked = keys_asked(settings)
    listener = bind(settings.host, settings.port)
    try:
        host, port = listener.getsockname()[:2]
        on_listening(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}", asked)
        app = create_app(settings, duties, gateway)
        calm_garbage_collector()
        server = DrainingServer(server_config(app, settings), lambda: None)
        server.run(sockets=[listener])
        return server.force_exit
    finally:
        listener.close()
