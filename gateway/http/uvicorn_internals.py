"""What is used of uvicorn and private to it. pyproject.toml pins its version; this says what another one lacks."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from llmops.distribution import install_command
from llmops.errors import ResourceError

# protocol.py overrides the methods and reads the rest; chunked.py writes streams past `send`; body.py looks ahead
PROTOCOL_MEMBERS = (
    *("connection_made", "connection_lost", "data_received", "pause_writing", "resume_writing"),
    *("on_message_begin", "on_headers_complete", "on_body", "on_message_complete", "on_response_complete"),
    *("client", "cycle", "flow", "headers", "loop", "parser", "transport", "_unset_keepalive_if_required"),
)
CYCLE_MEMBERS = ("send", "flow", "transport", "disconnected", "chunked_encoding", "response_complete",
         "response_started", "message_event", "more_body")  # fmt: skip


def check_uvicorn_internals() -> None:
    """Raises ResourceError naming what is missing, before a connection would."""
    for kind, names in ((HttpToolsProtocol, PROTOCOL_MEMBERS), (RequestResponseCycle, CYCLE_MEMBERS)):
        missing = missing_members(kind, names)
        if missing:
            raise ResourceError(
                f"uvicorn {version('uvicorn')} has no {kind.__name__}.{missing[0]}, which the gateway needs; "
                f"install a version that llmops allows: {install_command()}"
            )


def missing_members(kind: type, names: Iterable[str]) -> list[str]:
    """Those of `names` that are neither of the class nor set when one is made."""
    made = vars(kind).get("__init__")
    known = {*dir(kind), *(made.__code__.co_names if made is not None else ())}
    return [name for name in names if name not in known]
