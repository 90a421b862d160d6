"""The interface between the runner and the client of a protocol."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from llmops.perf.records import Record, Request


@dataclass(kw_only=True)
class RequestOptions:
    """Options of all requests of a run.

    Attributes:
        stream: True to request streamed answers.
        ignore_eos: True to request answers of full length.
        timeout: Seconds after which a request fails.
        api_key: The API key, or None.
        extra: Fields that are merged into the body of every request.
        headers: HTTP headers of every request.
    """

    stream: bool = True
    ignore_eos: bool = True
    timeout: float = 600.0
    api_key: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)


class Client(Protocol):
    """A client of one server, for any number of concurrent requests."""

    async def send(self, request: Request, start: float | None = None) -> Record:
        """Send a request, wait for its end, and return its record.

        A failure of the server is stored in the record and never raised.

        Args:
            request: The request.
            start: Time of `time.perf_counter` from which latencies count, or None for the current
                time.
        """
        ...

    async def close(self) -> None: ...
