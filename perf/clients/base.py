"""The interface between the runner and a protocol."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from llmops.perf.records import Record, Request


@dataclass(kw_only=True)
class RequestOptions:
    """How requests are sent; `extra` is merged into every body."""

    stream: bool = True
    ignore_eos: bool = True
    timeout: float = 600.0
    api_key: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)


class Client(Protocol):
    """Sends requests to one server. One instance serves any number of requests at a time."""

    async def send(self, request: Request, start: float | None = None) -> Record:
        """Send and wait for the end. Never raises for what the server does: that is in the record.

        `start` is when the clock began (seconds, `time.perf_counter`), now if it is None.
        """
        ...

    async def close(self) -> None: ...
