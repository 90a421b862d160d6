"""The interface between the runner and a protocol."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from llmops.perf.records import Record, Request


@dataclass(kw_only=True)
class RequestOptions:
    """Options of all requests. `extra` is merged into every body."""

    stream: bool = True
    ignore_eos: bool = True
    timeout: float = 600.0
    api_key: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)


class Client(Protocol):
    """A client of one server, for any number of concurrent requests."""

    async def send(self, request: Request, start: float | None = None) -> Record:
        """Send a request and wait for its end.

        Failures of the server are in the record and never raised.

        Args:
            request: The request.
            start: Time of `time.perf_counter` from which latencies count, or None for now.
        """
        ...

    async def close(self) -> None: ...
